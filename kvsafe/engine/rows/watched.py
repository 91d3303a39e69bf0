# SPDX-License-Identifier: Apache-2.0
"""The primary tier with the machine beside it (`monitor: log` and `enforce`).

Tells `kvsafe.lifecycle.monitor` what vLLM's class and ours have done, after they have done it.
What the monitor says never reaches vLLM's bookkeeping; `Watch` decides what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from kvsafe.engine.counters import DIVERGENCES, MONITOR_STOPPED, Counters
from kvsafe.engine.journal import logger
from kvsafe.engine.rows.primary import SealedPrimaryTier
from kvsafe.lifecycle.monitor import HIT, MISS, WAIT, Divergence, Monitor

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS


class Watch:
    """What follows from a divergence: a count, one log line per law, and, in `enforce`, a stop."""

    def __init__(self, monitor: Monitor, counters: Counters, *, enforce: bool) -> None:
        self.monitor = monitor
        self.stopped = False
        self._counters = counters
        self._enforce = enforce
        self._told: set[str] = set()

    def look(self) -> None:
        """Take what the monitor has found since the last look. Called once per step."""
        if self.monitor.found:
            for found in self.monitor.take_found():
                self._tell(found)

    def fault(self, exc: Exception) -> None:
        """The monitor itself failed: as good as a divergence, and never the engine's problem."""
        self._tell(Divergence("the monitor works", "no error", type(exc).__name__))

    def _tell(self, found: Divergence) -> None:
        self._counters.add(DIVERGENCES, 1, (found.law,))
        if found.law not in self._told:
            self._told.add(found.law)
            logger.error("kvsafe: monitor: %s (further ones are counted only)", found)
        if self._enforce and not self.stopped:
            self.stopped = True
            self._counters.add(MONITOR_STOPPED)
            logger.error(
                "kvsafe: monitor: no chunk is offered or stored from now on; requests are served "
                "by recomputing; restart the engine and report this"
            )


class WatchedPrimaryTier(SealedPrimaryTier):
    """A `SealedPrimaryTier` whose every step is told to a monitor."""

    def __init__(self, counters: Counters, *args: Any, enforce: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._monitor = Monitor(self._num_chunks)
        self.watch = Watch(self._monitor, counters, enforce=enforce)

    @property
    def stopped(self) -> bool:
        """Whether a divergence has stopped offers and stores."""
        return self.watch.stopped

    def end_step(self) -> None:
        """Act on what the monitor found in this step."""
        self.watch.look()

    def note_proven(self, keys: Iterable[OffloadKey]) -> None:
        """These were sealed or opened: they may become ready."""
        for key in keys:
            self._monitor.proven(key)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """The answer as it is without a monitor, and the monitor's word on it."""
        epoch = self._epochs.epoch
        result = super().lookup(key, req_context)
        # Once per chunk and step, so without `_tell`, and without hashing an enum.
        try:
            self._monitor.answered(
                key, HIT if result is _HIT else MISS if result is _MISS else WAIT, epoch
            )
        except Exception as exc:
            self.watch.fault(exc)
        return result

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """As without a monitor."""
        self._tell(self._monitor.begin_offer, keys)
        output = super().prepare_store(keys, req_context)
        self._tell(self._monitor.end_offer, output is not None)
        self._recount()
        return output

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """End writes, well or badly."""
        if not success:
            self._tell(self._monitor.begin_failure, keys)
        super().complete_store(keys, req_context, success)
        if success:
            self._tell(self._monitor.readied, keys)
        else:
            self._tell(self._monitor.end_failure)
        self._recount()

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin."""
        super().complete_load(keys, req_context)
        self._recount()

    def withdraw(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Stop offering these chunks."""
        keys = list(keys)
        removed = super().withdraw(keys)
        for key in keys:
            if key in self._withdrawn:
                self._tell(self._monitor.withdrawn, key)
        return removed

    def reset_cache(self) -> None:
        """Forget every chunk."""
        super().reset_cache()
        self._monitor.reset()

    def _unpinned(self, keys: Collection[OffloadKey]) -> None:
        get = self._policy.get
        counts = [None if (chunk := get(key)) is None else chunk.ref_cnt for key in keys]
        self._tell(self._monitor.unpinned, keys, counts)
        super()._unpinned(keys)

    def _prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext, *, record_access: bool
    ) -> LoadStoreSpec:
        spec = super()._prepare_load(keys, req_context, record_access=record_access)
        get = self._policy.get
        self._tell(self._monitor.pinned, keys, [get(key).ref_cnt for key in keys])
        return spec

    def _allocate_chunks(self, keys: list[OffloadKey]) -> list[ChunkStatus]:
        chunks: list[ChunkStatus] = super()._allocate_chunks(keys)
        given = [chunk.chunk_id for chunk in chunks]
        epoch = self._row_epochs[given[0]] if given else 0
        self._tell(self._monitor.allocated, keys, given, epoch)
        return chunks

    def _free_chunk(self, chunk: ChunkStatus) -> None:
        self._tell(self._monitor.freed, chunk.chunk_id)
        super()._free_chunk(chunk)

    def _recount(self) -> None:
        self._tell(
            self._monitor.counted,
            self._num_evictable_cache_chunks,
            self._num_write_pending_chunks,
            self._get_num_free_chunks(),
            self._held_back,
        )

    def _tell(self, step: Callable[..., None], *told: Any) -> None:
        try:
            step(*told)
        except Exception as exc:  # a fault of the monitor is never the engine's
            self.watch.fault(exc)


def primary_tier(monitor: str, counters: Counters, *args: Any, **kwargs: Any) -> SealedPrimaryTier:
    """The primary tier, watched or not. `monitor` is `off`, `log` or `enforce`."""
    if monitor == "off":
        return SealedPrimaryTier(*args, **kwargs)
    return WatchedPrimaryTier(counters, *args, enforce=monitor == "enforce", **kwargs)

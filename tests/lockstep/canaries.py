# SPDX-License-Identifier: Apache-2.0
"""The real classes with one small fault each, which the lockstep has to notice."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager


class UnpinsOnce(CPUOffloadingManager):
    """A chunk with two readers is idle after the first: off by one."""

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            chunk = self._policy.get(key)
            if chunk is not None and chunk.ref_cnt == 2:
                chunk.ref_cnt = 1
        super().complete_load(keys, req_context)


class KeepsFailed(CPUOffloadingManager):
    """A failed store becomes ready."""

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        super().complete_store(keys, req_context, True)


class LosesRows(CPUOffloadingManager):
    """The row of a failed store is not given back."""

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        free = list(self._free_list)
        super().complete_store(keys, req_context, success)
        if not success:
            self._free_list[:] = free


class CountsTwice(CPUOffloadingManager):
    """The counter of idle chunks rises twice when a store is complete."""

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        super().complete_store(keys, req_context, success)
        self._num_evictable_cache_chunks += int(success and len(keys) > 2)


class LearnsLate(CPUOffloadingManager):
    """A refused store teaches the policy nothing."""

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Any:
        if len(keys) > self._get_num_free_chunks() + self._num_evictable_cache_chunks:
            return None
        return super().prepare_store(keys, req_context)


class SaysNothing(CPUOffloadingManager):
    """Evictions are not announced."""

    def take_events(self) -> Any:
        return [event for event in super().take_events() if not event.removed]


class BelievesAll(TieringOffloadingManager):
    """A promotion that failed is ready all the same."""

    def _complete_promotion(self, job_metadata: Any, completed_job: Any) -> None:
        completed_job.success = True
        super()._complete_promotion(job_metadata, completed_job)


class ForgetsParked(TieringOffloadingManager):
    """Keys that wait for their write are never cascaded."""

    def _flush_pending_cascades(self) -> None:
        for name, state in list(self._req_state.items()):
            if state.pending_cascade_keys:
                state.pending_cascade_keys.clear()
                self._maybe_finalize_request(name)


class FinishesEarly(TieringOffloadingManager):
    """Tiers hear of the end of a request whose store has not been cascaded yet."""

    def _maybe_finalize_request(self, req_id: str, exclude_tier_idx: int | None = None) -> None:
        state = self._req_state[req_id]
        if state.is_finished:
            state.pending_cascade_keys.clear()
        super()._maybe_finalize_request(req_id, exclude_tier_idx)


class KeepsPin(TieringOffloadingManager):
    """A cascade that failed keeps its chunk pinned."""

    def _process_finished_jobs(self) -> None:
        for tier in self.secondary_tiers:
            results = getattr(tier, "results", [])
            for result in results:
                job = self._jobs.get(result.job_id)
                if job is not None and not job.transfer_job.is_promotion and not result.success:
                    self.primary_tier.prepare_read(job.transfer_job.keys, job[0].req_context)
        super()._process_finished_jobs()


class SleepsEarly(TieringOffloadingManager):
    """Says nothing of work under way."""

    def has_pending_work(self) -> bool:
        return bool(self._pending_load_submissions)


PRIMARY = (UnpinsOnce, KeepsFailed, LosesRows, CountsTwice, LearnsLate, SaysNothing)
TIERED = (BelievesAll, ForgetsParked, FinishesEarly, KeepsPin, SleepsEarly)

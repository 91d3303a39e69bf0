# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM in a few lines: rows, a tier whose jobs end by hand, a manager over both.

Nothing of kvsafe is used here, so that each reproducer can be handed to vLLM as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    ParentManager,
    SecondaryTierManager,
    TransferJob,
)
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

ROW_BYTES = 64


def key(number: int, group: int = 0) -> OffloadKey:
    """An offload key."""
    return make_offload_key(bytes([number]) * 32, group)


class Rows:
    """Memory in place of the shared region."""

    def __init__(self, rows: int) -> None:
        self.view = np.zeros((rows, ROW_BYTES), dtype=np.uint8).data

    def create_kv_memoryview(self) -> memoryview:
        """All rows."""
        return self.view

    def cleanup(self) -> None:
        """Nothing to give back."""


class Tier(SecondaryTierManager):
    """A tier: `has` are its keys, jobs wait in `jobs` until `end` is called."""

    def __init__(
        self,
        rows: memoryview,
        has: Iterable[OffloadKey] = (),
        policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL,
        serve: Callable[[ParentManager], None] | None = None,
    ) -> None:
        super().__init__(SimpleNamespace(), rows, "hand")
        self.has = set(has)
        self.jobs: list[TransferJob] = []
        self.finished: list[str] = []
        self._results: list[JobResult] = []
        self._policy, self._serve = policy, serve

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether the key is there."""
        return LookupResult.HIT if key in self.has else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Take a job."""
        self.jobs.append(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Take a job."""
        self.jobs.append(job_metadata)

    def end(self, success: bool = True) -> None:
        """End every job."""
        for job in self.jobs:
            if success and not job.is_promotion:
                self.has.update(job.keys)
            self._results.append(JobResult(job.job_id, success))
        self.jobs.clear()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What was ended."""
        results, self._results = self._results, []
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """The policy that was asked for."""
        return RequestOffloadingContext(policy=self._policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Note it."""
        self.finished.append(req_context.req_id)

    def serve_external_requests(self, parent: ParentManager) -> None:
        """What a peer asks for, if there is one."""
        if self._serve is not None:
            self._serve(parent)

    def drain_jobs(self) -> None:
        """End every job."""
        self.end()


class Stage:
    """A tiering manager over some rows and tiers, and the engine's calls on it."""

    def __init__(self, rows: int, policy: str = "lru") -> None:
        self.memory = Rows(rows)
        self.primary = CPUPrimaryTierOffloadingManager(
            rows, self.memory, cache_policy=policy, enable_events=True
        )
        self.tiers: list[Tier] = []
        self.manager: Any = None

    def tier(self, **options: Any) -> Tier:
        """One more tier; all of them before the first call."""
        self.tiers.append(Tier(self.memory.view, **options))
        return self.tiers[-1]

    def begin(self, name: str) -> ReqContext:
        """A request arrives."""
        if self.manager is None:
            self.manager = TieringOffloadingManager(self.primary, list(self.tiers))
        context = ReqContext(req_id=name)
        self.manager.on_new_request(context)
        return context

    def store(self, context: ReqContext, *keys: OffloadKey) -> None:
        """Store from the offer to readiness."""
        assert self.manager.prepare_store(keys, context) is not None
        self.manager.complete_store(keys, context)

    def step(self, times: int = 1) -> None:
        """Steps of the engine end; tiers end what they have."""
        for _ in range(times):
            self.manager.on_schedule_end(ScheduleEndContext((), ()))
            for tier in self.tiers:
                tier.end()

    def refcount(self, key: OffloadKey) -> int | None:
        """Readers of a chunk, -1 while it is written, None if it is not there."""
        chunk = self.primary._policy.get(key)
        return None if chunk is None else int(chunk.ref_cnt)


def rows_in_use(manager: Any, keys: Collection[OffloadKey]) -> tuple[int, int]:
    """(rows that are neither free nor fresh, chunks that are there) of a primary tier."""
    free = len(manager._free_list) + manager._num_chunks - manager._num_allocated_chunks
    there = sum(manager._policy.get(key) is not None for key in keys)
    return manager._num_chunks - free, there

# SPDX-License-Identifier: Apache-2.0
"""A secondary tier by hand: objects in a dict; jobs end when and how the driver says."""

from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from fuzz.world.outcome import WrongWorld


class HandTier(SecondaryTierManager):
    """Keeps to the contract of vLLM's base class, and holds vLLM to its side of it."""

    medium = Medium.STORAGE

    def __init__(self, rows: memoryview, counts: Counter[str], *, request_level: bool) -> None:
        super().__init__(SimpleNamespace(), rows, "hand")
        self._rows = rows
        self._counts = counts
        self._policy = OffloadPolicy.REQUEST_LEVEL if request_level else OffloadPolicy.CHUNK_LEVEL
        self.objects: dict[OffloadKey, bytes] = {}
        self.jobs: list[TransferJob] = []
        self.results: list[JobResult] = []
        self.open_requests: set[str] = set()
        self.shrugs = 0
        self.mute = False
        self.lying = False
        self.hung = False
        self.dead = False

    # What vLLM calls

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Present, absent, or for as long as the driver wants: ask again.

        A tier that lies has every object, until one reads it.
        """
        if (self.shrugs > 0 or self.mute) and not self.dead:
            self.shrugs -= not self.mute
            return LookupResult.RETRY
        here = key in self.objects and not self.dead
        return LookupResult.HIT if here else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Take a job; nothing is copied yet."""
        if job_metadata.req_context.req_id not in self.open_requests:
            raise WrongWorld("unbalanced", "store submitted to a tier after the request's end")
        self._counts["cascade"] += 1
        self.jobs.append(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Take a job; nothing is copied yet."""
        self._counts["promotion"] += 1
        self.jobs.append(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What the driver has ended."""
        results, self.results = self.results, []
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """The tier's wish for this request."""
        self.open_requests.add(req_context.req_id)
        return RequestOffloadingContext(policy=self._policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Must be told once."""
        if req_context.req_id not in self.open_requests:
            raise WrongWorld("unbalanced", "the end of a request was told to a tier twice")
        self.open_requests.discard(req_context.req_id)

    def has_pending_work(self) -> bool:
        """Whether jobs wait."""
        return bool(self.jobs or self.results)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """None: objects come and go here without being told."""
        return ()

    def drain_jobs(self) -> None:
        """End everything, as a tier has to; one that hangs returns with its jobs undone."""
        self.end_all()

    # What the driver does

    def end(self, index: int, *, success: bool, count: int | None = None) -> None:
        """End one job; of a load that fails, `count` objects arrive all the same."""
        job = self.jobs.pop(index)
        if job.is_promotion:
            self._end_load(job, success=success, count=count)
        else:
            self._end_store(job, success=success)

    def end_all(self) -> None:
        """End every job, as a tier does that is left to itself."""
        while self.jobs and not self.hung:
            self.end(0, success=not self.dead)

    def _end_store(self, job: TransferJob, *, success: bool) -> None:
        if success:
            for key, row in zip(job.keys, job.chunk_ids, strict=True):
                self.objects[key] = bytes(self._row(int(row)))
        self._counts["cascade_done" if success else "cascade_failed"] += 1
        self.results.append(JobResult(job.job_id, success))

    def _end_load(self, job: TransferJob, *, success: bool, count: int | None) -> None:
        keys = list(job.keys)
        success = success and not self.lying
        wanted = keys if success else keys[: count or 0]
        arrived = [key for key in wanted if key in self.objects]
        places = dict(zip(keys, job.chunk_ids, strict=True))
        for key in arrived:
            self._row(int(places[key]))[:] = self.objects[key]
        whole = success and len(arrived) == len(keys)
        self._counts["promotion_done" if whole else "promotion_failed"] += 1
        self.results.append(JobResult(job.job_id, whole, None if whole else tuple(arrived) or None))

    def _row(self, row: int) -> memoryview:
        return self._rows[row : row + 1].cast("B")

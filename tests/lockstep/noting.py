# SPDX-License-Identifier: Apache-2.0
"""What every tier in lockstep does besides its work: it notes what it is told."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import (
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob


class Noting(SecondaryTierManager):
    """Stands before a real tier among the bases of a class; may want whole requests."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.told: list[tuple[Any, ...]] = []
        self.wish = False

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Note it; answer with the wish of the moment."""
        self.told.append(("arrive", req_context.req_id))
        policy = OffloadPolicy.REQUEST_LEVEL if self.wish else OffloadPolicy.CHUNK_LEVEL
        return RequestOffloadingContext(policy=policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Note it."""
        super().on_request_finished(req_context)
        self.told.append(("finished", req_context.req_id))

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Note it."""
        super().submit_store(job_metadata)
        self._note_job("store", job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Note it."""
        super().submit_load(job_metadata)
        self._note_job("load", job_metadata)

    def _note_job(self, what: str, job: TransferJob) -> None:
        self.told.append((what, job.job_id, job.req_context.req_id, tuple(job.keys)))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Note it."""
        super().on_schedule_end(context)
        self.told.append(("step",))

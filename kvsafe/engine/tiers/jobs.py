# SPDX-License-Identifier: Apache-2.0
"""Transfers of a tier of ours that are under way: what is open of each, and what vLLM is told."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobResult

_PAUSE_S = 0.001


@dataclass(slots=True, kw_only=True)
class OpenJob:
    """A transfer under way: its keys, how many rows of it are open, which places succeeded."""

    number: int
    keys: list[OffloadKey]
    load: bool
    started: float = field(default_factory=time.monotonic)
    open: int = field(init=False)
    good: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.open = len(self.keys)


Job = TypeVar("Job", bound=OpenJob)


class OpenJobs(Generic[Job]):
    """The jobs of one tier, by number. Each row succeeds or fails by itself."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._jobs: dict[int, Job] = {}
        self._ended: list[JobResult] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, number: int) -> Job:
        return self._jobs[number]

    def begin(self, job: Job) -> None:
        """A transfer was submitted. One without keys is ended by whoever submits it."""
        self._jobs[job.number] = job

    def note(self, number: int, rows: int, good: Iterable[int]) -> bool:
        """Of so many rows these places succeeded. Whether all of the job, to be ended, is known."""
        job = self._jobs[number]
        job.open -= rows
        job.good.update(good)
        return job.open == 0

    def end(self, number: int) -> Job:
        """Tell of a job when vLLM asks next: of a load in part, also which keys have arrived."""
        job = self._jobs.pop(number)
        whole = len(job.good) == len(job.keys)
        good = tuple(job.keys[place] for place in sorted(job.good))
        self._ended.append(
            JobResult(
                job_id=number,
                success=whole,
                successful_keys=good if job.load and good and not whole else None,
                transfer_time=time.monotonic() - job.started,
                transfer_bytes=len(good) * self._row_bytes or None,
            )
        )
        return job

    def ended(self) -> list[JobResult]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def drain(self, collect: Callable[[], None]) -> None:
        """Wait until every job has ended: by its work or by its deadline."""
        collect()
        while self._jobs:
            time.sleep(_PAUSE_S)
            collect()

# SPDX-License-Identifier: Apache-2.0
"""Patience with a tier: every wait for it ends, and what it still touches is kept apart.

A tier may never answer: a read on a share that hangs, a FIFO in place of a file. The jobs that
are overdue are reported as failed, so that pins and waiting requests are released. A load that
was given up may still write into its rows at any later time; those rows are taken out of use
until the tier has reported the job after all.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from vllm.v1.kv_offload.base import OffloadKey

from kvsafe.engine.journal import logger


class RowKeeper(Protocol):
    """Who can take rows out of use."""

    def hold_back(self, rows: Iterable[int]) -> None:
        """Give these rows to nobody until they are returned."""
        ...

    def give_back(self, rows: Iterable[int]) -> None:
        """These rows may be used again."""
        ...

    def ready(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Those of the keys whose chunks may be read."""
        ...

    def note_proven(self, keys: Iterable[OffloadKey]) -> None:
        """What was promoted for these keys was opened."""
        ...


@dataclass(frozen=True, slots=True)
class _Watched:
    since: float
    limit_s: float
    written_rows: tuple[int, ...]


class JobWatch:
    """The jobs of one tier and how long each may take. One thread (the scheduler's)."""

    def __init__(self, keeper: RowKeeper) -> None:
        self._keeper = keeper
        self._running: dict[int, _Watched] = {}
        self._given_up: dict[int, tuple[int, ...]] = {}

    @property
    def owes(self) -> bool:
        """Whether the tier still has to report a job that was given up."""
        return bool(self._given_up)

    def begin(self, job: int, limit_s: float, written_rows: Iterable[int] = ()) -> None:
        """A job goes to the tier; `written_rows` are those that it writes into."""
        self._running[job] = _Watched(time.monotonic(), limit_s, tuple(written_rows))

    def knows(self, job: int) -> bool:
        """Whether the tier was given this job and has not reported it yet."""
        return job in self._running or job in self._given_up

    def end(self, job: int) -> bool:
        """The tier has reported a job. False if it was given up before: then ignore it."""
        if self._running.pop(job, None) is not None:
            return True
        rows = self._given_up.pop(job, None)
        if rows is not None:
            self._keeper.give_back(rows)
        return rows is None

    def overdue(self) -> list[int]:
        """Give up and return the jobs that have taken longer than they may."""
        now = time.monotonic()
        return self.give_up(
            [job for job, seen in self._running.items() if now - seen.since > seen.limit_s]
        )

    def give_up_all(self) -> list[int]:
        """Give up and return every job that is running."""
        return self.give_up(list(self._running))

    def give_up(self, jobs: list[int]) -> list[int]:
        """Wait for these no longer; rows that they write into are kept apart. Returns them."""
        for job in jobs:
            rows = self._running.pop(job).written_rows
            self._given_up[job] = rows
            self._keeper.hold_back(rows)
        return jobs


def ends_within(action: Callable[[], None], limit_s: float, what: str) -> bool:
    """Run a call that may hang in a thread of its own. False if it has not ended in time.

    The thread is a daemon: a call that never ends does not keep the process from ending.
    """
    thread = threading.Thread(target=_told(action, what), name=f"kvsafe-{what}", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def _told(action: Callable[[], None], what: str) -> Callable[[], None]:
    def run() -> None:
        try:
            action()
        except Exception:  # a tier that cannot even stop must not take the engine with it
            logger.exception("kvsafe: %s of a tier failed", what)

    return run

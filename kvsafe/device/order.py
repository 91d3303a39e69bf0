# SPDX-License-Identifier: Apache-2.0
"""Which task may run when: tasks that touch the same row or the same block go one by one.

Pure book-keeping without a lock: the copier calls it under its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvsafe.device.geometry import Geometry
from kvsafe.device.plan import Direction, RowPlan


@dataclass(eq=False, slots=True)
class CopyTask:
    """One row of one job.  `ticket` is the engine's, the rest is the order's book-keeping."""

    job: int
    direction: Direction
    row: RowPlan
    ticket: object = None
    keys: tuple[int, ...] = ()
    number: int = 0
    waits: int = 0
    over: bool = False
    followers: list["CopyTask"] = field(default_factory=list)


@dataclass(slots=True)
class _BadBlock:
    """A block whose load failed; stores numbered below `until` must not read it."""

    job: int
    until: int | None = None


class TaskOrder:
    """Submission order per row and per device block, and the blocks that failed loads left.

    A row is key -(row + 1); a block is class * num_blocks + block, where groups that may share a
    tensor are one class.  A task waits for the previous task of each of its keys.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._blocks = geometry.num_blocks
        self._classes = geometry.group_classes
        self._last: dict[int, CopyTask] = {}
        self._bad: dict[int, _BadBlock] = {}
        self._bad_of: dict[int, list[int]] = {}
        self._next = 0

    def __len__(self) -> int:
        """Keys that some unfinished task holds; bad blocks are not counted."""
        return len(self._last)

    def add(self, task: CopyTask) -> bool:
        """Queue a task behind all that conflict with it; True if it may run now."""
        task.keys = self._keys(task.row)
        task.number = self._next
        self._next += 1
        for key in task.keys:
            before = self._last.get(key)
            if before is not None:
                before.followers.append(task)
                task.waits += 1
            self._last[key] = task
        return task.waits == 0

    def _keys(self, row: RowPlan) -> tuple[int, ...]:
        base = self._classes[row.group] * self._blocks
        return (-row.row - 1, *{base + block for _, block in row.blocks})

    def finish(self, task: CopyTask, failed: bool) -> list[CopyTask]:
        """Take a task out; returns those that may run now."""
        for key in task.keys:
            if self._last.get(key) is task:
                del self._last[key]
            if key >= 0 and task.direction is Direction.LOAD:
                self._mark(key, task.job, failed)
            self._sweep(key)
        return self._release(task)

    def _mark(self, key: int, job: int, failed: bool) -> None:
        if failed:
            self._bad[key] = _BadBlock(job)
            self._bad_of.setdefault(job, []).append(key)
        else:
            self._bad.pop(key, None)

    def _sweep(self, key: int) -> None:
        """A reported bad block is forgotten when nobody queues for it any more."""
        bad = self._bad.get(key)
        if bad is not None and bad.until is not None and key not in self._last:
            del self._bad[key]

    @staticmethod
    def _release(task: CopyTask) -> list[CopyTask]:
        ready = []
        for follower in task.followers:
            follower.waits -= 1
            if follower.waits == 0:
                ready.append(follower)
        task.followers.clear()
        return ready

    def unloaded_source(self, task: CopyTask) -> int | None:
        """The block that keeps a store, which is otherwise free to run, from being stored.

        Its load failed and whoever submitted the store could not know: the store was submitted
        before the failure was reported.
        """
        if task.direction is Direction.LOAD or not self._bad:
            return None
        for key in task.keys:
            bad = self._bad.get(key)
            if bad is not None and (bad.until is None or task.number < bad.until):
                return key % self._blocks
        return None

    def reported(self, jobs: Iterable[int]) -> None:
        """The outcomes of these jobs were handed out: later stores know what they do."""
        for job in jobs:
            for key in self._bad_of.pop(job, ()):
                bad = self._bad.get(key)
                if bad is not None and bad.job == job:
                    bad.until = self._next
                    self._sweep(key)

# SPDX-License-Identifier: Apache-2.0
"""The order of copies: who may run, who waits, who must not read what a failed load left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from fuzz.target import ByteSource, Target, demand
from kvsafe.device.geometry import Geometry
from kvsafe.device.order import CopyTask, TaskOrder
from kvsafe.device.plan import Direction, RowPlan
from kvsafe.tiers.lookups import LookupDesk

_BLOCKS = 5
LIMIT = 6
_CLASSES = (0, 0, 1)


class Order(Target):
    """The book-keeping of copies and of lookups, step by step beside a plain second one.

    Oracles: a copy runs exactly when nobody before it holds one of its rows or blocks, so none
    runs early and none is forgotten; a store reads no block whose load failed unbeknown to its
    caller; every lookup gets the answer that was given.
    """

    name = "order"
    max_len = 200
    memory_mib = 64

    def once(self, data: bytes) -> None:
        source = ByteSource(data)
        if source.below(4) == 3:
            Lookups().run(source)
        else:
            Copies().run(source)

    def seeds(self) -> list[bytes]:
        return [
            bytes(range(0, 160)),
            bytes([3]) + bytes(range(60)),
            bytes((5 * n) % 256 for n in range(120)),
        ]


class Copies:
    """Tasks in the order of their submission, and what is known of each block."""

    def __init__(self) -> None:
        geometry = SimpleNamespace(num_blocks=_BLOCKS, group_classes=_CLASSES)
        self.order = TaskOrder(cast(Geometry, geometry))
        self.open: list[CopyTask] = []
        self.running: list[CopyTask] = []
        self.submitted: dict[int, int] = {}
        self.failed: dict[tuple[int, int], int] = {}
        self.reported: dict[int, int] = {}
        self.clock = 0

    def run(self, source: ByteSource) -> None:
        """Until the bytes are used up."""
        while source.left and self.clock < 80:
            self.clock += 1
            what = source.below(8)
            if what < 4:
                self._add(source)
            elif what < 7 and self.running:
                self._finish(source)
            elif what == 7 and self.failed:
                self._report(source.pick(sorted(set(self.failed.values()))))
            self._compare()
        self._drain(source)

    def _add(self, source: ByteSource) -> None:
        direction = Direction.LOAD if source.flag() else Direction.STORE
        blocks = sorted({source.between(1, _BLOCKS - 1) for _ in range(source.between(1, 3))})
        row = RowPlan(source.below(4), source.below(len(_CLASSES)), tuple(enumerate(blocks)))
        task = CopyTask(self.clock, direction, row)
        self.submitted[task.job] = self.clock
        self.open.append(task)
        if self.order.add(task):
            self.running.append(task)

    def _finish(self, source: ByteSource) -> None:
        task = source.pick(self.running)
        source_of = self.order.unloaded_source(task)
        demand((source_of is not None) == self._reads_bad(task), "a store of what was not loaded")
        failed = source.below(4) == 3
        self.running.remove(task)
        self.open.remove(task)
        if task.direction is Direction.LOAD:
            for block in self._blocks(task):
                self.failed.pop(block, None)
                if failed:
                    self.failed[block] = task.job
        self.running += self.order.finish(task, failed)

    def _report(self, job: int) -> None:
        self.reported.setdefault(job, self.clock)
        self.order.reported([job])

    def _reads_bad(self, task: CopyTask) -> bool:
        """Whether the last load of one of its blocks failed and was reported later than it came."""
        if task.direction is Direction.LOAD:
            return False
        jobs = [self.failed[block] for block in self._blocks(task) if block in self.failed]
        came = self.submitted[task.job]
        return any(self.reported.get(job, came + 1) > came for job in jobs)

    @staticmethod
    def _blocks(task: CopyTask) -> set[tuple[int, int]]:
        return {(_CLASSES[task.row.group], block) for _, block in task.row.blocks}

    def _compare(self) -> None:
        held_rows: set[int] = set()
        held: set[tuple[int, int]] = set()
        free = []
        for task in self.open:
            if task.row.row not in held_rows and not self._blocks(task) & held:
                free.append(task.job)
            held_rows.add(task.row.row)
            held |= self._blocks(task)
        running = [task.job for task in self.running]
        demand(len(set(running)) == len(running), "a copy was started twice", "accepted")
        demand(
            set(running) <= set(free), "a copy runs beside one that it conflicts with", "accepted"
        )
        demand(set(running) == set(free), "a copy that may run was forgotten")

    def _drain(self, source: ByteSource) -> None:
        while self.running:
            self._finish(source)
            self._compare()
        demand(not self.open, "copies wait for ever")
        demand(len(self.order) == 0, "keys are held by nobody")


class Lookups:
    """One desk, and a plain table of who waits for what and what was answered."""

    def __init__(self) -> None:
        self.desk = LookupDesk(LIMIT)
        self.asked: dict[bytes, set[int]] = {}
        self.answers: dict[bytes, bool | None] = {}
        self.away: list[list[bytes]] = []
        self.sent: set[bytes] = set()

    def run(self, source: ByteSource) -> None:
        """Until the bytes are used up."""
        while source.left:
            name, request = bytes([source.below(8)]), source.below(3)
            what = source.below(8)
            if what < 3:
                self._ask(name, request)
            elif what == 3:
                self._send()
            elif what == 4 and self.away:
                self._answer(source)
            elif what == 5:
                self._settle(name, source.flag())
            elif what > 5:
                self._forget(request)
            known, kept = len(self.answers), len(self.desk)
            demand(kept == known, f"{kept} records for {known} names", "memory")

    def _ask(self, name: bytes, request: int) -> None:
        full = name not in self.answers and len(self.answers) >= LIMIT
        found = self.desk.ask(name, request)
        if full:
            demand(found is False, "a lookup over the limit that waits", "memory")
            return
        self.asked.setdefault(name, set()).add(request)
        known = self.answers.setdefault(name, None)
        demand(found is known, "another answer than was given")

    def _send(self) -> None:
        batches = self.desk.batches()
        names = [name for batch in batches for name in batch]
        new = {name for name in self.answers if name not in self.sent}
        demand(sorted(names) == sorted(new), "other names are looked for than were asked for")
        self.sent |= new
        self.away += batches

    def _answer(self, source: ByteSource) -> None:
        names = self.away.pop(source.below(len(self.away)))
        hits = [source.flag() for _ in names]
        self.desk.answer(names, hits)
        for name, hit in zip(names, hits, strict=True):
            if self.answers.get(name, True) is None:
                self.answers[name] = hit
                self._drop(name)

    def _settle(self, name: bytes, hit: bool) -> None:
        self.desk.settle([name], hit)
        if name in self.answers:
            self.answers[name] = hit
            self._drop(name)

    def _forget(self, request: int) -> None:
        self.desk.forget(request)
        for name in [name for name, who in self.asked.items() if request in who]:
            self.asked[name].discard(request)
            if self.answers[name] is not None or name not in self.sent:
                self._drop(name)

    def _drop(self, name: bytes) -> None:
        """A name that nobody asks for any more is forgotten."""
        if not self.asked[name]:
            del self.asked[name], self.answers[name]
            self.sent.discard(name)

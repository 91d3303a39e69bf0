# SPDX-License-Identifier: Apache-2.0
"""vLLM's `TieringOffloadingManager` over tiers by hand, driven in lockstep with the machine.

Rows are real memory: what a worker stores is the content of its key, and what becomes ready,
by a store or a promotion, has to be the content of its key.
"""

from __future__ import annotations

import mmap
from functools import partial
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy, ScheduleEndContext
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.engine_unit.sealed_world import HandTier
from tests.lockstep.book import DIVERGENCES
from tests.lockstep.compare import differ
from tests.lockstep.noting import Noting
from tests.lockstep.primary import KEYS, ROWS, SLOTS, Primary
from tests.lockstep.runs import Dice, Make
from tests.lockstep.tiers import TieredBook


class Memory:
    """Rows as vLLM's primary tier wants them."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        # Whole pages: direct I/O needs them.
        self.rows = memoryview(mmap.mmap(-1, rows * row_bytes)).cast("B", (rows, row_bytes))

    def create_kv_memoryview(self) -> memoryview:
        """All rows."""
        return self.rows

    def cleanup(self) -> None:
        """Nothing to give back."""


class NotingTier(Noting, HandTier):
    """A tier by hand that notes what it is told."""

    def end(self, number: int, good: int) -> None:
        """End one job; its first `good` keys arrive (a store works if that is all of them)."""
        for jobs, complete in ((self.stores, self._end_store), (self.loads, self.complete_load)):
            for at, job in enumerate(jobs):
                if job.job_id == number:
                    jobs.insert(0, jobs.pop(at))
                    complete(good)
                    return
        raise LookupError(number)

    def _end_store(self, good: int) -> None:
        self.complete_store(success=good == len(self.stores[0].keys))


class Tiered(Primary):
    """Requests come and go over a primary tier and others."""

    weights: ClassVar[dict[str, int]] = {
        "arrive": 4,
        "lookup": 8,
        "prepare_store": 5,
        "complete_store": 5,
        "prepare_load": 3,
        "complete_load": 3,
        "finish": 3,
        "end_job": 8,
        "step": 6,
        "reset": 1,
        "take_events": 1,
        "gauges": 1,
    }
    book: TieredBook
    source = CacheHitSource.EXTERNAL_UNSPECIFIED
    row_bytes = 64

    def __init__(
        self,
        dice: Dice,
        policy: str,
        manager: type[Any] = TieringOffloadingManager,
        primary: type[Any] = CPUPrimaryTierOffloadingManager,
        as_vllm: tuple[str, ...] = tuple(DIVERGENCES),
    ) -> None:
        super().__init__(dice, policy)
        tiers = dice.number(1, 2)
        self.book = self._new_book(TieredBook, policy, tiers=tiers, as_vllm=as_vllm)
        self.memory = Memory(ROWS, self.row_bytes)
        lower = primary(ROWS, self.memory, cache_policy=policy, enable_events=True)
        self.tiers = [NotingTier(self.memory.rows) for _ in range(tiers)]
        self.real = manager(lower, list(self.tiers))
        self.eye.real, self.eye.book = lower, self.book
        self.ids: dict[str, int] = {}

    # Moves

    def arrive(self, dice: Dice) -> None:
        """A request comes; the first tier may want all of it."""
        free = [who for who in range(SLOTS) if self.book.holds("arrive", who, 0)]
        if not free:
            return
        who, positions = dice.pick(free), dice.pick(("all", "first", "none"))
        self.arrived += 1
        self.positions[who], self.ids[f"r{self.arrived}"] = positions, who
        self.tiers[0].wish = wish = dice.rarely(2)
        self.contexts[who] = self.names.context(f"r{self.arrived}", positions)
        answer = self.real.on_new_request(self.contexts[who])
        differ("wish", wish, answer.policy is OffloadPolicy.REQUEST_LEVEL)
        self.book.arrive(who, wish)

    def lookup(self, dice: Dice) -> None:
        """Lookups of one request, one key after the other while they are not missed."""
        who = self._somebody(dice)
        if who is None:
            return
        self._look_up(who, dice.few(range(KEYS), 4))

    def _look_up(self, who: int, keys: list[int]) -> None:
        for key in keys:
            real = self.real.lookup(self.names.keys[key], self.contexts[who])
            differ("lookup", self.book.lookup(who, key), real.name)
            if real is LookupResult.HIT:
                self._look_at_source(who, key)
            if real is LookupResult.MISS:
                return

    def _look_at_source(self, who: int, key: int) -> None:
        promoted = key in self.book.sources.get(who, {})
        source = self.source if promoted else CacheHitSource.HOST
        real = self.real.get_load_source(self.names.keys[key], self.contexts[who])
        differ("source", source, real)

    def complete_store(self, dice: Dice) -> None:
        """A store ends: the worker has written all of it, or it failed."""
        if not self.stores:
            return
        who, keys = self.stores.pop(dice.number(0, len(self.stores) - 1))
        success = not dice.rarely(4)
        if success:
            self._write(keys)
        self.real.complete_store(self.names.real(keys), self.contexts[who], success)
        self.book.complete_store(who, keys, success)

    def _write(self, keys: list[int]) -> None:
        for key, chunk in self.eye.chunks().items():
            if key in keys:
                self.memory.rows[int(chunk.chunk_id) : int(chunk.chunk_id) + 1].cast("B")[:] = (
                    self.content(key)
                )

    def content(self, key: int) -> bytes:
        """The bytes of a chunk."""
        return bytes([key + 1]) * self.row_bytes

    def finish(self, dice: Dice) -> None:
        """A request ends, between steps: none of its promotions waits to be submitted."""
        running = [
            who for who in range(SLOTS) if self.book.running(who) and not self.book.promoting(who)
        ]
        if running:
            who = dice.pick(running)
            self.real.on_request_finished(self.contexts[who])
            self.book.finish(who)

    def end_job(self, dice: Dice) -> None:
        """A tier ends a job; a load may bring a part."""
        jobs = self.book.unreported()
        if not jobs:
            return
        job = dice.pick(jobs)
        good = len(job.keys) if not dice.rarely(3) else dice.number(0, len(job.keys))
        self.tiers[job.tier].end(job.number, good)
        arrived = job.keys[:good] if job.load or good == len(job.keys) else ()
        self.book.end_job(job.number, arrived)

    def step(self, dice: Dice) -> None:
        """A step of the engine ends."""
        self.real.on_schedule_end(ScheduleEndContext((), ()))
        self.book.step()

    def reset(self, dice: Dice) -> None:
        """The cache is reset; tiers end what they have first."""
        if not dice.rarely(4):
            return
        jobs = self.book.unreported()
        for job in sorted(jobs, key=lambda job: job.load):
            self.book.end_job(job.number, job.keys)
        self.real.reset_cache()
        self.book.reset()
        self.stores.clear()

    def gauges(self, dice: Dice) -> None:
        """Usage; the manager's statistics can be taken at any time."""
        self.eye.look_at_gauges()
        self.real.get_stats()

    # Looks

    def look(self) -> None:
        """All that can be compared is the same."""
        self.eye.look()
        book, real = self.book, self.real
        for tier, said in zip(self.tiers, book.said, strict=True):
            differ("tier was told", said, [self._plain(what) for what in tier.told])
            said.clear()
            tier.told.clear()
        jobs = {n: self.names.numbers(job.transfer_job.keys) for n, job in real._jobs.items()}
        differ("jobs", {number: job.keys for number, job in book.jobs.items()}, jobs)
        parked = {
            self.ids[name]: list(self.names.numbers(state.pending_cascade_keys))
            for name, state in real._req_state.items()
        }
        differ("parked", {who: book.parked[who] for who in book._present}, parked)
        differ("busy", book.busy(), real.has_pending_work())
        self._look_at_bytes()

    def _plain(self, what: tuple[Any, ...]) -> tuple[Any, ...]:
        match what:
            case (("load" | "store") as kind, number, name, keys):
                return (kind, number, self.ids[name], self.names.numbers(keys))
            case (kind, name):
                return (kind, self.ids[name])
        return what

    def _look_at_bytes(self) -> None:
        for key, chunk in self.eye.chunks().items():
            if chunk.ref_cnt >= 0:
                row = int(chunk.chunk_id)
                found = bytes(self.memory.rows[row : row + 1].cast("B"))
                assert found == self.content(key), f"key {key}: ready with the bytes of another"


def tiered(policy: str, **parts: Any) -> Make:
    """How to begin such a world."""
    return partial(Tiered, policy=policy, **parts)

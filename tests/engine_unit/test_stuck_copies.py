# SPDX-License-Identifier: Apache-2.0
"""F12 on the worker's side, under vLLM's real scheduler: copies that never end.

Their rows and blocks are kept, because such a copy may still read or write there. Whoever only
waits for what it should bring finds a miss within the deadline, others are served with the rows
that are left, and it is all counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from fuzz.world import Event, Plan, Setting, parts
from fuzz.world import world as world_module
from fuzz.world.checks import at_rest, chunks_of
from fuzz.world.world import World
from kvsafe.engine.counters import REFUSED

SETTING = Setting(rows=12, blocks=40, budget=32, seats=3)


class Course:
    """A world, driven act by act; copies that are `held` have begun and do not end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.held: list[Any] = []
        self.answers = world.engine.answers

    def act(self, name: str, *numbers: int) -> None:
        """One event."""
        self.world.driver.act(Event(name, *numbers))
        self.world.look()

    @contextlib.contextmanager
    def stuck(self) -> Iterator[None]:
        """What begins meanwhile never ends."""
        pool = self.world.parts.copies.hand.pool
        pool.submit = self.held.append
        yield
        del pool.submit

    def let_go(self) -> None:
        """They end after all."""
        pool = self.world.parts.copies.hand.pool
        pool.waiting.extend(self.held)
        self.held.clear()

    def go(self, steps: int = 6) -> None:
        """Steps in which everything else gets done at once, and no time passes."""
        for _ in range(steps):
            self.world.driver._settle_once(0)
            self.world.look()

    def late(self) -> int:
        """Transfers that were told to be late; nothing else is refused here."""
        return int(self.manager.counters.totals[REFUSED])

    @property
    def manager(self) -> Any:
        """Ours."""
        return self.world.half.manager

    def finished(self, name: str) -> bool:
        """Whether the request has ended."""
        return name in self.world.engine.ends

    def usage(self) -> dict[str, float]:
        """What vLLM's gauges show of the rows."""
        stats = self.manager.primary_tier.get_stats()
        return {name: next(iter(by.values())) for name, by in stats.data["data"].items() if by}


@contextlib.contextmanager
def course(setting: Setting = SETTING) -> Iterator[Course]:
    """A world that is settled and judged at the end."""
    with world_module._by_hand() as clock_of:
        world = World(Plan("kvsafe", setting, ()))
        try:
            with parts.at_work(world.parts), clock_of(world.parts.clock):
                found = Course(world)
                yield found
                found.let_go()
                world.driver.settle(world.look)
                at_rest(world.scheduler, world.half, world.parts)
        finally:
            world.close()


def pass_deadline(found: Course) -> None:
    """More than the world's deadline of a minute."""
    found.act("clock", 59)
    found.act("clock", 59)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_store_copy_that_never_ends_delays_nobody_for_long(policy: str) -> None:
    with course(replace(SETTING, policy=policy)) as found:
        found.act("ask", 0, 16, 2)
        with found.stuck():
            found.go()
        stuck = len(found.held)
        assert stuck >= 4 and found.finished("r0")
        # The accelerator forgets; the next request of these tokens waits for what is stored.
        found.act("reset_blocks")
        found.act("ask", 0, 16, 2)
        found.go()
        assert not found.finished("r1") and found.late() == 0
        pass_deadline(found)
        found.go()
        assert found.finished("r1")
        assert found.late() >= 1
        # The pins show, and the rows that are left serve others.
        pending = [chunk for chunk in chunks_of(found.manager).values() if chunk.ref_cnt == -1]
        assert len(pending) >= stuck
        assert any(0 < share < 1 for share in found.usage().values())
        serve_others(found)
        # Late is not lost: it is sealed and offered.
        found.let_go()
        found.go()
        loads = found.world.parts.counts["load"]
        found.act("reset_blocks")
        found.act("ask", 0, 16, 2)
        found.go()
        assert found.finished("r4") and found.world.parts.counts["load"] == loads + 1


def store_and_ask(found: Course, tokens: int) -> None:
    """One request stores its prompt; a second has the same one, which is not in the accelerator."""
    found.act("ask", 0, tokens, 2)
    found.go()
    found.act("reset_blocks")
    found.act("ask", 0, tokens, 2)


def serve_others(found: Course) -> None:
    """Two more requests, r2 and r3, of which the second is served from host memory."""
    loads = found.world.parts.counts["load"]
    found.act("ask", 1, 16, 2)
    found.go()
    assert found.finished("r2")
    found.act("reset_blocks")
    found.act("ask", 1, 16, 2)
    found.go()
    assert found.finished("r3") and found.world.parts.counts["load"] == loads + 1


def test_a_load_copy_that_never_ends_holds_up_its_own_request_alone() -> None:
    with course() as found:
        store_and_ask(found, 16)
        with found.stuck():
            found.act("step")
        assert len(found.held) >= 3
        found.go()
        assert not found.finished("r1") and found.late() == 0
        pass_deadline(found)
        found.go()
        # It cannot be computed in blocks that the copy may still write into; it is told, once.
        assert not found.finished("r1") and found.late() == 1
        pass_deadline(found)
        found.go()
        assert found.late() == 1
        assert any(chunk.ref_cnt > 0 for chunk in chunks_of(found.manager).values())
        serve_others(found)
        # Who wants the same chunks does not wait with it.
        loads = found.world.parts.counts["load"]
        found.act("reset_blocks")
        found.act("ask", 0, 16, 2)
        found.go()
        assert found.finished("r4") and found.world.parts.counts["load"] == loads
        assert not found.finished("r1")
        found.let_go()
        found.go()
        assert found.finished("r1")
        # What was withdrawn has gone with its last reader, and can be stored and loaded again.
        found.act("reset_blocks")
        store_and_ask(found, 17)
        found.go()
        assert found.finished("r6") and found.world.parts.counts["load"] == loads + 1


def test_who_waits_for_the_chunks_of_another_load_waits_no_longer_than_the_deadline() -> None:
    with course() as found:
        store_and_ask(found, 16)
        with found.stuck():
            found.act("step")
        found.act("ask", 0, 16, 2)
        found.go()
        assert not found.finished("r2")
        pass_deadline(found)
        found.go()
        assert found.finished("r2") and not found.finished("r1")


def test_whose_client_goes_away_leaves_its_blocks_to_the_copy() -> None:
    with course() as found:
        found.act("ask", 0, 16, 2)
        found.go()
        found.act("reset_blocks")
        pool = found.world.scheduler.kv_cache_manager.block_pool
        free = pool.free_block_queue.num_free_blocks
        found.act("ask", 0, 16, 2)
        with found.stuck():
            found.act("step")
        assert len(found.held) >= 3
        found.act("abort")
        found.go()
        assert pool.free_block_queue.num_free_blocks < free
        found.act("ask", 1, 16, 2)
        found.go()
        assert found.finished("r2")
        found.let_go()
        found.go()
        assert pool.free_block_queue.num_free_blocks == free

# SPDX-License-Identifier: Apache-2.0
"""F12 on the worker's side, under vLLM's real scheduler: copies that never end.

Their rows and blocks are kept, because such a copy may still read or write there. Whoever only
waits for what it should bring finds a miss within the deadline, others are served with the rows
that are left, and it is all counted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from fuzz.world import Setting
from fuzz.world.checks import chunks_of
from kvsafe.engine.counters import REFUSED
from tests.engine_unit.course import Course, course

SETTING = Setting(rows=12, blocks=40, budget=32, seats=3)


def late(found: Course) -> int:
    """Transfers that were told to be late; nothing else is refused here."""
    return int(found.manager.counters.totals[REFUSED])


def usage(found: Course) -> dict[str, float]:
    """What vLLM's gauges show of the rows."""
    stats = found.manager.primary_tier.get_stats()
    return {name: next(iter(by.values())) for name, by in stats.data["data"].items() if by}


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
        assert not found.finished("r1") and late(found) == 0
        found.pass_deadline()
        found.go()
        assert found.finished("r1")
        assert late(found) >= 1
        # The pins show, and the rows that are left serve others.
        pending = [chunk for chunk in chunks_of(found.manager).values() if chunk.ref_cnt == -1]
        assert len(pending) >= stuck
        assert any(0 < share < 1 for share in usage(found).values())
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
    with course(SETTING) as found:
        store_and_ask(found, 16)
        with found.stuck():
            found.act("step")
        assert len(found.held) >= 3
        found.go()
        assert not found.finished("r1") and late(found) == 0
        found.pass_deadline()
        found.go()
        # It cannot be computed in blocks that the copy may still write into; it is told, once.
        assert not found.finished("r1") and late(found) == 1
        found.pass_deadline()
        found.go()
        assert late(found) == 1
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
    with course(SETTING) as found:
        store_and_ask(found, 16)
        with found.stuck():
            found.act("step")
        found.act("ask", 0, 16, 2)
        found.go()
        assert not found.finished("r2")
        found.pass_deadline()
        found.go()
        assert found.finished("r2") and not found.finished("r1")


def test_whose_client_goes_away_leaves_its_blocks_to_the_copy() -> None:
    with course(SETTING) as found:
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

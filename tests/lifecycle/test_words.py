# SPDX-License-Identifier: Apache-2.0
"""States and moves in words, whole reports, and the numbers that the words stand for."""

from __future__ import annotations

import pytest

from kvsafe.lifecycle import words
from kvsafe.lifecycle.check import check_all, check_liveness, check_safety, claims, never_fired
from kvsafe.lifecycle.explorer import Explorer, moves_of
from kvsafe.lifecycle.mutants import MUTANTS
from kvsafe.lifecycle.story import move_in_words, state_in_words
from kvsafe.lifecycle.table import RULES
from kvsafe.lifecycle.words import (
    BUILDING,
    LATE_CASCADE,
    LATE_FETCH,
    LATE_STORE,
    READY,
    RUNNING,
    WAITING,
    WRITING,
    Chunk,
    Counts,
    Late,
    Request,
    put,
)
from kvsafe.lifecycle.worlds import LRU, lively, small


def _small(name: str) -> words.State:
    return next(world for world in small(LRU) if world.name == name).start()


def test_an_empty_world_in_words() -> None:
    assert state_in_words(_small("rows")) == "requests are scheduled"


def test_everything_that_a_state_may_hold_in_words() -> None:
    waiting = Request(
        phase=WAITING,
        keys=(0, 1),
        waits=True,
        awaits=frozenset({1, 0}),
        spent=frozenset({1}),
        parked=frozenset({0}),
    )
    running = Request(phase=RUNNING, keys=(1,), stored=True, claims=True, loading=frozenset({1}))
    state = _small("damage")._replace(
        chunks=(Chunk(0, WRITING, by=0), Chunk(1, READY, 2, withdrawn=True)),
        requests=(waiting, running),
        objects=((0, 1), (2, 3)),
        cascades=((1, 0),),
        late=(Late(LATE_STORE, 0, 1), Late(LATE_FETCH, 1, 0, 1), Late(LATE_CASCADE, 1, 1, 0)),
        half=BUILDING,
    )
    assert state_in_words(state).split("; ") == [
        "key 0 in row 0 writing",
        "key 1 in row 1 ready with 2 pins, withdrawn",
        "request 0 for 0 1 waiting (has to come back, awaits 0 1, no more waits for 1, parked 0)",
        "request 1 for 1 running (stored, claims room, loads 1)",
        "tier 0 has 1 good",
        "tier 1 has 0 old, 1 damaged",
        "tier 1 reads key 0",
        "late store of key 0 in row 1",
        "late fetch of key 1 in row 0",
        "late cascade of key 1 in row 1",
        "stores are prepared",
    ]


def test_a_plain_request_has_no_marks() -> None:
    state = _small("rows")._replace(requests=(Request(phase=WAITING, keys=(1,)), Request()))
    assert state_in_words(state) == "request 0 for 1 waiting; requests are scheduled"


def test_every_stage_and_phase_has_its_word() -> None:
    stages = [getattr(words, name.upper()) for name in words.STAGES]
    phases = [getattr(words, name.upper()) for name in words.PHASES]
    objects = [getattr(words, name.upper()) for name in words.OBJECTS]
    late = [getattr(words, name.upper().replace(" ", "_")) for name in words.LATE]
    for numbers in (stages, phases, objects, late):
        assert numbers == list(range(len(numbers)))
    doors = (words.OPEN, words.CLOSING, words.CLOSED)
    assert doors == (0, 1, 2) and (words.SCHEDULING, words.BUILDING) == (0, 1)
    assert words.NOBODY == -1 and frozenset() == words.NONE


@pytest.mark.parametrize("stage", range(len(words.STAGES)))
def test_a_refcount_counts_readers_of_what_is_ready_only(stage: int) -> None:
    for pins in range(3):
        assert Chunk(0, stage, pins).refcount == (pins if stage == READY else -1)


def test_nothing_is_said_where_nothing_was_said() -> None:
    chunk, request = Chunk(4, WRITING), Request()
    assert (chunk.pins, chunk.withdrawn, chunk.by, chunk.tier) == (0, False, -1, -1)
    assert request[:8] == (0, (), 0, False, False, False, False, False)
    assert [part for part in request[8:14] if part] == []
    assert [part for part in request.access if part] == []
    assert Counts() == (0, 0) and Late(0, 1, 2).tier == -1
    state = _small("rows")
    assert (state.cascades, state.late, state.half, state.door) == ((), (), 0, 0)
    assert put((1, 2, 3), 1, 9) == (1, 9, 3) and put((1,), 0, 9) == (9,)


def test_moves_in_words() -> None:
    [world] = [world for world in small(LRU) if world.name == "batch"]
    told = [move_in_words(world, move) for move in moves_of(world)]
    assert told[:4] == [f"arrive (request 0, keys {keys})" for keys in ("0", "1", "2", "0 1")]
    assert "step" in told and "seal refused (key 2)" in told
    assert len(set(told)) == len(told)


def test_a_move_is_about_everything_that_there_is() -> None:
    [world] = [world for world in small(LRU) if world.name == "deadlines"]
    spans = {"request": 1, "key": 2, "tier": 1, "prefix": 2, "late": 2}
    moves = moves_of(world)
    for rule in RULES:
        mine = [move.who for move in moves if move.rule is rule]
        size = 1
        for name in filter(None, rule.over.split(",")):
            size *= spans[name]
        in_force = rule.needs in ("", *world.features) or (
            rule.needs == "late" and "deadline" in world.features
        )
        assert len(set(mine)) == len(mine) == (size if in_force else 0), rule.event


def test_a_broken_law_is_told_as_a_story() -> None:
    mutant = next(one for one in MUTANTS if one.name.startswith("a store evicts pinned"))
    result = check_safety(mutant.home(), mutant.rules())
    broken = result.report()["broken"]
    assert not result.ok and isinstance(broken, list) and "pinned is never evicted" in broken
    head, *lines = result.in_words()
    assert head.startswith(f"broken: {', '.join(broken)}: ")
    assert head.endswith(" loads key 0, which is not ready")
    assert [line[:3].strip() for line in lines] == [str(n) for n in range(1, len(lines) + 1)]


def test_a_broken_promise_is_told_with_its_cycle() -> None:
    mutant = next(one for one in MUTANTS if one.name == "a store has no deadline (F12)")
    [world] = [world for world in lively(LRU) if world.name == "no answers"]
    rules = tuple(rule for rule in RULES if rule.event != "overdue answer")
    result = check_liveness(world, rules)
    assert not result.ok and result.walk.violation is None and mutant.live
    report = result.report()
    assert report["liveness"] is True
    assert report["stuck"] == [stuck.law for stuck in result.stuck]
    assert "every retry resolves" in [stuck.law for stuck in result.stuck]
    told = list(result.in_words())
    heads = [line for line in told if line.startswith("broken: ")]
    assert len(heads) == len(result.stuck)
    assert all(line.endswith(": this can go on for ever") for line in heads)
    ends = [line for line in told if "again and again" in line or "nothing more" in line]
    assert len(ends) == len(result.stuck)
    for stuck in result.stuck:
        again = "     and then again and again:" in told
        assert again or not stuck.cycle.moves


def test_a_promise_is_not_made_where_it_cannot_be_kept() -> None:
    for world in lively(LRU):
        names = {law.name for law in claims(world)}
        assert ("retired rows come back" in names) is ("deadline" not in world.features)
        assert "shutdown ends" in names


def test_all_of_one_size_and_one_of_that_name() -> None:
    told: list[str] = []
    results = check_all(
        "small", ("lru",), lambda one: told.append(one.walk.world.name), 2000, "shutdown"
    )
    assert told == ["shutdown"] and results[0].ok and not results[0].live
    results = check_all(
        "small", ("lru",), lambda one: told.append(one.walk.world.name), 2000, "going down"
    )
    assert [result.live for result in results] == [True]
    assert told == ["shutdown", "going down"]
    assert check_all("small", ("lru",), lambda one: None, 2000, "nonsense") == ()


def test_rules_that_never_fired_are_named_in_the_order_of_the_table() -> None:
    [world] = [world for world in small(LRU) if world.name == "ghosts"]
    cut = check_safety(world, limit=2)
    silent = never_fired([cut])
    assert silent and "arrive" not in silent
    order = [rule.event for rule in RULES]
    assert list(silent) == sorted(silent, key=order.index)
    assert "promote" not in silent, "it is not in force here"
    assert never_fired([check_safety(world)]) == never_fired([cut, check_safety(world)])


def test_exact_and_hashed_walks_find_the_same_way() -> None:
    mutant = next(one for one in MUTANTS if one.name == "a failed write loses its row")
    ways = [Explorer(mutant.home(), mutant.rules(), exact=exact).run() for exact in (True, False)]
    first, second = (walk.violation for walk in ways)
    assert first is not None and second is not None
    assert first.moves == second.moves and first.states == second.states

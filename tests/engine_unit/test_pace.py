# SPDX-License-Identifier: Apache-2.0
"""A tier whose calls take too long is left alone, and one that hangs keeps no idle engine awake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult

from kvsafe.engine.journal import logger
from kvsafe.engine.tiers import pace, patience, rest
from kvsafe.engine.tiers.pace import REST_FACTOR, SLOW_S, STUCK_S, Overseer, Pace
from tests.engine_unit.sealed_world import HandExecutor, World, key_of, running

A, B, C = (key_of(number) for number in range(1, 4))
HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Seconds that only the test moves."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """One clock for everything that measures patience with a tier."""
    found = Clock()
    for module in (pace, patience, rest):
        monkeypatch.setattr(module, "time", found)
    return found


@pytest.fixture
def hand(tmp_path: Path, clock: Clock) -> Iterator[World]:
    """A tier by hand that holds A and B."""
    with running(World(tmp_path, tiers=["hand"], threads=HandExecutor())) as world:
        world.store(A, B)
        world.hand.complete_store()
        world.step()
        world.step()
        world.primary.reset_cache()
        world.hand.asked.clear()
        yield world


def slow(world: World, clock: Clock, call: str, seconds: float) -> None:
    """From now on this call of the tier takes so long."""
    inner: Any = world.hand
    right = getattr(inner, call)

    def late(*arguments: Any) -> Any:
        clock.now += seconds
        return right(*arguments)

    setattr(inner, call, late)


def faults(world: World) -> dict[str, int]:
    return dict(world.tier._door.faults)


def promoted(world: World, key: Any) -> LookupResult:
    """What becomes of a key that the tier has."""
    context = world.request()
    world.lookup(key, context)
    world.step()
    while world.hand.loads:
        world.hand.complete_load()
    for _ in range(2):
        world.threads.run()
        world.step()
    answer = world.lookup(key, context)
    world.manager.on_request_finished(context)
    return answer


def test_a_tier_that_held_the_scheduler_up_is_left_alone(hand: World, clock: Clock) -> None:
    slow(hand, clock, "lookup", SLOW_S + 1)
    context = hand.request()
    # What it says in the end still counts; after that it is not asked.
    assert hand.lookup(A, context) is PENDING
    assert [hand.lookup(key, context) for key in (B, C)] == [MISS, MISS]
    assert len(hand.hand.asked) == 1 and faults(hand) == {"lookup": 1}
    # The load that was promised is given to the tier; what it reports is heard afterwards.
    hand.step()
    hand.hand.complete_load()
    hand.step()
    assert hand.hand.results and hand.lookup(A, context) is PENDING
    hand.store(C)
    assert not hand.hand.stores
    hand.step()
    hand.step()
    assert hand.chunks()[C].ref_cnt == 0
    clock.now += REST_FACTOR * (SLOW_S + 1) - 1
    assert hand.lookup(B) is MISS and len(hand.hand.asked) == 1
    clock.now += 2
    del hand.hand.__dict__["lookup"]
    assert promoted(hand, B) is HIT
    assert not hand.primary._held_back
    hand.recount()
    hand.prove_offers()


def test_one_slow_call_in_a_step_is_borne(hand: World, clock: Clock) -> None:
    slow(hand, clock, "lookup", SLOW_S - 1)
    for _ in range(4):
        hand.lookup(C)
        hand.step()
    assert len(hand.hand.asked) == 4 and faults(hand) == {}


@pytest.mark.parametrize("call", ["lookup", "get_finished_jobs", "on_request_finished", "touch"])
def test_whichever_call_it_is_that_takes_long(hand: World, clock: Clock, call: str) -> None:
    slow(hand, clock, call, SLOW_S + 1)
    context = hand.request()
    hand.lookup(C, context)
    hand.manager.touch([C], context)
    hand.step()
    hand.manager.on_request_finished(context)
    assert faults(hand) == {call: 1}
    assert hand.tier._door._pace.resting


def test_many_calls_that_take_long_together(hand: World, clock: Clock) -> None:
    slow(hand, clock, "lookup", SLOW_S / 4)
    context = hand.request()
    for number in range(10, 30):
        hand.lookup(key_of(number), context)
    assert len(hand.hand.asked) == 5 and faults(hand) == {"lookup": 1}


def test_requests_begin_and_end_for_a_tier_that_is_left_alone(hand: World, clock: Clock) -> None:
    told: list[str] = []
    inner: Any = hand.hand
    inner.on_request_finished = lambda context: told.append(context.req_id)
    slow(hand, clock, "lookup", SLOW_S + 1)
    hand.lookup(C)
    assert hand.tier._door._pace.resting
    context = hand.request("of-a-tier-at-rest")
    hand.manager.on_request_finished(context)
    assert told == ["of-a-tier-at-rest"]


def test_a_rest_is_bounded(clock: Clock) -> None:
    found: list[str] = []
    one = Pace("1:hand", lambda call, what: found.append(f"{call}: {what}"))
    one.enter("lookup")
    clock.now += 3600
    one.leave()
    assert found == ["lookup: held the scheduler up for 3600.0 s in one step"] and one.resting
    clock.now += pace.LONGEST_REST_S + 1
    assert not one.resting


# --- Calls that do not return ---------------------------------------------------------------------


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged as critical."""
    found: list[str] = []
    monkeypatch.setattr(logger, "critical", lambda text, *more: found.append(text % more))
    return found


def test_a_call_that_does_not_return_is_told_once(clock: Clock, lines: list[str]) -> None:
    overseer = Overseer(look_s=3600)
    one = Pace("1:hand", lambda *_: None)
    overseer.watch(one)
    one.enter("lookup")
    clock.now += STUCK_S - 1
    overseer.look()
    assert lines == []
    clock.now += 2
    overseer.look()
    overseer.look()
    assert len(lines) == 1 and "1:hand: lookup has not returned for 31 s" in lines[0]
    one.leave()
    overseer.look()
    one.enter("lookup")
    clock.now += STUCK_S + 1
    overseer.look()
    assert len(lines) == 2


def test_the_overseer_forgets_what_is_gone() -> None:
    overseer = Overseer(look_s=3600)
    overseer.watch(Pace("1:hand", lambda *_: None))
    overseer.look()
    assert overseer._paces == []


def test_a_call_that_hangs_is_told_by_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = threading.Event()
    monkeypatch.setattr(pace, "STUCK_S", 0.0)
    monkeypatch.setattr(logger, "critical", lambda *_: told.set())
    overseer = Overseer(look_s=0.01)
    one = Pace("1:hand", lambda *_: None)
    overseer.watch(one)
    one.enter("submit_load")
    assert told.wait(60.0)
    one.leave()


# --- An engine that has nothing to do -------------------------------------------------------------

WAYS: dict[str, Callable[[World], object]] = {
    "hangs with a store": lambda world: world.store(C),
    "says that it has work": lambda world: setattr(world.hand, "has_pending_work", lambda: True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_tier_that_hangs_lets_an_idle_engine_sleep(hand: World, clock: Clock, way: str) -> None:
    WAYS[way](hand)
    limit, steps = hand.station.config.store_deadline_s, 0
    while hand.manager.has_pending_work():
        clock.now += limit / 4
        hand.step()
        steps += 1
        assert steps < 20
    # It had its time, and nothing is under way for which anybody waits.
    assert steps > 4 and not hand.manager._jobs
    assert hand.tier.inner.has_pending_work()
    # Work of our own wakes it, and what the tier reports late is heard then.
    hand.store(A)
    assert hand.manager.has_pending_work()
    while hand.hand.stores:
        hand.hand.complete_store()
    hand.hand.__dict__.pop("has_pending_work", None)
    hand.step()
    hand.step()
    assert not hand.manager.has_pending_work() and not hand.tier._watch.owes


def test_a_tier_that_comes_to_rest_in_between_has_its_time_again(clock: Clock) -> None:
    one = rest.Rest(10.0)
    assert one.keeps_awake(True)
    clock.now += 9
    assert one.keeps_awake(True) and not one.keeps_awake(False)
    clock.now += 9
    assert one.keeps_awake(True)
    clock.now += 11
    assert not one.keeps_awake(True)
    one.disturb()
    assert one.keeps_awake(True)

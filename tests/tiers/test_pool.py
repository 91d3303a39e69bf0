# SPDX-License-Identifier: Apache-2.0
"""F14: a call that never returns costs its deadline and its thread, and the pool goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kvsafe.tiers import LOAD, LOOK, STORE, Answer, LookupDesk, Outcome, Pool, Ticket
from tests.tiers.faults import Stall

DEADLINE_S = 10.0


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> Iterator[Pool]:
    """Two threads for transfers, one for lookups, one replacement allowed."""
    made = Pool([(LOOK,), (LOAD, STORE), (STORE, LOAD)], DEADLINE_S, 1, clock)
    yield made
    clock.time += 1000
    made.stop(0.0)


def wait_for(pool: Pool, count: int) -> dict[Any, Any]:
    """Poll until so many answers are there."""
    answers: dict[Any, Any] = {}
    pause = threading.Event()
    for _ in range(2000):
        for tag, result in pool.poll():
            assert tag not in answers
            answers[tag] = result
        if len(answers) >= count:
            return answers
        pause.wait(0.005)
    pytest.fail(f"only {answers}")


def _squared(number: int, ticket: Ticket) -> int:
    return number * number


def _wait(stall: Stall, ticket: Ticket) -> None:
    stall.wait()


def late(result: object) -> bool:
    return isinstance(result, Outcome) and result.answer is Answer.LATE


def test_work_is_answered_with_its_tag(pool: Pool) -> None:
    for number in range(50):
        pool.submit(LOAD if number % 2 else STORE, number, partial(_squared, number))
    assert wait_for(pool, 50) == {number: number * number for number in range(50)}


def test_a_stuck_call_is_late_and_the_pool_goes_on(pool: Pool, clock: Clock) -> None:
    stalls = [Stall() for _ in range(2)]
    touched: list[int] = []

    def stuck(place: int, ticket: Ticket) -> str:
        stalls[place].wait()
        if ticket.claim():
            touched.append(place)
        return "came late"

    for place in range(2):
        pool.submit(LOAD, place, partial(stuck, place))
        assert stalls[place].entered.wait(10)
    assert pool.poll() == []
    clock.time += DEADLINE_S + 1
    assert all(late(result) for result in wait_for(pool, 2).values())
    assert pool.counts.stuck == 2
    # Two threads are stuck, one was replaced: that one serves both lanes.
    pool.submit(LOAD, "after", lambda ticket: "fine")
    pool.submit(STORE, "after too", lambda ticket: "fine")
    assert wait_for(pool, 2) == {"after": "fine", "after too": "fine"}
    for stall in stalls:
        stall.let_go.set()
    for _ in range(1000):
        if pool.counts.returned == 2:
            break
        threading.Event().wait(0.005)
    assert pool.counts.returned == 2
    assert touched == []
    assert pool.poll() == []
    # The one without a replacement works again.
    assert pool.counts.stuck == 0
    assert len(pool._workers) == 3


def test_all_stuck_beyond_the_limit_answers_late_from_the_queue(clock: Clock) -> None:
    pool, stall = Pool([(LOAD, STORE)], DEADLINE_S, 0, clock), Stall()
    pool.submit(STORE, "stuck", partial(_wait, stall))
    assert stall.entered.wait(10)
    pool.submit(LOAD, "queued", partial(_squared, 2))
    clock.time += DEADLINE_S + 1
    assert all(late(result) for result in wait_for(pool, 2).values())
    assert pool.counts.late_waiting == 1
    pool.submit(LOAD, "queued", partial(_squared, 2))
    clock.time += DEADLINE_S - 1
    assert pool.poll() == []
    # The thread comes back in time for this one, and had no replacement: it works on.
    stall.let_go.set()
    assert wait_for(pool, 1) == {"queued": 4}
    assert pool.stop(10.0)


def test_a_lane_whose_threads_were_stuck_beyond_the_limit_is_served_again(clock: Clock) -> None:
    """Who returns takes the place of one who is stuck and had no room for a replacement."""
    pool = Pool([(LOOK,), (LOAD, STORE), (STORE,)], DEADLINE_S, 2, clock)
    stalls = [Stall() for _ in range(3)]
    for number, stall in enumerate(stalls):
        pool.submit(LOAD, number, partial(_wait, stall))
        assert stall.entered.wait(60)
        clock.time += DEADLINE_S + 1
        assert late(wait_for(pool, 1)[number])
    assert (pool.counts.stuck, len(pool._workers)) == (3, 2)
    stalls[0].let_go.set()
    pool.submit(LOAD, "next", partial(_squared, 3))
    assert wait_for(pool, 1) == {"next": 9}
    assert (pool.counts.stuck, len(pool._workers)) == (2, 3)
    # All places are taken now: who is not needed goes.
    for stall in stalls[1:]:
        stall.let_go.set()
    for _ in range(1000):
        if pool.counts.returned == 3:
            break
        threading.Event().wait(0.005)
    assert (pool.counts.stuck, len(pool._workers)) == (0, 3)
    assert pool.stop(60.0)


def test_claimed_work_is_waited_for(pool: Pool, clock: Clock) -> None:
    stall = Stall()

    def copying(ticket: Ticket) -> str:
        assert ticket.claim()
        stall.wait()
        return "copied"

    pool.submit(LOAD, 1, copying)
    assert stall.entered.wait(10)
    clock.time += DEADLINE_S + 1
    assert pool.poll() == []
    stall.let_go.set()
    assert wait_for(pool, 1) == {1: "copied"}


def test_an_exception_is_an_answer(pool: Pool) -> None:
    pool.submit(LOAD, 1, lambda ticket: 1 // 0)
    result = wait_for(pool, 1)[1]
    assert result.answer is Answer.UNREACHABLE
    assert "ZeroDivisionError" in result.why


def test_lookups_do_not_wait_for_transfers(pool: Pool) -> None:
    stalls = [Stall(), Stall()]
    for place, lane in enumerate((LOAD, STORE)):
        pool.submit(lane, place, partial(_wait, stalls[place]))
        assert stalls[place].entered.wait(10)
    pool.submit(LOOK, "look", lambda ticket: [True])
    assert wait_for(pool, 1) == {"look": [True]}
    for stall in stalls:
        stall.let_go.set()


def test_stop_answers_what_waits(clock: Clock) -> None:
    pool = Pool([(LOAD,)], DEADLINE_S, 1, clock)
    stall = Stall()
    pool.submit(LOAD, 1, lambda ticket: stall.wait())
    assert stall.entered.wait(10)
    pool.submit(LOAD, 2, lambda ticket: None)
    assert not pool.stop(0.0)
    assert late(wait_for(pool, 1)[2])
    stall.let_go.set()
    assert pool.stop(10.0)


def test_the_desk_asks_once_and_keeps_answers_per_request() -> None:
    desk = LookupDesk()
    assert desk.ask(b"a", "r1") is None
    assert desk.ask(b"a", "r2") is None
    assert desk.ask(b"b", "r1") is None
    assert desk.batches() == [[b"a", b"b"]]
    assert desk.batches() == []
    assert desk.ask(b"a", "r1") is None
    desk.answer([b"a", b"b"], [True, False])
    assert (desk.ask(b"a", "r1"), desk.ask(b"b", "r1")) == (True, False)
    desk.forget("r1")
    assert desk.ask(b"a", "r2") is True
    assert len(desk) == 1
    desk.forget("r2")
    assert len(desk) == 0


def test_a_failed_load_is_a_miss_until_its_requests_end() -> None:
    """F11: else the same request comes back for it for ever."""
    desk = LookupDesk()
    desk.ask(b"a", "r1")
    desk.batches()
    desk.answer([b"a"], [True])
    desk.settle([b"a"], False)
    assert desk.ask(b"a", "r1") is False
    assert desk.ask(b"a", "r2") is False
    desk.forget("r1")
    desk.forget("r2")
    assert desk.ask(b"a", "r3") is None


def test_the_desk_survives_ends_in_any_order() -> None:
    desk = LookupDesk()
    desk.ask(b"a", "r1")
    desk.forget("r1")
    assert len(desk) == 0
    assert desk.batches() == []
    desk.ask(b"b", "r1")
    desk.batches()
    desk.forget("r1")
    assert desk.ask(b"b", "r2") is None
    desk.answer([b"b"], [True])
    assert desk.ask(b"b", "r2") is True
    desk.forget("r2")
    desk.ask(b"c", "r3")
    desk.batches()
    desk.forget("r3")
    desk.answer([b"c"], [True])
    desk.answer([b"c"], [True])
    assert len(desk) == 0


def test_the_desk_is_bounded() -> None:
    desk = LookupDesk(limit=3)
    assert [desk.ask(bytes([n]), "r") for n in range(5)] == [None, None, None, False, False]
    assert len(desk) == 3
    desk.forget("r")
    assert desk.ask(b"x", "r") is None


def test_abandoned_work_is_a_withdrawn_order() -> None:
    for begun in (False, True):
        ticket = Ticket("tag", lambda ticket: None, 1.0, lambda: 5.0)
        if begun:
            assert ticket.begin(0.0) and ticket.more() and ticket.wanted
            assert ticket.started == 5.0
        assert ticket.withdrawn.value == 0
        assert ticket.abandon()
        assert ticket.withdrawn.value == 1 and not ticket.wanted and not ticket.more()
    claimed = Ticket("tag", lambda ticket: None, 1.0, lambda: 5.0)
    assert claimed.begin(0.0) and claimed.claim() and not claimed.abandon()
    assert claimed.withdrawn.value == 0

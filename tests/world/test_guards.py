# SPDX-License-Identifier: Apache-2.0
"""Guards of ours that stand one behind another, each shown to bite in the whole connector.

For each course: with all guards off the world's oracle sees what they are there for; with any
one of them on, whichever it is, the world is clean. So none of them is there for nothing, and
none is needed only because another is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest

pytest.importorskip("vllm")

from fuzz.world import Event, Plan, Setting, run
from kvsafe.engine.requests.turns import Turns
from kvsafe.engine.requests.waits import Waits
from kvsafe.engine.rows.primary import SealedPrimaryTier
from kvsafe.engine.rows.proof import RowProof
from kvsafe.engine.rows.retired import TransferRows
from kvsafe.engine.rows.shield import Shield
from kvsafe.engine.scheduler import KVSafeConnectorScheduler
from tests.support.scenes import SCENES

Off = tuple[tuple[type[Any], str, Callable[..., Any]], ...]
"""A guard that is switched off: what is replaced, and by what."""


def _nothing(*_: Any) -> None:
    return None


def _not_retired(self: TransferRows, keeper: Any) -> None:
    self._running.clear()


RETIRED: Off = ((TransferRows, "retire", _not_retired),)
FENCE: Off = ((RowProof, "fence", _nothing),)
# The fence is its first line, and stays in force where only this is off.
OPENING: Off = ((RowProof, "before_load", lambda self, row: self.fence(row)),)
SHIELD: Off = ((Shield, "lift", _nothing), (Shield, "cover", _nothing))
ONCE: Off = ((Waits, "is_spent", lambda *_: False),)
BARRED: Off = ((Waits, "is_barred", lambda *_: False),)
TURNS: Off = ((Turns, "fits", lambda *_: True),)
DROPPED: Off = ((SealedPrimaryTier, "_drop_events", _nothing),)
TAKEN_BACK: Off = ((KVSafeConnectorScheduler, "_take_back_announcements", _nothing),)


@contextlib.contextmanager
def switched_off(guards: Sequence[Off]) -> Iterator[None]:
    """These guards do nothing meanwhile."""
    with contextlib.ExitStack() as stack:
        for guard in guards:
            for owner, name, instead in guard:
                stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def _ask(family: int, tokens: int) -> Event:
    return Event("ask", family, tokens, 1)


STEP, IDLE, BEGUN = Event("step"), Event("idle", 19), Event("copy_one")


def _reset_in_a_load(*begun: Event) -> Plan:
    """A reset while a load is under way; the tier then fills the rows that the load reads.

    `begun`: whether a copy was proven before and is about to be made.
    """
    before = (_ask(0, 8), IDLE, _ask(1, 8), IDLE, _ask(0, 9), STEP, Event("tier_ok", 0, 0, 3))
    load = (STEP, Event("proofs", 7), STEP, *begun, Event("reset_connector"))
    after = (Event("eager"), _ask(1, 9), STEP)
    return Plan("kvsafe", Setting(rows=2, tiers=(False,)), (*before, *load, *after))


def _queued_at_a_reset() -> Plan:
    """A reset when stores that were sealed meanwhile have not been announced."""
    setting = Setting(
        windows=(0, 16), rows=8, blocks=22, tiers=(False,), budget=32, seats=2, events=True
    )
    arrivals = (Event("arrive", 49, 43, 251), STEP, STEP, Event("arrive", 49, 18, 85))
    events = (
        Event("arrive", 255, 0, 93),
        *[STEP] * 4,
        Event("go", 241),
        Event("go", 236),
        *arrivals,
        Event("go", 88),
        STEP,
        Event("proofs", 242),
        Event("reset_twice"),
    )
    return Plan("kvsafe", setting, events)


def _failed_load_of_most_blocks() -> Plan:
    """A load that takes most of the accelerator's blocks meets a damaged row (finding U)."""
    setting = Setting(blocks_per_chunk=2, rows=4, blocks=12, budget=32, seats=1)
    damage = Event("damage_row", 67)
    return Plan("kvsafe", setting, (_ask(0, 35), IDLE, damage, _ask(0, 33)))


def _loads_of_most_blocks() -> Plan:
    """Two requests load at the same time and leave neither the blocks to run (finding V)."""
    setting = Setting(
        windows=(0, 12), blocks_per_chunk=2, rows=12, blocks=24, seats=1, no_prefix_cache=True
    )
    return Plan("kvsafe", setting, (_ask(0, 32), IDLE, _ask(0, 34), _ask(0, 31)))


class Course(NamedTuple):
    """A world, its guards, and what the oracle calls it when none of them is there."""

    plan: Plan
    kind: str
    guards: tuple[Off, ...]


COURSES = {
    "a load's rows at a reset": Course(_reset_in_a_load(), "wrong-load", (RETIRED, FENCE, OPENING)),
    "a proven load's rows at a reset": Course(_reset_in_a_load(BEGUN), "wrong-load", (RETIRED,)),
    "a prefix longer than the rows": Course(SCENES["B"].plan("kvsafe"), "starved", (SHIELD, ONCE)),
    "a failed load of most blocks": Course(_failed_load_of_most_blocks(), "starved", (BARRED,)),
    "two loads of most blocks": Course(_loads_of_most_blocks(), "starved", (TURNS,)),
    "announcements at a reset": Course(_queued_at_a_reset(), "announced", (DROPPED, TAKEN_BACK)),
}


@pytest.mark.parametrize("name", COURSES)
def test_without_its_guards_the_world_is_wrong(name: str) -> None:
    course = COURSES[name]
    with switched_off(course.guards):
        finding = run(course.plan).finding
    assert finding is not None and finding.kind == course.kind


@pytest.mark.parametrize("name", COURSES)
def test_each_of_its_guards_is_enough(name: str) -> None:
    course = COURSES[name]
    for guard in course.guards:
        others = [one for one in course.guards if one is not guard]
        with switched_off(others):
            outcome = run(course.plan)
        assert outcome.clean, outcome.finding


def test_the_shield_alone_saves_work() -> None:
    """Without it chunks are promoted, evicted unread and promoted again."""
    course = COURSES["a prefix longer than the rows"]
    with_it = run(course.plan).counts
    with switched_off([SHIELD]):
        without = run(course.plan).counts
    assert without["promotion"] > with_it["promotion"] > 0
    assert without["computed"] > with_it["computed"]

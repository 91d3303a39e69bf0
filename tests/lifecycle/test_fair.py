# SPDX-License-Identifier: Apache-2.0
"""Fair cycles on small random graphs, against a search through all sets of states.

A run that stays bad for ever visits some set of bad states for ever. Whether there is a fair one
can be asked of every set in turn; the graph's answer has to be the same, and its cycle fair.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations

import pytest

from kvsafe.lifecycle.explorer import Move, Walk
from kvsafe.lifecycle.fair import Cycle, Duty, Graph, duties, obliges
from kvsafe.lifecycle.liveness import Liveness
from kvsafe.lifecycle.lru import Lru
from kvsafe.lifecycle.table import AGAIN, FREE, OURS, REPORT, RULES, Rule
from kvsafe.lifecycle.world import World

Arrow = tuple[int, int, int]


def _world(*features: str) -> World:
    return World("graph", "", Lru(), 1, 1, 1, 0, ((0,),), frozenset(features))


def _rule(event: str, fair: str = FREE, answers: str = "", told_by: int = 9) -> Rule:
    return Rule(
        event, "request", lambda *_: True, lambda _, state, *__: state, "", "", "",
        fair=fair, answers=answers, told_by=told_by,
    )  # fmt: skip


RULES_HERE = (
    _rule("free"),
    _rule("weak", OURS, "one"),
    _rule("other weak", OURS, "two"),
    _rule("strong", AGAIN, "three"),
    _rule("answer", FREE, "one"),
    _rule("report", REPORT, "four"),
)
MOVES = tuple(Move(rule, (0,)) for rule in RULES_HERE)


def _walk(arrows: Iterable[Arrow], states: int, *features: str) -> Walk:
    """`arrows` are state, number of the move, state after it."""
    walk = Walk(_world(*features), MOVES, states=states)
    for state in range(states):
        walk.first.append(len(walk.edges))
        for before, label, after in sorted(arrows):
            if before == state:
                walk.labels.append(label)
                walk.edges.append(after)
    walk.first.append(len(walk.edges))
    return walk


def _law(never: str = "", often: str = "", spared: str = "") -> Liveness:
    first, second, third = (frozenset(filter(None, [part])) for part in (never, often, spared))
    return Liveness("a law", "", lambda _: True, first, second, third)


class Slow:
    """The same question, asked of every set of bad states."""

    def __init__(self, arrows: list[Arrow], bad: set[int], law: Liveness, *features: str) -> None:
        names = [rule.event for rule in RULES_HERE]
        self.arrows, self.bad = arrows, bad
        self.never = {names.index(name) for name in law.never}
        self.often = {names.index(name) for name in law.often}
        self.duties = [
            ({1}, {1, 4}, False, "one"),
            ({2}, {2}, False, "two"),
            ({3}, {3}, True, "three"),
        ]
        if "deadline" not in features:
            self.duties.append(({5}, {5}, False, "four"))
        self.duties = [duty for duty in self.duties if duty[3] not in law.spared]

    def enabled(self, state: int) -> set[int]:
        return {label for before, label, _ in self.arrows if before == state}

    def inside(self, chosen: set[int]) -> list[Arrow]:
        return [
            arrow
            for arrow in self.arrows
            if arrow[0] in chosen and arrow[2] in chosen and arrow[1] not in self.never
        ]

    def connected(self, chosen: set[int]) -> bool:
        arrows = self.inside(chosen)
        for start in chosen:
            reached, size = {start}, 0
            while len(reached) > size:
                size = len(reached)
                reached |= {after for before, _, after in arrows if before in reached}
            if reached != chosen:
                return False
        return True

    def fair(self, visited: set[int], taken: set[int]) -> bool:
        if self.often and not self.often & taken:
            return False
        for moves, answers, strong, _ in self.duties:
            held = [bool(moves & self.enabled(state)) for state in visited]
            if (any(held) if strong else all(held)) and not answers & taken:
                return False
        return True

    def sets(self) -> list[set[int]]:
        found = []
        for size in range(1, len(self.bad) + 1):
            for chosen in map(set, combinations(sorted(self.bad), size)):
                taken = {label for _, label, _ in self.inside(chosen)}
                if self.connected(chosen) and self.fair(chosen, taken):
                    found.append(chosen)
        return found

    def check(self, cycle: Cycle) -> None:
        """The cycle leads back to where it began, stays bad, and everything due happens."""
        at, visited = cycle.entry, {cycle.entry}
        for label in cycle.moves:
            [at] = [after for before, name, after in self.arrows if (before, name) == (at, label)]
            assert at in self.bad and label not in self.never
            visited.add(at)
        assert at == cycle.entry
        assert self.fair(visited, set(cycle.moves))
        assert len(visited) <= cycle.size <= len(self.bad)


LAWS = [
    _law(),
    _law(never="free"),
    _law(often="free"),
    _law(spared="one"),
    _law("answer", "strong"),
]


@pytest.mark.parametrize("features", [(), ("deadline",)], ids=["reported", "deadlines"])
@pytest.mark.parametrize("number", range(len(LAWS)))
def test_there_is_a_fair_cycle_where_the_slow_search_finds_one(
    number: int, features: tuple[str, ...]
) -> None:
    law, answers = LAWS[number], [0, 0]
    for seed in range(150):
        dice = random.Random(seed)
        states = dice.randint(1, 5)
        arrows = [
            (before, label, dice.randrange(states))
            for before in range(states)
            for label in range(len(MOVES))
            if dice.random() < 0.35
        ]
        bad = {state for state in range(states) if dice.random() < 0.8}
        mark = bytearray(state in bad for state in range(states))
        cycle = Graph(_walk(arrows, states, *features), mark, law).fair_cycle()
        slow = Slow(arrows, bad, law, *features)
        assert (cycle is not None) == bool(slow.sets()), (seed, arrows, bad)
        answers[cycle is not None] += 1
        if cycle is not None:
            slow.check(cycle)
    assert min(answers) > 10, "one of the two answers was hardly asked for"


def test_a_long_way_around_is_the_shortest() -> None:
    """A ring with a short cut: the cycle takes what is due and nothing twice."""
    ring = [(0, 0, 1), (1, 0, 2), (2, 0, 3), (3, 0, 0), (0, 4, 2)]
    cycle = Graph(_walk(ring, 4), bytearray(b"\1" * 4), _law()).fair_cycle()
    assert cycle is not None and cycle.entry == 0 and cycle.size == 4
    assert cycle.moves == (4, 0, 0)


def test_states_that_were_not_walked_from_are_not_judged() -> None:
    walk = _walk([(0, 1, 1)], 2)
    assert Graph(walk, bytearray(b"\1\1"), _law()).fair_cycle() == Cycle(1, (), 1)
    walk.first.pop()
    assert Graph(walk, bytearray(b"\1\1"), _law()).fair_cycle() is None


def test_duties_are_told_apart_by_whom_they_are_about() -> None:
    first, second = _rule("first", OURS, "all", 1), _rule("second", FREE, "all", 1)
    each = _rule("each", AGAIN, "each")
    moves = [Move(first, (0, 1)), Move(second, (0, 2)), Move(first, (1, 1)), Move(second, (2, 0))]
    moves += [Move(each, (0, 1)), Move(each, (0, 2)), Move(_rule("nothing"), (0, 0))]
    found = duties(_world(), moves)
    assert found == (
        Duty("all(0,)", frozenset({0}), frozenset({0, 1}), False),
        Duty("all(1,)", frozenset({2}), frozenset({2}), False),
        Duty("each(0, 1)", frozenset({4}), frozenset({4}), True),
        Duty("each(0, 2)", frozenset({5}), frozenset({5}), True),
    )
    assert [duty.name for duty in duties(_world(), moves, ("all",))] == ["each(0, 1)", "each(0, 2)"]


def test_who_has_to_do_what() -> None:
    with_deadlines, without = _world("deadline"), _world()
    for rule in RULES:
        assert obliges(without, rule) is (rule.fair != FREE)
        assert obliges(with_deadlines, rule) is (rule.fair not in (FREE, REPORT))

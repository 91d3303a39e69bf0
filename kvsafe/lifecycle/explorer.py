# SPDX-License-Identifier: Apache-2.0
"""Breadth-first walk over every reachable state of a world.

Kept per state: 8 bytes of hash, 4 bytes of predecessor, 2 bytes of move. Whole states live only
in the frontier. Two different states with one 64-bit hash would be taken for one: for n states
the chance is about n*n/2**65, below 1e-6 up to five million; `exact` keeps the states instead.
"""

from __future__ import annotations

import itertools
import resource
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvsafe.lifecycle.canonical import canonical
from kvsafe.lifecycle.rows import MachineError
from kvsafe.lifecycle.safety import SAFETY, Safety, Seen
from kvsafe.lifecycle.table import RULES, Rule, in_force
from kvsafe.lifecycle.words import State
from kvsafe.lifecycle.world import World

# How many variants of a story are followed at a time when it is told without renumbering.
_STORIES = 20_000
# The law that is broken when a guard lets through what its effect cannot do.
STUCK = "a rule whose guard holds can be applied"


class Move(NamedTuple):
    """One row of the table for one choice of who it is about."""

    rule: Rule
    who: tuple[int, ...]


class Violation(NamedTuple):
    """Which laws one move broke, and the shortest way there."""

    laws: tuple[str, ...]
    text: str
    moves: tuple[Move, ...]
    states: tuple[State, ...]


@dataclass
class Walk:
    """Figures of one exploration, and the graph if it was asked for.

    `edges[first[i]:first[i + 1]]` are the states after state i, `labels` their moves' numbers.
    """

    world: World
    moves: tuple[Move, ...]
    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    peak_mib: float = 0.0
    complete: bool = False
    violation: Violation | None = None
    came_from: array[int] = field(default_factory=lambda: array("i"))
    came_by: array[int] = field(default_factory=lambda: array("H"))
    first: array[int] = field(default_factory=lambda: array("i"))
    edges: array[int] = field(default_factory=lambda: array("i"))
    labels: array[int] = field(default_factory=lambda: array("H"))
    marks: list[bytearray] = field(default_factory=list)
    fired: set[int] = field(default_factory=set)

    def path(self, state: int) -> tuple[int, ...]:
        """The shortest way to `state`, as numbers of moves."""
        found = []
        while state > 0:
            found.append(self.came_by[state])
            state = self.came_from[state]
        return tuple(reversed(found))

    def distance(self, state: int) -> int:
        """Moves from the start to `state`."""
        return len(self.path(state))


def moves_of(world: World, rules: Sequence[Rule] = RULES) -> tuple[Move, ...]:
    """Every rule in force with everything that it can be about."""
    spans = {
        "request": range(world.requests),
        "key": range(world.keys),
        "tier": range(world.tiers),
        "prefix": range(len(world.prefixes)),
        "late": range(world.late_limit),
    }
    found = []
    for rule in in_force(tuple(rules), world.features):
        parts = [spans[name] for name in rule.over.split(",") if name]
        found += [Move(rule, who) for who in itertools.product(*parts)]
    return tuple(found)


def successors(
    world: World, moves: Sequence[Move], state: State
) -> Iterator[tuple[int, State | None]]:
    """Every enabled move with the state after it, not yet canonical; None if it cannot be done."""
    for number, (rule, who) in enumerate(moves):
        if rule.guard(world, state, *who):
            try:
                yield number, rule.effect(world, state, *who)
            except MachineError:
                yield number, None


Ends = Callable[[State, Move, State | None], str]


class Explorer:
    """Walks one world. `marks` are predicates whose truth in each state is kept for `fair`."""

    def __init__(
        self,
        world: World,
        rules: Sequence[Rule] = RULES,
        *,
        safety: Sequence[Safety] = SAFETY,
        marks: Sequence[Callable[[State], bool]] = (),
        graph: bool = False,
        exact: bool = False,
        limit: int = 50_000_000,
    ) -> None:
        self.walk = Walk(world, moves_of(world, rules), marks=[bytearray() for _ in marks])
        self._world = world
        self._safety = safety
        self._marks = marks
        self._graph = graph
        self._exact = exact
        self._limit = limit
        self._number: dict[object, int] = {}

    def run(self) -> Walk:
        """All of it, or up to the first violation, or up to `limit` states."""
        began = time.perf_counter()
        start = canonical(self._world, self._world.start())
        frontier = [start]
        self._admit(start, -1, 0)
        walk, at = self.walk, 0
        while frontier and not self._stops():
            following: list[State] = []
            for state in frontier:
                self._expand(state, at, following)
                at += 1
                if walk.violation is not None:
                    break
            frontier = following
            walk.depth += bool(frontier)
        walk.complete = not frontier and walk.violation is None
        walk.first.append(len(walk.edges))
        walk.seconds = time.perf_counter() - began
        walk.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return walk

    def _stops(self) -> bool:
        return self.walk.violation is not None or self.walk.states >= self._limit

    def _admit(self, state: State, source: int, move: int) -> int:
        number = self.walk.states
        self._number[self._name(state)] = number
        self.walk.states += 1
        self.walk.came_from.append(source)
        self.walk.came_by.append(move)
        for kept, mark in zip(self.walk.marks, self._marks, strict=True):
            kept.append(mark(state))
        return number

    def _name(self, state: State) -> object:
        return state if self._exact else hash(state)

    def _expand(self, state: State, at: int, following: list[State]) -> None:
        world, walk, numbers = self._world, self.walk, self._number
        walk.first.append(len(walk.edges))
        for move, after in successors(world, walk.moves, state):
            walk.transitions += 1
            walk.fired.add(move)
            rule, who = walk.moves[move]
            broken = self._broken(Seen(world, state, rule.event, who, after or state))
            if broken or after is None:
                walk.violation = self._explain(broken, at, move)
                return
            named = canonical(world, after)
            number = numbers.get(self._name(named))
            if number is None:
                number = self._admit(named, at, move)
                following.append(named)
            if self._graph:
                walk.edges.append(number)
                walk.labels.append(move)

    def _broken(self, seen: Seen) -> list[tuple[str, str]]:
        found = []
        for law in self._safety:
            text = law.check(seen)
            if text is not None:
                found.append((law.name, text))
        return found

    def _explain(self, broken: list[tuple[str, str]], at: int, move: int) -> Violation:
        events = [self.walk.moves[number].rule for number in (*self.walk.path(at), move)]
        laws = tuple(name for name, _ in broken) or (STUCK,)
        moves, states, text = tell(self._world, self.walk.moves, events, self._breaks(laws[0]))
        return Violation(laws, text, moves, states)

    def _breaks(self, name: str) -> Ends:
        """Says in words how a last move breaks the law of that name; "" if it does not."""
        laws = [law for law in self._safety if law.name == name]

        def breaks(before: State, move: Move, after: State | None) -> str:
            seen = Seen(self._world, before, move.rule.event, move.who, after or before)
            texts = [law.check(seen) or "" for law in laws]
            return texts[0] if texts else (STUCK if after is None else "")

        return breaks


def tell(
    world: World,
    moves: Sequence[Move],
    events: Sequence[Rule],
    ends: Ends,
) -> tuple[tuple[Move, ...], tuple[State, ...], str]:
    """A story with these events, in which nobody changes its number and whose last move `ends`.

    The walk itself renumbers after every move, so its own path would read as nonsense.
    """
    Story = dict[State, tuple[State | None, Move | None]]
    layers: list[Story] = [{world.start(): (None, None)}]
    for event in events[:-1]:
        layer: Story = {}
        for before in layers[-1]:
            for number, after in successors(world, moves, before):
                if moves[number].rule is event and after is not None:
                    layer.setdefault(after, (before, moves[number]))
        layers.append(dict(itertools.islice(layer.items(), _STORIES)))
    for before in layers[-1]:
        for number, after in successors(world, moves, before):
            text = ends(before, moves[number], after) if moves[number].rule is events[-1] else ""
            if text:
                return *_unwind(layers, before, moves[number], after or before), text
    return (), (), ""


def _unwind(
    layers: Sequence[dict[State, tuple[State | None, Move | None]]],
    before: State,
    move: Move,
    after: State,
) -> tuple[tuple[Move, ...], tuple[State, ...]]:
    story, states = [move], [after, before]
    for layer in reversed(layers[1:]):
        source, by = layer[states[-1]]
        if source is None or by is None:
            break
        story.append(by)
        states.append(source)
    return tuple(reversed(story)), tuple(reversed(states))

# SPDX-License-Identifier: Apache-2.0
"""Fair cycles: whether a run can stay bad for ever although everything that must happen does.

A run stays for ever within one strongly connected component of the bad states. Weak fairness: a
group of moves that is enabled throughout must be taken. Strong fairness: one that is enabled
again and again must be taken; where it is not, its states are cut out and what is left is
searched again (the emptiness test for Streett conditions). Standing still counts as a cycle
where nothing has to happen.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from kvsafe.lifecycle.explorer import Move, Walk
from kvsafe.lifecycle.liveness import Liveness
from kvsafe.lifecycle.table import AGAIN, FREE, REPORT, Rule
from kvsafe.lifecycle.world import World


class Duty(NamedTuple):
    """One fairness assumption: `moves` are those whose being enabled obliges, and `answers` all
    that discharge it (a transfer that reports needs no deadline)."""

    name: str
    moves: frozenset[int]
    answers: frozenset[int]
    strong: bool


class Edge(NamedTuple):
    """One move between two states of a component."""

    before: int
    label: int
    after: int


Wanted = Callable[[Edge], bool]


class Cycle(NamedTuple):
    """A fair cycle: the state where it is entered, the moves around it, the component's size."""

    entry: int
    moves: tuple[int, ...]
    size: int


def obliges(world: World, rule: Rule) -> bool:
    """Whether `rule` has to happen in this world."""
    if rule.fair == REPORT:
        return not world.has("deadline")
    return rule.fair != FREE


def duties(world: World, moves: Sequence[Move], spared: Iterable[str] = ()) -> tuple[Duty, ...]:
    """The fairness assumptions of a world, one per group and per whom it is about."""
    bound: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    taken: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    strong: set[tuple[str, tuple[int, ...]]] = set()
    for number, (rule, who) in enumerate(moves):
        if not rule.answers or rule.answers in spared:
            continue
        group = (rule.answers, who[: rule.told_by])
        taken.setdefault(group, set()).add(number)
        if obliges(world, rule):
            bound.setdefault(group, set()).add(number)
        if rule.fair == AGAIN:
            strong.add(group)
    return tuple(
        Duty(f"{group[0]}{group[1]}", frozenset(found), frozenset(taken[group]), group in strong)
        for group, found in bound.items()
    )


class Graph:
    """The states of a walk on which `bad` holds, and the moves that stay within them."""

    def __init__(self, walk: Walk, bad: bytearray, law: Liveness) -> None:
        self._walk = walk
        self._never = {
            number for number, move in enumerate(walk.moves) if move.rule.event in law.never
        }
        self._often = {
            number for number, move in enumerate(walk.moves) if move.rule.event in law.often
        }
        self._duties = duties(walk.world, walk.moves, law.spared)
        # States that were not walked from (a walk may be cut short) have no moves to judge by.
        walked = len(walk.first) - 1
        self._bad = [state for state in range(walked) if bad[state]]

    def fair_cycle(self) -> Cycle | None:
        """A cycle that is fair, or None if there is none."""
        todo = self._components(self._bad)
        while todo:
            component = todo.pop()
            inside = set(component)
            taken = self._taken(inside)
            if self._often and not taken & self._often:
                continue
            broken = self._broken(component, taken)
            if not broken:
                return self._cycle(component, inside)
            strong = [duty for duty in broken if duty.strong]
            if len(strong) < len(broken):
                continue
            kept = [state for state in component if not self._obliged(state, strong)]
            if kept:
                todo += self._components(kept)
        return None

    def _enabled(self, state: int) -> Sequence[int]:
        first = self._walk.first
        return self._walk.labels[first[state] : first[state + 1]]

    def _after(self, state: int) -> Sequence[tuple[int, int]]:
        first = self._walk.first
        span = slice(first[state], first[state + 1])
        return list(zip(self._walk.labels[span], self._walk.edges[span], strict=True))

    def _taken(self, inside: set[int]) -> set[int]:
        return {
            label
            for state in inside
            for label, after in self._after(state)
            if after in inside and label not in self._never
        }

    def _broken(self, component: Sequence[int], taken: set[int]) -> list[Duty]:
        """Duties that no move on the component discharges and that bind on it."""
        open_duties = [duty for duty in self._duties if not duty.answers & taken]
        return [duty for duty in open_duties if self._binds(duty, component)]

    def _binds(self, duty: Duty, component: Sequence[int]) -> bool:
        bound = (not duty.moves.isdisjoint(self._enabled(state)) for state in component)
        return any(bound) if duty.strong else all(bound)

    def _obliged(self, state: int, broken: Sequence[Duty]) -> bool:
        enabled = self._enabled(state)
        return any(not duty.moves.isdisjoint(enabled) for duty in broken)

    def _components(self, states: Sequence[int]) -> list[array[int]]:
        """Tarjan's strongly connected components, without recursion. Single states count."""
        inside = set(states)
        index: dict[int, int] = {}
        low: dict[int, int] = {}
        stack: list[int] = []
        waiting: set[int] = set()
        found: list[array[int]] = []
        for root in states:
            if root in index:
                continue
            work = [(root, iter(self._within(root, inside)))]
            index[root] = low[root] = len(index)
            stack.append(root)
            waiting.add(root)
            while work:
                state, rest = work[-1]
                after = next(rest, None)
                if after is None:
                    work.pop()
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[state])
                    if low[state] == index[state]:
                        found.append(_pop(stack, waiting, state))
                elif after not in index:
                    index[after] = low[after] = len(index)
                    stack.append(after)
                    waiting.add(after)
                    work.append((after, iter(self._within(after, inside))))
                elif after in waiting:
                    low[state] = min(low[state], index[after])
        return found

    def _within(self, state: int, inside: set[int]) -> list[int]:
        return [
            after
            for label, after in self._after(state)
            if after in inside and label not in self._never
        ]

    def _cycle(self, component: Sequence[int], inside: set[int]) -> Cycle:
        """A way around the component that does every duty, or passes where it does not bind."""
        entry = at = min(component)
        edges: list[Edge] = []
        for wanted in self._wants(component, self._taken(inside)):
            if not any(wanted(edge) for edge in edges):
                edges += self._way(at, inside, wanted)
                at = edges[-1].after if edges else entry
        if at != entry or not edges:
            edges += self._way(at, inside, lambda edge: edge.after == entry)
        return Cycle(entry, tuple(edge.label for edge in edges), len(component))

    def _wants(self, component: Sequence[int], taken: set[int]) -> Iterator[Wanted]:
        if self._often:
            yield lambda edge: edge.label in self._often
        for duty in self._duties:
            if not self._binds(duty._replace(strong=True), component):
                continue
            if duty.answers & taken:
                yield partial(_answers, duty)
            else:
                yield partial(self._rests, duty)

    def _rests(self, duty: Duty, edge: Edge) -> bool:
        return duty.moves.isdisjoint(self._enabled(edge.before))

    def _way(self, start: int, inside: set[int], wanted: Wanted) -> list[Edge]:
        """The shortest way from `start` whose last edge is wanted; empty if there is none."""
        came: dict[int, Edge] = {}
        layer = [start]
        while layer:
            following = []
            for edge in self._edges(layer, inside):
                if wanted(edge):
                    return _walk_back(came, start, edge)
                if edge.after not in came and edge.after != start:
                    came[edge.after] = edge
                    following.append(edge.after)
            layer = following
        return []

    def _edges(self, layer: Sequence[int], inside: set[int]) -> Iterator[Edge]:
        for state in layer:
            for label, after in self._after(state):
                if after in inside and label not in self._never:
                    yield Edge(state, label, after)


def _answers(duty: Duty, edge: Edge) -> bool:
    return edge.label in duty.answers


def _pop(stack: list[int], waiting: set[int], root: int) -> array[int]:
    found = array("i")
    while True:
        state = stack.pop()
        waiting.discard(state)
        found.append(state)
        if state == root:
            return found


def _walk_back(came: dict[int, Edge], start: int, last: Edge) -> list[Edge]:
    edges = [last]
    while edges[-1].before != start:
        edges.append(came[edges[-1].before])
    return edges[::-1]

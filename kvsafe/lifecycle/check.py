# SPDX-License-Identifier: Apache-2.0
"""One world checked: every law in every reachable state, and every property on every cycle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvsafe.lifecycle.explorer import Explorer, Walk
from kvsafe.lifecycle.fair import Cycle, Graph
from kvsafe.lifecycle.liveness import LIVENESS, Liveness
from kvsafe.lifecycle.story import move_in_words, story
from kvsafe.lifecycle.table import RULES, Rule, in_force
from kvsafe.lifecycle.world import World
from kvsafe.lifecycle.worlds import POLICIES, lively, worlds


class Stuck(NamedTuple):
    """A liveness property that is broken, the way to the cycle and the cycle, as move numbers."""

    law: str
    path: tuple[int, ...]
    cycle: Cycle


class Result(NamedTuple):
    """What one world gave. `live` worlds were checked for liveness as well."""

    walk: Walk
    live: bool
    stuck: tuple[Stuck, ...] = ()

    @property
    def ok(self) -> bool:
        """Walked to the end, nothing broken."""
        return self.walk.complete and self.walk.violation is None and not self.stuck

    def report(self) -> dict[str, object]:
        """The figures, as JSON takes them."""
        walk, world = self.walk, self.walk.world
        return {
            "world": world.name,
            "policy": world.policy.name,
            "keys": world.keys,
            "rows": world.rows,
            "requests": world.requests,
            "tiers": world.tiers,
            "features": sorted(world.features),
            "symmetry": world.symmetric,
            "liveness": self.live,
            "states": walk.states,
            "transitions": walk.transitions,
            "depth": walk.depth,
            "seconds": round(walk.seconds, 2),
            "peak_mib": round(walk.peak_mib),
            "complete": walk.complete,
            "broken": list(walk.violation.laws) if walk.violation else [],
            "stuck": [stuck.law for stuck in self.stuck],
        }

    def in_words(self) -> Iterator[str]:
        """The trace of whatever is broken."""
        walk = self.walk
        if walk.violation is not None:
            yield f"broken: {', '.join(walk.violation.laws)}: {walk.violation.text}"
            yield from story(walk.world, walk.violation.moves, walk.violation.states)
        for stuck in self.stuck:
            yield f"broken: {stuck.law}: this can go on for ever"
            yield from (f"     {line}" for line in _moves(walk, stuck.path))
            yield "     and then again and again:" if stuck.cycle.moves else "     and nothing more"
            yield from (f"     {line}" for line in _moves(walk, stuck.cycle.moves))


def _moves(walk: Walk, numbers: Iterable[int]) -> Iterator[str]:
    for number in numbers:
        yield move_in_words(walk.world, walk.moves[number])


def claims(world: World) -> tuple[Liveness, ...]:
    """The liveness properties that hold in a world like this."""
    return tuple(law for law in LIVENESS if not (law.unless and world.has(law.unless)))


def check_safety(world: World, rules: Sequence[Rule] = RULES, limit: int = 50_000_000) -> Result:
    """Every law in every reachable state."""
    return Result(Explorer(world, rules, limit=limit).run(), live=False)


def check_liveness(world: World, rules: Sequence[Rule] = RULES, limit: int = 5_000_000) -> Result:
    """The same, and every property on every cycle."""
    laws = claims(world)
    explorer = Explorer(world, rules, marks=[law.bad for law in laws], graph=True, limit=limit)
    walk = explorer.run()
    stuck = []
    for law, mark in zip(laws, walk.marks, strict=True):
        cycle = None if walk.violation else Graph(walk, mark, law).fair_cycle()
        if cycle is not None:
            stuck.append(Stuck(law.name, walk.path(cycle.entry), cycle))
    return Result(walk, live=True, stuck=tuple(stuck))


Told = Callable[[Result], None]


def check_all(
    size: str, policies: Sequence[str], told: Told, limit: int = 50_000_000, only: str = ""
) -> tuple[Result, ...]:
    """All worlds of one size, and the liveness worlds (or those called `only`)."""
    todo = [(world, check_safety) for world in worlds(size, policies)]
    for name in policies:
        live = lively(POLICIES[name], whole=size == "big")
        todo += [(world, check_liveness) for world in live]
    results = []
    for world, checked in todo:
        if only in ("", world.name):
            results.append(checked(world, limit=limit))
            told(results[-1])
    return tuple(results)


def never_fired(results: Iterable[Result]) -> tuple[str, ...]:
    """Rules that were in force somewhere and fired nowhere: nothing was learnt about them."""
    fired: set[str] = set()
    known: set[str] = set()
    for result in results:
        walk = result.walk
        known |= {rule.event for rule in in_force(RULES, walk.world.features)}
        fired |= {walk.moves[number].rule.event for number in walk.fired}
    return tuple(rule.event for rule in RULES if rule.event in known - fired)

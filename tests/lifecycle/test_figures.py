# SPDX-License-Identifier: Apache-2.0
"""The worlds and the figures of their walks, written down: nothing of them changes by accident.

A world that loses a key, or a rule whose guard became stronger, leaves every law true and proves
less. Only its figures show that. A change of the machine on purpose changes them here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsafe.lifecycle.check import Result, check_liveness, check_safety
from kvsafe.lifecycle.explorer import Explorer
from kvsafe.lifecycle.world import World
from kvsafe.lifecycle.worlds import ARC, LRU, POLICIES, SIZES, lively, small, worlds

TABLE = Path(__file__).with_name("worlds.txt")

# States, moves and depth of the walk.
WALKS = {
    "small lru rows": (2017, 10119, 42),
    "small lru batch": (1105, 3976, 35),
    "small lru ghosts": (80, 189, 18),
    "small lru own reads": (170, 332, 21),
    "small lru cascades": (1381, 6120, 31),
    "small lru damage": (4641, 19265, 74),
    "small lru reset": (3432, 13123, 49),
    "small lru probes": (2063, 6002, 33),
    "small lru shutdown": (310, 1133, 38),
    "small arc ghosts": (1230, 2607, 51),
    "small arc own reads": (362, 674, 29),
    "small arc cascades": (4195, 18849, 43),
    "small arc shutdown": (1271, 4689, 55),
    "lively lru parking": (2865, 14882, 39),
    "lively lru slow answers": (4123, 11989, 33),
    "lively lru no answers": (404, 1101, 23),
    "lively lru going down": (306, 1018, 17),
}


def _world(name: str) -> tuple[World, Callable[[World], Result]]:
    kind, policy, rest = name.split(" ", 2)
    known = small(POLICIES[policy]) if kind == "small" else lively(POLICIES[policy])
    [world] = [world for world in known if world.name == rest]
    return world, check_safety if kind == "small" else check_liveness


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_has_the_figures_that_it_had(name: str) -> None:
    world, check = _world(name)
    result = check(world)
    walk = result.walk
    assert (walk.states, walk.transitions, walk.depth) == WALKS[name]
    assert result.ok and walk.complete and walk.violation is None
    assert len(walk.edges) == len(walk.labels) == (walk.transitions if result.live else 0)


def _lines() -> Iterator[str]:
    for size in SIZES:
        for policy in POLICIES:
            yield f"[{size} {policy}]"
            yield from map(_line, worlds(size, (policy,)))
    for known in (LRU, ARC):
        yield f"[lively {known.name}]"
        yield from map(_line, lively(known))
    yield "[lively arc, whole]"
    yield from (world.name for world in lively(ARC, whole=True))


def _line(world: World) -> str:
    lengths = sorted({len(prefix) for prefix in world.prefixes})
    numbered = "" if world.symmetric else ", numbered"
    return (
        f"{world.name}: {world.keys} {world.rows} {world.requests} {world.tiers}, "
        f"{len(set(world.prefixes))} of {lengths}, {len(world.seeded)} seeded, "
        f"late {world.late_limit}{numbered}, {' '.join(sorted(world.features))}"
    )


def test_the_worlds_are_those_of_the_table() -> None:
    assert TABLE.read_text().splitlines() == list(_lines())


def test_prefixes_and_seeds_name_what_there_is() -> None:
    for size in SIZES:
        for world in worlds(size):
            for prefix in world.prefixes:
                assert len(set(prefix)) == len(prefix) and set(prefix) <= set(range(world.keys))
            wanted = {(tier, key) for tier in range(world.tiers) for key in range(world.keys)}
            assert world.seeded in (frozenset(), wanted)


def test_a_walk_stops_where_it_is_told() -> None:
    world, _ = _world("small lru rows")
    cut = Explorer(world, limit=500, graph=True).run()
    assert not cut.complete and cut.violation is None
    # The layer that reaches the limit is finished.
    assert 500 <= cut.states < 2017
    assert [len(cut.path(state)) for state in (0, 1)] == [0, 1]
    assert cut.distance(cut.states - 1) == cut.depth
    report = check_safety(world, limit=500).report()
    assert (report["complete"], report["broken"], report["stuck"]) == (False, [], [])
    assert {"keys": 2, "rows": 1, "requests": 2, "tiers": 0}.items() <= report.items()

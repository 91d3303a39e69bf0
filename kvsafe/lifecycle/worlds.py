# SPDX-License-Identifier: Apache-2.0
"""The worlds that are walked. The full product of all features is too large for one machine, so
each world has some of them; `about` says which questions it answers. Together they have all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

from kvsafe.lifecycle.arc import Arc
from kvsafe.lifecycle.lru import Lru
from kvsafe.lifecycle.policy import Policy
from kvsafe.lifecycle.world import FEATURES, World

LRU: Final = Lru()
ARC: Final = Arc()
POLICIES: Final[dict[str, Policy]] = {"lru": LRU, "arc": ARC}
SIZES: Final = ("small", "default", "big")


def prefixes(keys: int, *lengths: int) -> tuple[tuple[int, ...], ...]:
    """All key tuples of these lengths without repetition: closed under renaming of keys."""
    found: list[tuple[int, ...]] = []
    for length in lengths:
        found += itertools.permutations(range(keys), length)
    return tuple(found)


def seeds(tiers: int, keys: int) -> frozenset[tuple[int, int]]:
    """Every tier has every key."""
    return frozenset(itertools.product(range(tiers), range(keys)))


def _world(  # noqa: PLR0913 - a row of a table
    name: str, policy: Policy, size: tuple[int, int, int, int], lengths: tuple[int, ...],
    features: str, about: str, *, seeded: bool = False, symmetric: bool = True, late: int = 2,
) -> World:  # fmt: skip
    """`size` is keys, rows, requests, tiers; `lengths` of prefixes; `features` by their names."""
    keys, rows, requests, tiers = size
    chosen = frozenset(features.split())
    unknown = chosen - FEATURES.keys()
    if unknown:
        raise ValueError(f"unknown features {sorted(unknown)}")
    return World(
        name=name,
        about=about,
        policy=policy,
        keys=keys,
        rows=rows,
        requests=requests,
        tiers=tiers,
        prefixes=prefixes(keys, *lengths),
        features=chosen,
        seeded=seeds(tiers, keys) if seeded else frozenset(),
        symmetric=symmetric,
        late_limit=late,
    )


# fmt: off
def small(policy: Policy) -> tuple[World, ...]:
    """Seconds: what the tests walk."""
    return (
        _world("rows", policy, (2, 1, 2, 0), (1,), "store fail refuse abort",
               "stores, loads and evictions over one row"),
        _world("batch", policy, (3, 2, 1, 0), (1, 2), "store fail preempt",
               "stores of several keys at once, beside what is resident"),
        _world("ghosts", policy, (3, 1, 1, 0), (1, 2), "store",
               "more keys than rows and ghosts, offers larger than the tier"),
        _world("promotions", policy, (2, 1, 2, 1), (1, 2), "promote fail", seeded=True,
               about="promotions that wait, fail and find no room"),
        _world("own reads", policy, (2, 2, 1, 1), (1, 2), "promote", seeded=True,
               about="a request reads what it promoted"),
        _world("cascades", policy, (2, 2, 1, 2), (1,), "store cascade fail",
               "two tiers that are written to"),
        _world("parked", policy, (2, 1, 2, 1), (1,), "store cascade request-level fail",
               "request-level cascades of keys whose write is in flight"),
        _world("damage", policy, (2, 1, 1, 2), (1,), "promote damage store cascade",
               "damaged objects are refused and stored anew"),
        _world("reset", policy, (2, 1, 1, 1), (1,), "store cascade promote reset",
               "resets with transfers in flight", late=1),
        _world("deadlines", policy, (2, 1, 1, 1), (1,), "store cascade promote deadline",
               "transfers that never report"),
        _world("probes", policy, (2, 1, 1, 1), (1, 2), "promote probe vanish", seeded=True,
               about="tiers that answer later"),
        _world("shutdown", policy, (2, 1, 1, 1), (1,), "store cascade promote abort shutdown",
               "shutdown with transfers in flight"),
    )


def default(policy: Policy) -> tuple[World, ...]:
    """Minutes on one core. What does not depend on the policy is walked with LRU only."""
    if policy is not LRU:
        return (
            _world("rows", policy, (3, 2, 2, 0), (1,), "store fail",
                   "stores, loads and evictions over two rows"),
            _world("offers", policy, (4, 2, 1, 0), (1, 2), "store fail abort",
                   "one request: offers of one and two keys, ghosts"),
            _world("promotions", policy, (3, 2, 2, 2), (1,), "promote", seeded=True,
                   about="promotions from two tiers that wait and find no room"),
            _world("prefixes", policy, (3, 2, 1, 2), (1, 2), "promote fail abort", seeded=True,
                   about="one request: promotions that fail, prefixes of two keys"),
        )
    return (
        _world("rows", policy, (3, 2, 2, 0), (1,), "store fail refuse abort preempt",
               "stores, loads and evictions over two rows"),
        _world("promotions", policy, (3, 2, 2, 2), (1,), "promote fail abort", seeded=True,
               about="promotions from two tiers that wait, fail and find no room"),
        _world("prefixes", policy, (3, 2, 2, 2), (1, 2), "promote", seeded=True,
               about="the same with prefixes of two keys"),
        _world("offers", policy, (3, 2, 2, 0), (1, 2), "store",
               "offers of one and two keys that compete for two rows"),
        _world("cascades", policy, (3, 2, 2, 2), (1,), "store cascade",
               "two tiers that are written to"),
        _world("both ways", policy, (3, 2, 1, 2), (1,), "store cascade promote fail",
               "cascades and promotions of one request"),
        _world("damage", policy, (3, 2, 1, 1), (1,), "promote damage store cascade",
               "damaged objects are refused and stored anew"),
        _world("reset", policy, (3, 2, 1, 1), (1,), "store cascade promote reset",
               "resets with transfers in flight", late=1),
        _world("deadlines", policy, (3, 2, 1, 1), (1,), "store cascade promote deadline",
               "transfers that never report", late=1),
        _world("probes", policy, (3, 2, 1, 1), (1, 2), "promote probe vanish", seeded=True,
               about="a tier that answers later"),
        _world("shutdown", policy, (3, 2, 2, 1), (1,), "store cascade promote shutdown",
               "shutdown with transfers in flight"),
    )


def big(policy: Policy) -> tuple[World, ...]:
    """Hours: more rows, two requests and two tiers with everything, longer prefixes."""
    return (
        _world("rows", policy, (3, 2, 2, 0), (1, 2), "store fail refuse abort preempt",
               "offers of one and two keys with every failure"),
        _world("three rows", policy, (4, 3, 2, 0), (1,), "store fail",
               "stores, loads and evictions over three rows"),
        _world("prefixes", policy, (3, 2, 2, 2), (1, 2, 3), "promote fail abort", seeded=True,
               about="prefixes longer than the rows"),
        _world("both ways", policy, (3, 2, 2, 2), (1,), "store cascade promote",
               "cascades and promotions of two requests"),
        _world("parked", policy, (3, 2, 2, 1), (1,), "store cascade request-level fail",
               "request-level cascades of keys whose write is in flight"),
        _world("damage", policy, (3, 2, 1, 2), (1,), "promote damage store cascade",
               "damaged objects in two tiers"),
        _world("reset", policy, (3, 2, 1, 2), (1,), "store cascade promote reset",
               "resets with transfers of two tiers in flight"),
        _world("deadlines", policy, (3, 2, 1, 2), (1,), "store cascade promote deadline",
               "transfers of two tiers that never report"),
        _world("probes", policy, (3, 2, 2, 2), (1,), "promote probe vanish", seeded=True,
               about="two tiers that answer later"),
    )


def lively(policy: Policy, *, whole: bool = False) -> tuple[World, ...]:
    """Where liveness is checked: every key and request keeps its number.

    ARC's ghosts make three of them large; those are left to LRU unless the `whole` is wanted.
    """
    large = () if whole or policy is LRU else ("starving", "never reported", "overtaken")
    return tuple(world for world in _lively(policy) if world.name not in large)


def _lively(policy: Policy) -> tuple[World, ...]:
    return (
        _world("long prefix", policy, (3, 2, 1, 1), (3,), "promote fail", seeded=True,
               symmetric=False, about="a prefix that is longer than there are rows"),
        _world("starving", policy, (3, 1, 2, 1), (1,), "store promote", seeded=True,
               symmetric=False, about="a store against promotions over one row"),
        _world("parking", policy, (1, 1, 2, 1), (1,), "store cascade request-level fail abort",
               symmetric=False, about="cascades of keys whose write is in flight"),
        _world("never reported", policy, (2, 1, 1, 1), (1,), "store cascade promote deadline",
               symmetric=False, late=9, about="transfers that never report"),
        _world("slow answers", policy, (2, 1, 1, 1), (1, 2), "promote probe vanish", seeded=True,
               symmetric=False, about="tiers that answer later"),
        _world("no answers", policy, (2, 1, 1, 1), (1,), "promote probe deadline", seeded=True,
               symmetric=False, late=9, about="tiers that never answer"),
        _world("overtaken", policy, (2, 1, 1, 1), (1,), "store cascade promote reset",
               symmetric=False, about="what a reset leaves behind"),
        _world("going down", policy, (1, 1, 2, 1), (1,), "store cascade promote shutdown",
               symmetric=False, seeded=True, about="shutdown with transfers in flight"),
    )
# fmt: on

BY_SIZE: Final = {"small": small, "default": default, "big": big}


def worlds(size: str, policies: Iterable[str] = ("lru", "arc")) -> tuple[World, ...]:
    """The safety worlds of one size, for each policy."""
    return tuple(world for name in policies for world in BY_SIZE[size](POLICIES[name]))

# SPDX-License-Identifier: Apache-2.0
"""How large a world is and what can happen in it: the fixed part that every rule may ask."""

from __future__ import annotations

from typing import NamedTuple

from kvsafe.lifecycle.policy import Policy
from kvsafe.lifecycle.words import (
    ABSENT,
    GOOD,
    Counts,
    Request,
    State,
)

FEATURES = {
    "store": "running requests store what they computed",
    "cascade": "what becomes ready goes to every tier",
    "request-level": "tier 0 also wants what was there before (vLLM's request-level policy)",
    "promote": "tiers are asked on a miss",
    "probe": "tiers answer whether they have an object only later",
    "fail": "writes, seals, promotions and cascades may fail",
    "vanish": "other processes remove objects from tiers",
    "damage": "objects in tiers may be damaged",
    "refuse": "a worker may refuse a chunk that it loads",
    "abort": "requests may be aborted at any moment",
    "preempt": "running requests may be put back to waiting",
    "deadline": "transfers may never report; deadlines pass",
    "reset": "the cache may be reset at any moment",
    "shutdown": "the connector may be shut down at any moment",
}


class World(NamedTuple):
    """One small world. `prefixes` are the key tuples that requests may ask for.

    `seeded` are the (tier, key) pairs that the tiers have at the start. In a `symmetric` world
    keys, requests and tiers are interchangeable to the explorer; rows always are. `late_limit`
    bounds how many overtaken transfers may be unreported at a time.
    """

    name: str
    about: str
    policy: Policy
    keys: int
    rows: int
    requests: int
    tiers: int
    prefixes: tuple[tuple[int, ...], ...]
    features: frozenset[str]
    seeded: frozenset[tuple[int, int]] = frozenset()
    symmetric: bool = True
    late_limit: int = 2

    def has(self, feature: str) -> bool:
        """Whether `feature` can happen here."""
        return feature in self.features

    def start(self) -> State:
        """The first state: nothing resident, nobody there."""
        objects = tuple(
            tuple(GOOD if (tier, key) in self.seeded else ABSENT for key in range(self.keys))
            for tier in range(self.tiers)
        )
        return State(
            chunks=(None,) * self.keys,
            free=tuple(range(self.rows)),
            contents=(None,) * self.rows,
            order=self.policy.empty(),
            counts=Counts(),
            requests=(Request(),) * self.requests,
            objects=objects,
        )

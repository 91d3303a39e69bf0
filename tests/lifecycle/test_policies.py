# SPDX-License-Identifier: Apache-2.0
"""The pure LRU and ARC in lockstep with vLLM 0.32's own classes: same order, same victims."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvsafe.lifecycle.arc import Arc, ArcOrder
from kvsafe.lifecycle.late_faults import BoundlessArc, EagerArc, UntrimmedArc
from kvsafe.lifecycle.lru import Lru
from kvsafe.lifecycle.policy import Policy

CAPACITY = 4
KEYS = 9


class Twin:
    """vLLM's policy and ours, given the same events."""

    def __init__(self, name: str, ours: Policy) -> None:
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

        self.keys = [make_offload_key(bytes([number]) * 8, 0) for number in range(KEYS)]
        self.theirs: Any = CachePolicyFactory.get_cache_policy_cls(name)(cache_capacity=CAPACITY)
        self.context = ReqContext(req_id="r")
        self.ours = ours
        self.order = ours.empty()
        self.refs: dict[int, int] = {}

    def insert(self, offer: Sequence[int]) -> None:
        """A store: misses are seen, room is made, rows are given."""
        new = [key for key in offer if key not in self.refs]
        self.theirs.on_store_miss([self.keys[key] for key in new], self.context)
        self.order = self.ours.missed(self.order, new, CAPACITY)
        if self._make_room(len(self.refs) + len(new) - CAPACITY, offer):
            for key in new:
                self._give(key)

    def _make_room(self, count: int, offer: Sequence[int]) -> bool:
        if count <= 0:
            return True
        evicted = self.theirs.evict(count, {self.keys[key] for key in offer})
        victims = self.ours.victims(
            self.order, count, lambda key: key not in offer and self.refs[key] == 0
        )
        named = None if evicted is None else tuple(self.keys.index(key) for key, _ in evicted)
        assert named == victims
        if victims is None:
            return False
        self.order = self.ours.evict(self.order, victims, CAPACITY)
        for key in victims:
            del self.refs[key]
        return True

    def _give(self, key: int) -> None:
        from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

        self.theirs.insert(self.keys[key], ChunkStatus(0))
        self.order = self.ours.insert(self.order, key)
        self.refs[key] = -1

    def set_ref(self, key: int, ref: int) -> None:
        """Ready, pinned or unpinned."""
        old, self.refs[key] = self.refs[key], ref
        self.theirs.get(self.keys[key]).ref_cnt = ref
        if ref == 0:
            self.theirs.mark_evictable(self.keys[key])
        elif old == 0:
            self.theirs.mark_non_evictable(self.keys[key])

    def fail(self, key: int) -> None:
        """A write failed."""
        self.theirs.remove(self.keys[key])
        self.order = self.ours.remove(self.order, key)
        del self.refs[key]

    def finish(self, seen: Sequence[int], inserted: set[int], reused: set[int]) -> None:
        """A request ended."""
        named = [self.keys[key] for key in seen]
        only = {self.keys[key] for key in inserted - reused}
        self.theirs.on_request_finished(
            (tuple(named),), only, {self.keys[key] for key in reused}, self.context
        )
        self.order = self.ours.finished(self.order, seen, inserted - reused, reused)

    def differ(self) -> bool:
        """Whether the lines differ anywhere."""
        if isinstance(self.order, ArcOrder):
            lines = (self.theirs.t1, self.theirs.t2, self.theirs.b1, self.theirs.b2)
            named = [tuple(self.keys.index(key) for key in line) for line in lines]
            return bool((*named, self.theirs.target_t1_size) != tuple(self.order))
        ranked = sorted(self.theirs.chunks, key=self.theirs._ranks.__getitem__)
        return bool(tuple(self.keys.index(key) for key in ranked) != self.order)


def drive(twin: Twin, seed: int, events: int = 120) -> bool:
    """A random run; whether the two ever differed."""
    dice = random.Random(seed)
    return any(not _once(twin, dice) or twin.differ() for _ in range(events))


def _once(twin: Twin, dice: random.Random) -> bool:
    what = dice.randrange(5)
    some = dice.sample(range(KEYS), dice.randint(1, 3))
    ready = [key for key, ref in twin.refs.items() if ref >= 0]
    if what == 0:
        try:
            twin.insert(some)
        except AssertionError:
            return False
    elif what == 1 and twin.refs:
        key = dice.choice(sorted(twin.refs))
        if twin.refs[key] == -1 and dice.random() < 0.3:
            twin.fail(key)
        elif twin.refs[key] == -1:
            twin.set_ref(key, 0)
    elif what == 2 and ready:
        twin.set_ref(key := dice.choice(ready), 1 - min(1, twin.refs[key]))
    elif what > 2:
        reused = {key for key in some if dice.random() < 0.5 and key in ready}
        twin.finish(some, {key for key in some if dice.random() < 0.5}, reused)
    return True


@pytest.mark.parametrize(("name", "ours"), [("lru", Lru()), ("arc", Arc())])
def test_same_order_and_same_victims(name: str, ours: Policy) -> None:
    pytest.importorskip("vllm")
    assert [seed for seed in range(60) if drive(Twin(name, ours), seed)] == []


class WrongEnd(Lru):
    """Evicts the newest."""

    def evict(self, order: Any, victims: Any, capacity: int) -> Any:
        return tuple(reversed(super().evict(order, victims, capacity)))


@pytest.mark.parametrize(
    ("name", "ours"),
    [("lru", WrongEnd()), ("arc", UntrimmedArc()), ("arc", BoundlessArc()), ("arc", EagerArc())],
)
def test_a_difference_is_seen(name: str, ours: Policy) -> None:
    pytest.importorskip("vllm")
    assert any(drive(Twin(name, ours), seed) for seed in range(60))

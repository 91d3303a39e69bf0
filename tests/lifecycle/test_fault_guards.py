# SPDX-License-Identifier: Apache-2.0
"""Seeded faults are wrong in the way that they say, and right in all else."""

from __future__ import annotations

from kvsafe.lifecycle import late_faults, lookups
from kvsafe.lifecycle.words import BUILDING, GOOD, READY, WAITING, WRITING, Chunk, Request, State
from kvsafe.lifecycle.world import World
from kvsafe.lifecycle.worlds import LRU, small


def _world() -> World:
    return next(world for world in small(LRU) if world.name == "promotions")


def _asking(world: World) -> State:
    """Request 0 waits for key 0, which is nowhere."""
    state = world.start()._replace(objects=((0,) * world.keys,) * world.tiers)
    waiting = Request(phase=WAITING, keys=(0,))
    return state._replace(requests=(waiting, *state.requests[1:]))


def test_a_miss_like_vllms_is_of_what_neither_a_row_nor_a_tier_has() -> None:
    world = _world()
    state = _asking(world)
    assert late_faults.miss_like_vllm(world, state, 0) is True
    held = state._replace(objects=((GOOD, *state.objects[0][1:]), *state.objects[1:]))
    assert late_faults.miss_like_vllm(world, held, 0) is False
    for stage in (READY, WRITING):
        chunks = (Chunk(0, stage), *state.chunks[1:])
        assert late_faults.miss_like_vllm(world, state._replace(chunks=chunks), 0) is False
    assert late_faults.miss_like_vllm(world, state._replace(half=BUILDING), 0) is False


def test_a_spent_key_is_a_miss_to_the_machine_and_none_to_the_fault() -> None:
    """What is wrong about it: a key that a tier has is tried again although it failed."""
    world = _world()
    state = _asking(world)
    spent = state.requests[0]._replace(spent=frozenset({0}))
    state = state._replace(
        requests=(spent, *state.requests[1:]),
        objects=((GOOD, *state.objects[0][1:]), *state.objects[1:]),
    )
    assert lookups.can_miss(world, state, 0)
    assert not late_faults.miss_like_vllm(world, state, 0)

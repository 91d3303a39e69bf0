# SPDX-License-Identifier: Apache-2.0
"""Promotions: from a tier into a row, and ready only when the row was opened.

Also what other processes do to a tier meanwhile, since nothing that a tier says is believed.
"""

from __future__ import annotations

from kvsafe.lifecycle import rows
from kvsafe.lifecycle.lookups import in_tier, next_key
from kvsafe.lifecycle.requests import remember, with_request
from kvsafe.lifecycle.transfers import Room, learn_misses, set_object
from kvsafe.lifecycle.words import (
    ABSENT,
    DAMAGED,
    FETCHING,
    GOOD,
    OLD,
    PROVING,
    QUEUED,
    Content,
    State,
)
from kvsafe.lifecycle.world import World


def unread(state: State) -> frozenset[int]:
    """What some request was told hit or pending and has not read yet."""
    found: frozenset[int] = frozenset()
    for request in state.requests:
        found |= request.awaits
    return found


def claimed(state: State) -> bool:
    """Whether a store that found no room has the next one."""
    return any(request.claims for request in state.requests)


def promotion_room(world: World, state: State, key: int) -> tuple[int, ...] | None:
    """Whom a promotion may evict: anything idle that nobody waits for; nobody while a store waits.

    A hit told in this step and a promotion that was not read yet are both `unread`.
    """
    if claimed(state):
        return None
    return rows.victims(world, state, 1, unread(state) | {key})


def here(state: State, who: int) -> int:
    """The key that a lookup of this request is at, once it is known that there is one."""
    request = state.requests[who]
    return request.keys[request.position]


def can_try(world: World, state: State, who: int, tier: int) -> bool:
    """The next key is nowhere in the primary tier, this tier has it, no wait for it was spent."""
    key = next_key(state, who)
    if key is None or state.chunks[key] is not None or key in state.requests[who].spent:
        return False
    return in_tier(world, state, who, tier, key)


def can_promote(
    world: World, state: State, who: int, tier: int, room: Room = promotion_room
) -> bool:
    """As `can_try`, and there is room."""
    if not can_try(world, state, who, tier):
        return False
    return room(world, state, here(state, who)) is not None


def promote(world: World, state: State, who: int, tier: int, room: Room = promotion_room) -> State:
    """Evict, give a row, queue; the request waits and looks up its next key."""
    request = state.requests[who]
    key, position = here(state, who), request.position + 1
    state = learn_misses(world, state, who, (key,))
    state = rows.evict(world, state, room(world, state, key) or ())
    state = rows.allocate(world, state, key, QUEUED, who, tier)
    state = remember(world, state, who, inserted=(key,))
    return with_request(
        state,
        who,
        position=position,
        waits=True,
        scanned=position == len(request.keys),
        awaits=state.requests[who].awaits | {key},
    )


def can_find_no_room(
    world: World, state: State, who: int, tier: int, room: Room = promotion_room
) -> bool:
    """As `can_try`, and there is no room."""
    if not can_try(world, state, who, tier):
        return False
    return room(world, state, here(state, who)) is None


def find_no_room(world: World, state: State, who: int, tier: int) -> State:
    """Nothing is evicted; for this request, in this step, it is a miss."""
    state = learn_misses(world, state, who, (here(state, who),))
    return with_request(state, who, scanned=True)


def can_fetch(world: World, state: State, key: int) -> bool:
    """The tier fills the row, and it has the object."""
    chunk = state.chunks[key]
    if chunk is None or chunk.stage != FETCHING:
        return False
    return state.objects[chunk.tier][key] != ABSENT


def content_of(value: int, key: int) -> Content | None:
    """What is in a row after a tier has copied its object into it."""
    return Content(key, value == GOOD) if value in (GOOD, OLD) else None


def fetched(world: World, state: State, key: int) -> State:
    """The row has the object's bytes, whatever they are; nothing is believed yet."""
    chunk = rows.chunk_of(state, key)
    content = content_of(state.objects[chunk.tier][key], key)
    return rows.move(rows.fill(state, chunk.row, content), key, PROVING)


def can_fail_fetch(world: World, state: State, key: int) -> bool:
    """The tier fills the row, and may fail or no longer has the object."""
    chunk = state.chunks[key]
    if chunk is None or chunk.stage != FETCHING:
        return False
    return world.has("fail") or state.objects[chunk.tier][key] == ABSENT


def fail_fetch(world: World, state: State, key: int) -> State:
    """The chunk goes; whoever waited for it does not wait for this key again."""
    return rows.drop(world, state, key)


def _proving(state: State, key: int) -> bool | None:
    """Whether the row opens; None if it is not being opened."""
    chunk = state.chunks[key]
    if chunk is None or chunk.stage != PROVING:
        return None
    return state.contents[chunk.row] == Content(key, fresh=True)


def can_prove(world: World, state: State, key: int) -> bool:
    """The row opens: it is this chunk, of this epoch."""
    return _proving(state, key) is True


def proven(world: World, state: State, key: int) -> State:
    """Ready. It is not cascaded: it came from a tier."""
    return rows.make_ready(state, key)


def can_refuse(world: World, state: State, key: int) -> bool:
    """The row does not open."""
    return _proving(state, key) is False


def refuse(world: World, state: State, key: int) -> State:
    """Never visible; the object is quarantined where it came from."""
    tier = rows.chunk_of(state, key).tier
    return rows.drop(world, set_object(state, tier, key, ABSENT), key)


# ---- what other processes do to a tier ----------------------------------------------------


def can_vanish(world: World, state: State, tier: int, key: int) -> bool:
    """The tier has something under `key`."""
    return state.objects[tier][key] != ABSENT


def vanish(world: World, state: State, tier: int, key: int) -> State:
    """Removed by another process, by a quota, by an operator."""
    return set_object(state, tier, key, ABSENT)


def can_damage(world: World, state: State, tier: int, key: int) -> bool:
    """The tier has a good object."""
    return state.objects[tier][key] == GOOD


def damage(world: World, state: State, tier: int, key: int) -> State:
    """Altered behind our back."""
    return set_object(state, tier, key, DAMAGED)

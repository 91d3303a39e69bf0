# SPDX-License-Identifier: Apache-2.0
"""Stores and cascades: from the accelerator into a row, and from a row to the tiers."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvsafe.lifecycle import rows
from kvsafe.lifecycle.requests import remember, with_request
from kvsafe.lifecycle.words import (
    BUILDING,
    DAMAGED,
    FETCHING,
    GOOD,
    NOBODY,
    OLD,
    QUEUED,
    RUNNING,
    SCHEDULING,
    SEALING,
    WRITING,
    Content,
    State,
    put,
)
from kvsafe.lifecycle.world import World

# Given a request (for a store) or a key (for a promotion): whom to evict, or None.
Room = Callable[[World, State, int], tuple[int, ...] | None]

# ---- room -------------------------------------------------------------------------------


def wanted(state: State, who: int) -> tuple[int, ...]:
    """The keys that a store of this request would need rows for."""
    return tuple(key for key in state.requests[who].keys if state.chunks[key] is None)


def store_room(world: World, state: State, who: int) -> tuple[int, ...] | None:
    """Whom a store may evict: anything idle but the keys of its own offer."""
    keys = state.requests[who].keys
    return rows.victims(world, state, len(wanted(state, who)), keys)


def learn_misses(world: World, state: State, who: int, keys: Collection[int]) -> State:
    """The policy sees each miss of a request once, before the insertion and even without one."""
    new = [key for key in keys if key not in state.requests[who].access.missed]
    order = world.policy.missed(state.order, new, world.rows)
    return remember(world, state._replace(order=order), who, seen=keys, missed=keys)


# ---- stores -----------------------------------------------------------------------------


def storing(state: State, who: int) -> bool:
    """The request has computed something and this half of the step is for stores."""
    request = state.requests[who]
    return state.half == BUILDING and request.phase == RUNNING and not request.stored


def can_store(world: World, state: State, who: int, room: Room = store_room) -> bool:
    """It may store, and there is room for all of it (or nothing is missing)."""
    return storing(state, who) and room(world, state, who) is not None


def store(world: World, state: State, who: int, room: Room = store_room) -> State:
    """Evict, give rows, park or cascade what tier 0 wants besides."""
    new, request = wanted(state, who), state.requests[who]
    old = [key for key in request.keys if key not in new]
    ready = [key for key in old if rows.offered(state, key)]
    state = learn_misses(world, state, who, new)
    # The policy has learned of the misses when it chooses: a ghost's return moves ARC's target.
    state = rows.evict(world, state, room(world, state, who) or ())
    for key in new:
        state = rows.allocate(world, state, key, WRITING, who, NOBODY)
    state = remember(world, state, who, seen=ready, reused=ready)
    state = remember(world, state, who, inserted=new)
    state = with_request(state, who, stored=True, claims=False)
    if world.has("request-level"):
        state = cascade_old(world, state, who, old)
    return state


def can_refuse_store(world: World, state: State, who: int, room: Room = store_room) -> bool:
    """It may store and there is no room."""
    claims = state.requests[who].claims
    return storing(state, who) and not claims and room(world, state, who) is None


def refuse_store(world: World, state: State, who: int) -> State:
    """Nothing is evicted and nothing given; the next room is this store's.

    What was there already was met all the same, and the policy hears of it.
    """
    ready = [key for key in state.requests[who].keys if rows.offered(state, key)]
    state = learn_misses(world, state, who, wanted(state, who))
    state = remember(world, state, who, seen=ready, reused=ready)
    return with_request(state, who, claims=True)


def can_write(world: World, state: State, key: int) -> bool:
    """Workers copy into its row."""
    chunk = state.chunks[key]
    return chunk is not None and chunk.stage == WRITING


def written(world: World, state: State, key: int) -> State:
    """All writers have reported: the bytes are those of the request that stored them."""
    chunk = rows.chunk_of(state, key)
    fresh = not state.requests[chunk.by].tainted
    state = rows.fill(state, chunk.row, Content(key, fresh))
    return rows.move(state, key, SEALING)


def can_seal(world: World, state: State, key: int) -> bool:
    """All writers have reported."""
    chunk = state.chunks[key]
    return chunk is not None and chunk.stage == SEALING


def sealed(world: World, state: State, key: int) -> State:
    """Ready, and on its way to every tier."""
    state = rows.make_ready(state, key)
    if world.has("cascade"):
        for tier in range(world.tiers):
            state = submit_cascade(state, tier, key)
    return state


def fail_write(world: World, state: State, key: int) -> State:
    """Never visible: the chunk goes, its row is free."""
    return rows.drop(world, state, key)


# ---- cascades ---------------------------------------------------------------------------


def submit_cascade(state: State, tier: int, key: int) -> State:
    """Pin the row and hand it to the tier."""
    state = rows.pin(state, (key,))
    return state._replace(cascades=tuple(sorted((*state.cascades, (tier, key)))))


def cascade_old(world: World, state: State, who: int, keys: Collection[int]) -> State:
    """Request-level tier 0: what is ready goes now, what is being written is parked.

    A key that is on its way to the tier already is not sent a second time.
    """
    parked = set()
    for key in keys:
        if rows.offered(state, key):
            if (0, key) not in state.cascades:
                state = submit_cascade(state, 0, key)
        elif rows.pending(state, key):
            parked.add(key)
    return with_request(state, who, parked=frozenset(parked))


def can_report_cascade(world: World, state: State, tier: int, key: int) -> bool:
    """The tier reads this row."""
    return (tier, key) in state.cascades


def end_cascade(world: World, state: State, tier: int, key: int) -> State:
    """One cascade is over, however it went: one reader less."""
    left = list(state.cascades)
    left.remove((tier, key))
    return rows.unpin(world, state._replace(cascades=tuple(left)), (key,))


def object_of(content: Content | None, key: int) -> int:
    """What a tier has under `key` after it has copied these bytes."""
    if content is None or content.key != key:
        return DAMAGED
    return GOOD if content.fresh else OLD


def set_object(state: State, tier: int, key: int, value: int) -> State:
    """The tier has this under `key`."""
    objects = put(state.objects, tier, put(state.objects[tier], key, value))
    return state._replace(objects=objects)


def cascaded(world: World, state: State, tier: int, key: int) -> State:
    """The tier has the object; one reader less."""
    content = state.contents[rows.chunk_of(state, key).row]
    state = set_object(state, tier, key, object_of(content, key))
    return end_cascade(world, state, tier, key)


def can_step(world: World, state: State) -> bool:
    """Stores of this step have been prepared."""
    return state.half == BUILDING


def step(world: World, state: State) -> State:
    """Queued promotions are submitted, parked cascades looked at again, a new step begins."""
    for key, chunk in enumerate(state.chunks):
        if chunk is not None and chunk.stage == QUEUED:
            fetching = chunk._replace(stage=FETCHING, by=NOBODY)
            state = state._replace(chunks=put(state.chunks, key, fetching))
    for who, request in enumerate(state.requests):
        if request.parked:
            state = cascade_old(world, state, who, sorted(request.parked))
    return state._replace(half=SCHEDULING)

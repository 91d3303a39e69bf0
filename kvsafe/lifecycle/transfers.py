# SPDX-License-Identifier: Apache-2.0
"""Stores, cascades and promotions: everything that fills a row or reads one for a tier."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvsafe.lifecycle import rows
from kvsafe.lifecycle.requests import in_tier, next_key, remember, with_request
from kvsafe.lifecycle.words import (
    ABSENT,
    BUILDING,
    DAMAGED,
    FETCHING,
    GOOD,
    NOBODY,
    OLD,
    PROVING,
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


def unread(state: State) -> frozenset[int]:
    """What some request was told hit or pending and has not read yet."""
    found: frozenset[int] = frozenset()
    for request in state.requests:
        found |= request.awaits
    return found


def claimed(state: State) -> bool:
    """Whether a store that found no room has the next one."""
    return any(request.claims for request in state.requests)


def store_room(world: World, state: State, who: int) -> tuple[int, ...] | None:
    """Whom a store may evict: anything idle but the keys of its own offer."""
    keys = state.requests[who].keys
    return rows.victims(world, state, len(wanted(state, who)), keys)


def promotion_room(world: World, state: State, key: int) -> tuple[int, ...] | None:
    """Whom a promotion may evict: anything idle that nobody waits for; nobody while a store waits.

    A hit told in this step and a promotion that was not read yet are both `unread`.
    """
    if claimed(state):
        return None
    return rows.victims(world, state, 1, unread(state) | {key})


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
    chosen = room(world, state, who) or ()
    state = learn_misses(world, state, who, new)
    state = rows.evict(world, state, chosen)
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
    """Nothing is evicted and nothing given; the next room is this store's."""
    state = learn_misses(world, state, who, wanted(state, who))
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


# ---- promotions -------------------------------------------------------------------------


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


def promote(
    world: World, state: State, who: int, tier: int, room: Room = promotion_room
) -> State:
    """Evict, give a row, queue; the request waits and looks up its next key."""
    request = state.requests[who]
    key, position = here(state, who), request.position + 1
    chosen = room(world, state, key) or ()
    state = learn_misses(world, state, who, (key,))
    state = rows.evict(world, state, chosen)
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



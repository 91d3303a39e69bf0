# SPDX-License-Identifier: Apache-2.0
"""The primary tier: what happens to rows and refcounts, whoever asks for it.

Each function returns the next state and keeps the counters by adding and subtracting, as the
real classes do; `safety` recounts them.
"""

from __future__ import annotations

from collections.abc import Collection

from kvsafe.lifecycle.words import (
    NOBODY,
    READY,
    Chunk,
    Content,
    Counts,
    Request,
    State,
    put,
)
from kvsafe.lifecycle.world import World


class MachineError(Exception):
    """A rule was applied where its guard does not hold: a fault of the caller."""


def chunk_of(state: State, key: int) -> Chunk:
    """The chunk of `key`. Raises `MachineError` if there is none."""
    chunk = state.chunks[key]
    if chunk is None:
        raise MachineError(f"key {key} has no chunk")
    return chunk


def offered(state: State, key: int) -> bool:
    """Whether a lookup may say hit: ready, and not withdrawn."""
    chunk = state.chunks[key]
    return chunk is not None and chunk.stage == READY and not chunk.withdrawn


def pending(state: State, key: int) -> bool:
    """Whether a write of `key` is under way."""
    chunk = state.chunks[key]
    return chunk is not None and chunk.stage != READY


def evictable(state: State, key: int) -> bool:
    """Ready and read by nobody."""
    chunk = state.chunks[key]
    return chunk is not None and chunk.stage == READY and chunk.pins == 0


def allocate(world: World, state: State, key: int, stage: int, by: int, tier: int) -> State:
    """Give a free row to `key`, not ready. The row's old bytes mean nothing from now on."""
    row, *free = state.free
    return state._replace(
        chunks=put(state.chunks, key, Chunk(row, stage, by=by, tier=tier)),
        free=tuple(free),
        contents=put(state.contents, row, None),
        order=world.policy.insert(state.order, key),
        counts=state.counts._replace(pending=state.counts.pending + 1),
    )


def move(state: State, key: int, stage: int) -> State:
    """The next stage of a write under way."""
    return state._replace(chunks=put(state.chunks, key, chunk_of(state, key)._replace(stage=stage)))


def fill(state: State, row: int, content: Content | None) -> State:
    """The bytes of `row` are now these."""
    return state._replace(contents=put(state.contents, row, content))


def make_ready(state: State, key: int) -> State:
    """Refcount -1 to 0."""
    chunk = chunk_of(state, key)._replace(stage=READY, by=NOBODY, tier=NOBODY)
    counts = Counts(state.counts.evictable + 1, state.counts.pending - 1)
    return state._replace(chunks=put(state.chunks, key, chunk), counts=counts)


def pin(state: State, keys: Collection[int]) -> State:
    """One more reader for each key."""
    for key in keys:
        chunk = chunk_of(state, key)
        counts = state.counts
        if chunk.pins == 0:
            counts = counts._replace(evictable=counts.evictable - 1)
        chunks = put(state.chunks, key, chunk._replace(pins=chunk.pins + 1))
        state = state._replace(chunks=chunks, counts=counts)
    return state


def unpin(world: World, state: State, keys: Collection[int]) -> State:
    """One reader less for each key; a withdrawn chunk leaves with its last reader."""
    for key in keys:
        chunk = chunk_of(state, key)
        counts = state.counts
        if chunk.pins == 1:
            counts = counts._replace(evictable=counts.evictable + 1)
        chunks = put(state.chunks, key, chunk._replace(pins=chunk.pins - 1))
        state = state._replace(chunks=chunks, counts=counts)
        if chunk.pins == 1 and chunk.withdrawn:
            state = drop(world, state, key)
    return state


def withdraw(world: World, state: State, key: int) -> State:
    """Never offer this chunk again: remove it when idle, hide it while somebody reads it."""
    chunk = state.chunks[key]
    if chunk is None or chunk.stage != READY:
        return state
    if chunk.pins == 0:
        return drop(world, state, key)
    return state._replace(chunks=put(state.chunks, key, chunk._replace(withdrawn=True)))


def drop(world: World, state: State, key: int, *, retire: bool = False) -> State:
    """Remove a chunk that is idle or was never ready. Its row is free, or retired."""
    chunk = chunk_of(state, key)
    counts = state.counts
    if chunk.stage == READY:
        counts = counts._replace(evictable=counts.evictable - 1)
    else:
        counts = counts._replace(pending=counts.pending - 1)
    state = state._replace(
        chunks=put(state.chunks, key, None),
        order=world.policy.remove(state.order, key),
        counts=counts,
    )
    return over(state if retire else release(state, chunk.row), key)


def release(state: State, row: int) -> State:
    """A row that nobody owns and nobody writes into."""
    return state._replace(
        free=tuple(sorted((*state.free, row))), contents=put(state.contents, row, None)
    )


def over(state: State, key: int) -> State:
    """The chunk of `key` is gone: whoever waited for it has waited, and does not wait again."""
    return state._replace(requests=tuple(_over(request, key) for request in state.requests))


def _over(request: Request, key: int) -> Request:
    if key in request.awaits:
        request = request._replace(awaits=request.awaits - {key}, spent=request.spent | {key})
    if key in request.parked:
        request = request._replace(parked=request.parked - {key})
    return request


def victims(
    world: World, state: State, count: int, protected: Collection[int]
) -> tuple[int, ...] | None:
    """Whom to evict so that `count` rows are free; None if that cannot be done at all."""
    missing = count - len(state.free)
    if missing <= 0:
        return ()

    def allowed(key: int) -> bool:
        return key not in protected and evictable(state, key)

    found: tuple[int, ...] | None = world.policy.victims(state.order, missing, allowed)
    return found


def evict(world: World, state: State, keys: tuple[int, ...]) -> State:
    """Take these out, all of them."""
    if not keys:
        return state
    chunks = state.chunks
    for key in keys:
        state = release(state, chunk_of(state, key).row)
        chunks = put(chunks, key, None)
    state = state._replace(
        chunks=chunks,
        order=world.policy.evict(state.order, keys, world.rows),
        counts=state.counts._replace(evictable=state.counts.evictable - len(keys)),
    )
    for key in keys:
        state = over(state, key)
    return state

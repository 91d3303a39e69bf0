# SPDX-License-Identifier: Apache-2.0
"""Wrong guards and effects for `mutants`, each one small mistake beside the right function."""

from __future__ import annotations

from kvsafe.lifecycle import lookups as look
from kvsafe.lifecycle import promotions as up
from kvsafe.lifecycle import requests as req
from kvsafe.lifecycle import rows
from kvsafe.lifecycle import transfers as way
from kvsafe.lifecycle.words import (
    AWAY,
    ENDED,
    LOADING,
    NONE,
    OPEN,
    READY,
    WAITING,
    Request,
    State,
    put,
)
from kvsafe.lifecycle.world import World


def never(world: World, state: State, *who: int) -> bool:
    """A guard that never holds."""
    return False


def nothing(world: World, state: State, *who: int) -> State:
    """An effect that changes nothing."""
    return state


# ---- lookups and loads ------------------------------------------------------------------


def hit_pending(world: World, state: State, who: int) -> bool:
    """Does not look whether the chunk is ready."""
    key = look.next_key(state, who)
    return key is not None and state.chunks[key] is not None


def hit_withdrawn(world: World, state: State, who: int) -> bool:
    """Does not look whether the chunk was withdrawn."""
    key = look.next_key(state, who)
    chunk = None if key is None else state.chunks[key]
    return chunk is not None and chunk.stage == READY


def refused_is_kept(world: World, state: State, who: int, key: int) -> State:
    """Unpins, but leaves the refused chunk on offer."""
    request = state.requests[who]
    state = rows.unpin(world, state, sorted(request.loading))
    phase = WAITING if request.phase == LOADING else request.phase
    return req.with_request(state, who, phase=phase, loading=NONE)


def refuse_at_once(world: World, state: State, who: int, key: int) -> bool:
    """Does not wait for the end of the step."""
    return key in state.requests[who].loading


def loaded_keeps_withdrawn(world: World, state: State, who: int) -> State:
    """Unpins withdrawn chunks and leaves them there."""
    shown = state._replace(
        chunks=tuple(chunk and chunk._replace(withdrawn=False) for chunk in state.chunks)
    )
    after = req.loaded(world, shown, who)
    return after._replace(
        chunks=tuple(
            new and new._replace(withdrawn=old is not None and old.withdrawn)
            for new, old in zip(after.chunks, state.chunks, strict=True)
        )
    )


def own_reads_count(world: World, state: State, who: int) -> State:
    """Reading what the request itself inserted counts as a second use."""
    state = req.load(world, state, who)
    request = state.requests[who]
    access = request.access._replace(reused=request.access.reused | request.loading)
    return req.with_request(state, who, access=access)


def loaded_miscounts(world: World, state: State, who: int) -> State:
    """Unpins without counting what became evictable."""
    return req.loaded(world, state, who)._replace(counts=state.counts)


def loaded_if_alive(world: World, state: State, who: int) -> bool:
    """A report for a request that has ended is thrown away."""
    return req.can_report_load(world, state, who) and state.requests[who].phase != ENDED


def abort_unpins(world: World, state: State, who: int) -> State:
    """Unpins while the worker still reads."""
    state = rows.unpin(world, state, sorted(state.requests[who].loading))
    return req.end(world, state, who)


def finalise_early(world: World, state: State, who: int) -> bool:
    """Does not wait for pending stores."""
    request = state.requests[who]
    return request.phase == ENDED and not request.parked and not request.loading


def finish_twice(world: World, state: State, who: int) -> State:
    """Frees the slot, but keeps the tiers' hooks open."""
    hooked = state.requests[who].hooked
    return state._replace(requests=put(state.requests, who, Request(hooked=hooked)))


def sleep_early(world: World, state: State) -> bool:
    """Steps only for requests that live."""
    alive = any(request.phase not in (AWAY, ENDED) for request in state.requests)
    return alive and req.can_build(world, state)


def build_if_open(world: World, state: State) -> bool:
    """No steps once the door is closing."""
    return state.door == OPEN and req.can_build(world, state)


# ---- rooms ------------------------------------------------------------------------------


def room_of_pinned(world: World, state: State, who: int) -> tuple[int, ...] | None:
    """Takes ready chunks whatever their pins."""
    keys = state.requests[who].keys
    missing = len(way.wanted(state, who)) - len(state.free)

    def allowed(key: int) -> bool:
        chunk = state.chunks[key]
        return key not in keys and chunk is not None and chunk.stage == READY

    found: tuple[int, ...] | None = world.policy.victims(state.order, max(0, missing), allowed)
    return found


def room_of_own_input(world: World, state: State, who: int) -> tuple[int, ...] | None:
    """Protects nothing."""
    return rows.victims(world, state, len(way.wanted(state, who)), ())


def room_of_unread(world: World, state: State, key: int) -> tuple[int, ...] | None:
    """Protects only the key itself, as vLLM 0.32 does."""
    return rows.victims(world, state, 1, (key,))


def room_without_claim(world: World, state: State, key: int) -> tuple[int, ...] | None:
    """Does not let a store go first."""
    return rows.victims(world, state, 1, up.unread(state) | {key})


# ---- stores -----------------------------------------------------------------------------


def written_is_ready(world: World, state: State, key: int) -> State:
    """Ready before it is sealed."""
    return way.sealed(world, way.written(world, state, key), key)


def seal_if_alive(world: World, state: State, key: int) -> bool:
    """Drops the seals of requests that have ended."""
    chunk = state.chunks[key]
    return (
        way.can_seal(world, state, key)
        and chunk is not None
        and (state.requests[chunk.by].phase != ENDED)
    )


def half_eviction(world: World, state: State, who: int) -> State:
    """Evicts what there is although it is not enough."""
    state = way.refuse_store(world, state, who)
    own = state.requests[who].keys
    found = world.policy.victims(
        state.order, 1, lambda key: key not in own and rows.evictable(state, key)
    )
    return rows.evict(world, state, found or ())


def free_twice(world: World, state: State, key: int) -> State:
    """Its row goes to the free rows twice."""
    row = rows.chunk_of(state, key).row
    return rows.release(way.fail_write(world, state, key), row)


def lose_row(world: World, state: State, key: int) -> State:
    """Its row goes nowhere."""
    return rows.drop(world, state, key, retire=True)


def policy_keeps(world: World, state: State, key: int) -> State:
    """The policy is not told."""
    return way.fail_write(world, state, key)._replace(order=state.order)


def failure_miscounts(world: World, state: State, key: int) -> State:
    """The counter is not told."""
    return way.fail_write(world, state, key)._replace(counts=state.counts)

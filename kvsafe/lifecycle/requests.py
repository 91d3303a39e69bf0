# SPDX-License-Identifier: Apache-2.0
"""Requests: they arrive, load, run and end. Guards and effects; the table has the words.

Every guard is `guard(world, state, *who) -> bool`, every effect `effect(world, state, *who)`
returns the next state; `who` is what the table's row says it ranges over.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvsafe.lifecycle import rows
from kvsafe.lifecycle.words import (
    AWAY,
    BUILDING,
    ENDED,
    LOADING,
    NONE,
    OPEN,
    QUEUED,
    RECALLED,
    RUNNING,
    SCHEDULING,
    SEALING,
    WAITING,
    WRITING,
    Access,
    Request,
    State,
    put,
)
from kvsafe.lifecycle.world import World


def with_request(state: State, who: int, **changes: object) -> State:
    """`state` with some fields of one request changed."""
    request = state.requests[who]._replace(**changes)  # type: ignore[arg-type]
    return state._replace(requests=put(state.requests, who, request))


def remember(
    world: World,
    state: State,
    who: int,
    *,
    seen: Iterable[int] = (),
    inserted: Iterable[int] = (),
    reused: Iterable[int] = (),
    missed: Iterable[int] = (),
) -> State:
    """Note an access. Reading what the request itself inserted is no second access."""
    access = state.requests[who].access
    access = access._replace(seen=access.seen.union(seen))
    if world.policy.counts_reuse:
        new = access.inserted.union(inserted)
        read = access.reused | (frozenset(reused) - new)
        access = Access(access.seen, new, read, access.missed.union(missed))
    return with_request(state, who, access=access)


def can_arrive(world: World, state: State, who: int, prefix: int) -> bool:
    """The slot is unused and the door is open."""
    return state.requests[who].phase == AWAY and state.door == OPEN


def arrive(world: World, state: State, who: int, prefix: int) -> State:
    """Every tier is told of the request."""
    request = Request(
        phase=WAITING, keys=world.prefixes[prefix], hooked=frozenset(range(world.tiers))
    )
    return state._replace(requests=put(state.requests, who, request))


def _scanned(state: State, who: int) -> Request | None:
    request = state.requests[who]
    ready = state.half == SCHEDULING and request.phase == WAITING
    return request if ready and request.scanned and not request.waits else None


def can_load(world: World, state: State, who: int) -> bool:
    """All lookups of this step are over, none has to wait, and some were hits."""
    request = _scanned(state, who)
    return request is not None and request.position > 0


def load(world: World, state: State, who: int) -> State:
    """Pin what was told hit, all of it, and issue the load."""
    request = state.requests[who]
    keys = request.keys[: request.position]
    state = rows.pin(state, keys)
    state = remember(world, state, who, seen=keys, reused=keys)
    return with_request(
        state, who, phase=LOADING, loading=frozenset(keys), awaits=NONE, **_NOT_LOOKING
    )


_NOT_LOOKING = {"position": 0, "waits": False, "scanned": False}


def can_compute(world: World, state: State, who: int) -> bool:
    """All lookups of this step are over and there is nothing to load."""
    request = _scanned(state, who)
    return request is not None and request.position == 0


def compute(world: World, state: State, who: int) -> State:
    """Runs without loading."""
    return with_request(state, who, phase=RUNNING, awaits=NONE, **_NOT_LOOKING)


def between_steps(state: State) -> bool:
    """Nobody was looked up in this step yet: workers' reports are heard before that."""
    return state.half == SCHEDULING and not any(
        request.position or request.waits or request.scanned for request in state.requests
    )


def can_report_load(world: World, state: State, who: int) -> bool:
    """A load of this request is under way, dead or alive; workers report between steps."""
    return bool(state.requests[who].loading) and between_steps(state)


def loaded(world: World, state: State, who: int) -> State:
    """Unpin; the request runs, unless it has ended meanwhile."""
    request = state.requests[who]
    state = rows.unpin(world, state, sorted(request.loading))
    phase = RUNNING if request.phase == LOADING else request.phase
    return with_request(state, who, phase=phase, loading=NONE)


def can_refuse_load(world: World, state: State, who: int, key: int) -> bool:
    """A load of this chunk is under way; workers report between steps."""
    return key in state.requests[who].loading and between_steps(state)


def refuse_load(world: World, state: State, who: int, key: int) -> State:
    """A worker refused `key`: withdrawn for everyone; the request looks up and computes anew."""
    request = state.requests[who]
    state = rows.withdraw(world, state, key)
    state = rows.unpin(world, state, sorted(request.loading))
    phase = WAITING if request.phase == LOADING else request.phase
    return with_request(state, who, phase=phase, loading=NONE)


def can_recall(world: World, state: State, who: int) -> bool:
    """A reset overtook its load, and the worker reports it, between steps."""
    return state.requests[who].phase == RECALLED and between_steps(state)


def recall(world: World, state: State, who: int) -> State:
    """What was loaded counts for nothing; the request starts over."""
    return with_request(state, who, phase=WAITING)


def can_finish(world: World, state: State, who: int) -> bool:
    """The request runs."""
    return state.requests[who].phase == RUNNING


def can_abort(world: World, state: State, who: int) -> bool:
    """The request is anywhere between its arrival and its end."""
    return state.requests[who].phase in (WAITING, LOADING, RUNNING, RECALLED)


def end(world: World, state: State, who: int) -> State:
    """Its accesses reach the policy, once; transfers under way go on."""
    request = state.requests[who]
    access = request.access
    seen = [key for key in request.keys if key in access.seen]
    order = world.policy.finished(state.order, seen, access.inserted - access.reused, access.reused)
    ended = Request(
        phase=ENDED,
        keys=request.keys,
        loading=request.loading,
        parked=request.parked,
        hooked=request.hooked,
        stored=True,
    )
    return state._replace(order=order, requests=put(state.requests, who, ended))


def can_preempt(world: World, state: State, who: int) -> bool:
    """The request runs."""
    return state.requests[who].phase == RUNNING


def preempt(world: World, state: State, who: int) -> State:
    """Back to waiting; its stores go on."""
    return with_request(state, who, phase=WAITING, claims=False, stored=False)


def stores_pending(state: State, who: int) -> bool:
    """Whether a store of this request is not yet ready or failed."""
    return any(
        chunk is not None and chunk.by == who and chunk.stage in (WRITING, SEALING)
        for chunk in state.chunks
    )


def can_finalise(world: World, state: State, who: int) -> bool:
    """It ended, and nothing of it can be submitted to a tier any more."""
    request = state.requests[who]
    if request.phase != ENDED or request.parked or request.loading:
        return False
    queued = any(
        chunk is not None and chunk.by == who and chunk.stage == QUEUED for chunk in state.chunks
    )
    return not queued and not stores_pending(state, who)


def finalise(world: World, state: State, who: int) -> State:
    """Every tier is told that the request is over, once; the slot is unused."""
    return state._replace(requests=put(state.requests, who, Request()))


def awake(state: State) -> bool:
    """Whether the engine must go on stepping: somebody is there, or work is under way."""
    return (
        any(request.phase != AWAY for request in state.requests)
        or bool(state.cascades)
        or state.counts.pending > 0
    )


def can_build(world: World, state: State) -> bool:
    """Somebody or something needs a step, and no request's lookups are half done."""
    return state.half == SCHEDULING and awake(state) and not any(map(_looking, state.requests))


def _looking(request: Request) -> bool:
    begun = request.position > 0 or request.waits
    return request.phase == WAITING and begun and not request.scanned


def build(world: World, state: State) -> State:
    """Hits that were not loaded are promises no longer; they are looked up anew next step."""
    requests = tuple(
        request._replace(position=0, waits=False, scanned=False)
        if request.phase == WAITING
        else request
        for request in state.requests
    )
    return state._replace(half=BUILDING, requests=requests)

# SPDX-License-Identifier: Apache-2.0
"""Lookups: one key after the other, until the prefix ends, step after step.

A lookup is answered hit, come back, or miss. While one key of the prefix is pending the scan goes
on, so that tiers are asked for all of it at once; the request itself then comes back.
"""

from __future__ import annotations

from kvsafe.lifecycle import rows
from kvsafe.lifecycle.requests import with_request
from kvsafe.lifecycle.words import SCHEDULING, WAITING, State
from kvsafe.lifecycle.world import World


def next_key(state: State, who: int) -> int | None:
    """The key that this request's lookups are at; None when they are over for this step."""
    request = state.requests[who]
    if state.half != SCHEDULING or request.phase != WAITING or request.scanned:
        return None
    return request.keys[request.position]


def _found(state: State, who: int, *, waits: bool) -> State:
    request = state.requests[who]
    key, position = request.keys[request.position], request.position + 1
    return with_request(
        state,
        who,
        position=position,
        waits=request.waits or waits,
        scanned=position == len(request.keys),
        awaits=request.awaits | {key},
    )


def can_hit(world: World, state: State, who: int) -> bool:
    """The next key is offered by the primary tier."""
    key = next_key(state, who)
    return key is not None and rows.offered(state, key)


def hit(world: World, state: State, who: int) -> State:
    """Told hit; from now until it is read, promotions may not evict it."""
    return _found(state, who, waits=False)


def can_pend(world: World, state: State, who: int) -> bool:
    """A write of the next key is under way and this request has not waited for it in vain."""
    key = next_key(state, who)
    return key is not None and rows.pending(state, key) and key not in state.requests[who].spent


def pend(world: World, state: State, who: int) -> State:
    """Told to come back; the lookups go on with the next key."""
    return _found(state, who, waits=True)


def in_tier(world: World, state: State, who: int, tier: int, key: int) -> bool:
    """Whether the tier says that it has an object for `key` (it cannot say whether it is good)."""
    if world.has("probe"):
        return (tier, key, 1) in state.requests[who].probes
    return state.objects[tier][key] != 0


def can_ask(world: World, state: State, who: int, tier: int) -> bool:
    """The next key is nowhere in the primary tier, and this tier was not asked for it yet."""
    key = next_key(state, who)
    request = state.requests[who]
    return (
        key is not None
        and state.chunks[key] is None
        and key not in request.spent
        and not any(probe[:2] == (tier, key) for probe in request.probes)
    )


def ask(world: World, state: State, who: int, tier: int) -> State:
    """A probe is sent; the lookup will be answered by `retry` or by its result."""
    key = next_key(state, who)
    return with_request(
        state, who, probes=state.requests[who].probes | {(tier, key, 2)}, waits=True
    )


def asked(state: State, who: int, key: int) -> bool:
    """Whether an answer of some tier about `key` is outstanding."""
    return any(probe[1] == key and probe[2] == 2 for probe in state.requests[who].probes)


def can_retry(world: World, state: State, who: int) -> bool:
    """The next key is nowhere yet and the answer of a tier is outstanding."""
    key = next_key(state, who)
    if key is None or state.chunks[key] is not None or key in state.requests[who].spent:
        return False
    if any(in_tier(world, state, who, tier, key) for tier in range(world.tiers)):
        return False
    return not _unasked(world, state, who, key) and asked(state, who, key)


def _unasked(world: World, state: State, who: int, key: int) -> bool:
    known = {probe[0] for probe in state.requests[who].probes if probe[1] == key}
    return len(known) < world.tiers


def retry(world: World, state: State, who: int) -> State:
    """Told to come back; the lookups go on with the next key."""
    request = state.requests[who]
    position = request.position + 1
    return with_request(
        state, who, position=position, waits=True, scanned=position == len(request.keys)
    )


def can_answer(world: World, state: State, who: int, tier: int) -> bool:
    """A probe to this tier is outstanding."""
    return any(probe[0] == tier and probe[2] == 2 for probe in state.requests[who].probes)


def answer(world: World, state: State, who: int, tier: int) -> State:
    """The tier answers all probes of this request with what it has now."""
    probes = frozenset(
        (tier, key, int(state.objects[tier][key] != 0))
        if (at, known) == (tier, 2)
        else (at, key, known)
        for at, key, known in state.requests[who].probes
    )
    return with_request(state, who, probes=probes)


def give_up_answer(world: World, state: State, who: int, tier: int) -> State:
    """A probe over its deadline is a no."""
    probes = frozenset(
        (at, key, 0 if (at, known) == (tier, 2) else known)
        for at, key, known in state.requests[who].probes
    )
    return with_request(state, who, probes=probes)


def can_miss(world: World, state: State, who: int) -> bool:
    """The next key is not offered, no wait for it is left, and no tier says that it has it."""
    key = next_key(state, who)
    if key is None or rows.offered(state, key):
        return False
    if key in state.requests[who].spent:
        return True
    chunk = state.chunks[key]
    if chunk is not None:
        return chunk.withdrawn
    if not world.has("promote"):
        return True
    if any(in_tier(world, state, who, tier, key) for tier in range(world.tiers)):
        return False
    probing = world.has("probe") and (_unasked(world, state, who, key) or asked(state, who, key))
    return not probing


def miss(world: World, state: State, who: int) -> State:
    """The prefix ends before this key."""
    return with_request(state, who, scanned=True)

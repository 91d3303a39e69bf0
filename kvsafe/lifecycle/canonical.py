# SPDX-License-Identifier: Apache-2.0
"""One name for states that differ only in how keys, rows, requests and tiers are numbered.

Each thing gets a signature that does not depend on numbers; things are renumbered in the order
of their signatures. Ties keep their order: two equal states may then keep two names, which costs
states, never soundness, since the result is always a mere renumbering of the input.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvsafe.lifecycle.words import NOBODY, Access, Chunk, Content, Late, Request, State
from kvsafe.lifecycle.world import World

Names = tuple[int, ...]

# Requests recur in ever new states; what depends on one request alone is kept.
_CACHED = 1 << 16


def canonical(world: World, state: State) -> State:
    """The representative of `state`. In a world that is not symmetric only rows are renamed."""
    if world.symmetric:
        keys = _names([_key_signature(world, state, key) for key in range(world.keys)])
        tiers = _names([_tier_signature(state, tier, keys) for tier in range(world.tiers)])
        if not (_same(keys) and _same(tiers)):
            state = _rename(world, state, keys, tiers)
        requests = _names([_request_signature(request) for request in state.requests])
        if not _same(requests):
            state = _reorder(state, requests)
    rows = row_names(state)
    return state if _same(rows) else _rename_rows(state, rows)


def _same(names: Names) -> bool:
    return all(new == old for old, new in enumerate(names))


def _names(signatures: list[Any]) -> Names:
    ranked = sorted(range(len(signatures)), key=signatures.__getitem__)
    names = [0] * len(ranked)
    for new, old in enumerate(ranked):
        names[old] = new
    return tuple(names)


def _key_signature(world: World, state: State, key: int) -> tuple[Any, ...]:
    chunk = state.chunks[key]
    mine = () if chunk is None else (chunk.stage, chunk.pins, chunk.withdrawn)
    roles = sorted([_roles(request, world.keys)[key] for request in state.requests])
    seen: list[tuple[int, int]] = []
    if state.objects:
        reads = state.cascades
        seen = sorted((line[key], reads.count((at, key))) for at, line in enumerate(state.objects))
    late = sorted([transfer.kind for transfer in state.late if transfer.key == key])
    return mine, world.policy.place(state.order, key), roles, seen, late


@lru_cache(_CACHED)
def _roles(request: Request, keys: int) -> tuple[tuple[Any, ...], ...]:
    """What each key is to this request, and what the request is at."""
    return tuple(_role(request, key) for key in range(keys))


def _role(request: Request, key: int) -> tuple[Any, ...]:
    sets = (request.awaits, request.spent, request.loading, request.parked, *request.access)
    bits = sum(1 << at for at, part in enumerate(sets) if key in part)
    probes = sorted(probe[2] for probe in request.probes if probe[1] == key)
    place = request.keys.index(key) if key in request.keys else 9
    return request.phase, place, len(request.keys), request.position, bits, probes


def _tier_signature(state: State, tier: int, keys: Names) -> tuple[Any, ...]:
    objects = [0] * len(keys)
    for key, value in enumerate(state.objects[tier]):
        objects[keys[key]] = value
    reads = sorted(keys[key] for at, key in state.cascades if at == tier)
    writes = sorted(
        keys[key] for key, chunk in enumerate(state.chunks) if chunk and chunk.tier == tier
    )
    probes = sorted(
        (keys[key], known)
        for request in state.requests
        for at, key, known in request.probes
        if at == tier
    )
    return objects, reads, writes, probes


@lru_cache(_CACHED)
def _request_signature(request: Request) -> tuple[Any, ...]:
    return (
        *request[:8],
        *(sorted(part) for part in request[8:14]),
        *(sorted(part) for part in request.access),
    )


def _rename(world: World, state: State, keys: Names, tiers: Names) -> State:
    chunks: list[Chunk | None] = [None] * world.keys
    for key, chunk in enumerate(state.chunks):
        moved = chunk is not None and chunk.tier != NOBODY
        chunks[keys[key]] = chunk._replace(tier=tiers[chunk.tier]) if chunk and moved else chunk
    objects = [[0] * world.keys for _ in tiers]
    for tier, line in enumerate(state.objects):
        for key, value in enumerate(line):
            objects[tiers[tier]][keys[key]] = value
    return state._replace(
        chunks=tuple(chunks),
        contents=tuple(
            None if content is None else Content(keys[content.key], content.fresh)
            for content in state.contents
        ),
        order=world.policy.relabel(state.order, keys),
        requests=tuple(_rename_in(request, keys, tiers) for request in state.requests),
        objects=tuple(tuple(line) for line in objects),
        cascades=tuple(sorted((tiers[tier], keys[key]) for tier, key in state.cascades)),
        late=_renamed_late(state, keys, tiers),
    )


def _renamed_late(state: State, keys: Names, tiers: Names) -> tuple[Late, ...]:
    return tuple(
        sorted(
            transfer._replace(
                key=keys[transfer.key],
                tier=NOBODY if transfer.tier == NOBODY else tiers[transfer.tier],
            )
            for transfer in state.late
        )
    )


@lru_cache(_CACHED)
def _rename_in(request: Request, keys: Names, tiers: Names) -> Request:
    if not request.phase:
        return request

    def renamed(part: frozenset[int]) -> frozenset[int]:
        return frozenset([keys[key] for key in part]) if part else part

    return request._replace(
        keys=tuple([keys[key] for key in request.keys]),
        awaits=renamed(request.awaits),
        spent=renamed(request.spent),
        loading=renamed(request.loading),
        parked=renamed(request.parked),
        probes=frozenset((tiers[tier], keys[key], known) for tier, key, known in request.probes),
        hooked=frozenset(tiers[tier] for tier in request.hooked),
        access=Access(*(renamed(part) for part in request.access)),
    )


def _reorder(state: State, names: Names) -> State:
    requests = list(state.requests)
    for old, request in enumerate(state.requests):
        requests[names[old]] = request
    chunks = tuple(
        chunk if chunk is None or chunk.by == NOBODY else chunk._replace(by=names[chunk.by])
        for chunk in state.chunks
    )
    return state._replace(requests=tuple(requests), chunks=chunks)


def row_names(state: State) -> Names:
    """Rows in the order of their owners' keys, then those of late transfers, then the rest."""
    order: dict[int, None] = {}
    for chunk in state.chunks:
        if chunk is not None:
            order.setdefault(chunk.row)
    for transfer in state.late:
        order.setdefault(transfer.row)
    for row in range(len(state.contents)):
        order.setdefault(row)
    names = [0] * len(order)
    for new, old in enumerate(order):
        names[old] = new
    return tuple(names)


def _rename_rows(state: State, names: Names) -> State:
    contents: list[Content | None] = [None] * len(names)
    for row, content in enumerate(state.contents):
        contents[names[row]] = content
    return state._replace(
        chunks=tuple(chunk and chunk._replace(row=names[chunk.row]) for chunk in state.chunks),
        free=tuple(sorted(names[row] for row in state.free)),
        contents=tuple(contents),
        late=tuple(sorted(late._replace(row=names[late.row]) for late in state.late)),
    )

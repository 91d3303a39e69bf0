# SPDX-License-Identifier: Apache-2.0
"""Deadlines, resets and shutdown: transfers that nobody waits for any more.

Two rules carry all of it. A worker's late write is fenced: its generation is over, so it
neither writes nor completes, and the row can be given away at once. A tier's late write cannot
be fenced, so its row is retired: it has no owner and no use until the tier reports.
"""

from __future__ import annotations

from kvsafe.lifecycle import rows
from kvsafe.lifecycle.promotions import content_of
from kvsafe.lifecycle.requests import can_abort, end
from kvsafe.lifecycle.transfers import (
    can_report_cascade,
    end_cascade,
    object_of,
    set_object,
)
from kvsafe.lifecycle.words import (
    CLOSED,
    CLOSING,
    ENDED,
    FETCHING,
    GOOD,
    LATE_CASCADE,
    LATE_FETCH,
    LATE_STORE,
    LOADING,
    OLD,
    OPEN,
    RECALLED,
    RUNNING,
    WAITING,
    WRITING,
    Chunk,
    Content,
    Counts,
    Late,
    Request,
    State,
)
from kvsafe.lifecycle.world import World


def later(state: State, *transfers: Late) -> State:
    """These have not reported, and nobody waits for them."""
    return state._replace(late=tuple(sorted({*state.late, *transfers})))


# ---- deadlines --------------------------------------------------------------------------


def can_time_out(world: World, state: State) -> bool:
    """The explorer's own bound on how many overtaken transfers there may be."""
    return len(state.late) < world.late_limit


def can_overdue_store(world: World, state: State, key: int) -> bool:
    """Workers copy into its row, for too long."""
    chunk = state.chunks[key]
    return chunk is not None and chunk.stage == WRITING and can_time_out(world, state)


def overdue_store(world: World, state: State, key: int) -> State:
    """The chunk goes, its row is free, its worker is fenced."""
    chunk = rows.chunk_of(state, key)
    return later(rows.drop(world, state, key), Late(LATE_STORE, key, chunk.row))


def can_overdue_fetch(world: World, state: State, key: int) -> bool:
    """The tier fills its row, for too long."""
    chunk = state.chunks[key]
    return chunk is not None and chunk.stage == FETCHING and can_time_out(world, state)


def overdue_fetch(world: World, state: State, key: int) -> State:
    """The chunk goes, its row is retired, whoever waited has a miss."""
    chunk = rows.chunk_of(state, key)
    state = rows.drop(world, state, key, retire=True)
    return later(state, Late(LATE_FETCH, key, chunk.row, chunk.tier))


def can_overdue_cascade(world: World, state: State, tier: int, key: int) -> bool:
    """The tier reads this row, for too long."""
    return can_report_cascade(world, state, tier, key) and can_time_out(world, state)


def overdue_cascade(world: World, state: State, tier: int, key: int) -> State:
    """Its pin is released; what the tier makes of the row later has to be opened like all else."""
    row = rows.chunk_of(state, key).row
    return later(end_cascade(world, state, tier, key), Late(LATE_CASCADE, key, row, tier))


# ---- late reports -----------------------------------------------------------------------


def can_report_late(world: World, state: State, which: int) -> bool:
    """There is such a transfer."""
    return which < len(state.late)


def report_late(world: World, state: State, which: int) -> State:
    """It reports at last. Nothing becomes ready, no refcount changes, a retired row is free."""
    transfer = state.late[which]
    state = state._replace(late=(*state.late[:which], *state.late[which + 1 :]))
    if transfer.kind == LATE_FETCH:
        return rows.release(state, transfer.row)
    if transfer.kind == LATE_CASCADE:
        value = object_of(state.contents[transfer.row], transfer.key)
        return set_object(state, transfer.tier, transfer.key, value)
    return state


def can_write_late(world: World, state: State, which: int) -> bool:
    """A tier's late write would still change its row."""
    if which >= len(state.late) or state.late[which].kind != LATE_FETCH:
        return False
    return write_late(world, state, which) != state


def write_late(world: World, state: State, which: int) -> State:
    """The tier's bytes land in the retired row, before the report."""
    transfer = state.late[which]
    value = state.objects[transfer.tier][transfer.key]
    return rows.fill(state, transfer.row, content_of(value, transfer.key))


# ---- reset ------------------------------------------------------------------------------


def overtaken(state: State) -> tuple[Late, ...]:
    """What a reset leaves under way: workers' writes, tiers' writes, tiers' reads."""
    found = []
    for key, chunk in enumerate(state.chunks):
        if chunk is not None and chunk.stage == WRITING:
            found.append(Late(LATE_STORE, key, chunk.row))
        if chunk is not None and chunk.stage == FETCHING:
            found.append(Late(LATE_FETCH, key, chunk.row, chunk.tier))
    for tier, key in state.cascades:
        found.append(Late(LATE_CASCADE, key, rows.chunk_of(state, key).row, tier))
    return tuple(found)


def can_reset(world: World, state: State) -> bool:
    """Always, within the explorer's bound on overtaken transfers."""
    room = len(state.late) + len(overtaken(state)) <= world.late_limit
    return state.door == OPEN and room


def _restarted(request: Request) -> Request:
    """A request after a reset: it looks up and computes anew; what it knew is void."""
    phase = {RUNNING: WAITING, LOADING: RECALLED}.get(request.phase, request.phase)
    return Request(
        phase=phase, keys=request.keys, stored=request.phase == ENDED, hooked=request.hooked
    )


def reset(world: World, state: State) -> State:
    """A new epoch first, then every chunk is forgotten, ready or not.

    Rows are free except those that a tier still writes into.
    """
    late = tuple(sorted({*state.late, *overtaken(state)}))
    retired = {transfer.row for transfer in late if transfer.kind == LATE_FETCH}
    free = tuple(row for row in range(world.rows) if row not in retired)
    chunks: tuple[Chunk | None, ...] = (None,) * world.keys
    return state._replace(
        chunks=chunks,
        free=free,
        contents=(None,) * world.rows,
        order=world.policy.empty(),
        counts=Counts(),
        requests=tuple(_restarted(request) for request in state.requests),
        objects=tuple(
            tuple(OLD if value == GOOD else value for value in tier) for tier in state.objects
        ),
        cascades=(),
        late=late,
    )


def aged(contents: tuple[Content | None, ...]) -> tuple[Content | None, ...]:
    """Row contents after the epoch was raised (used where a seeded fault keeps the rows)."""
    return tuple(None if content is None else content._replace(fresh=False) for content in contents)


# ---- shutdown ---------------------------------------------------------------------------


def can_shut_down(world: World, state: State) -> bool:
    """The door is open."""
    return state.door == OPEN


def shut_down(world: World, state: State) -> State:
    """Nobody new comes in; requests end; what is under way goes on."""
    state = state._replace(door=CLOSING)
    for who in range(world.requests):
        if can_abort(world, state, who):
            state = end(world, state, who)
    return state


def touching(state: State) -> bool:
    """Whether anybody may still read or write rows: parked keys are read by the next step."""
    return (
        bool(state.cascades)
        or any(request.parked for request in state.requests)
        or bool(state.late)
        or any(chunk is not None and chunk.refcount != 0 for chunk in state.chunks)
    )


def can_close(world: World, state: State) -> bool:
    """Closing, and nobody touches a row."""
    return state.door == CLOSING and not touching(state)


def close(world: World, state: State) -> State:
    """The rows are given back to the system."""
    return state._replace(door=CLOSED)

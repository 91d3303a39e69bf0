# SPDX-License-Identifier: Apache-2.0
"""What must never happen. Each law looks at one move, before and after, and says what is wrong.

A law returns None or a violation in words. Laws recompute everything from the state itself and
share no code with the rules, so that a fault in a rule cannot hide in its law.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from kvsafe.lifecycle.words import (
    AWAY,
    CLOSED,
    FETCHING,
    LATE_FETCH,
    LOADING,
    READY,
    WRITING,
    Chunk,
    State,
)
from kvsafe.lifecycle.world import World


class Seen(NamedTuple):
    """One move as a law sees it."""

    world: World
    before: State
    event: str
    who: tuple[int, ...]
    after: State


class Safety(NamedTuple):
    """One law: its name, what it says, and the check."""

    name: str
    says: str
    check: Callable[[Seen], str | None]


@lru_cache(1 << 16)
def _numbered(chunks: tuple[Chunk | None, ...]) -> list[tuple[int, Chunk]]:
    return [(key, chunk) for key, chunk in enumerate(chunks) if chunk is not None]


def _chunks(state: State) -> list[tuple[int, Chunk]]:
    return _numbered(state.chunks)


def _readers(state: State, key: int) -> int:
    readers = 0
    for request in state.requests:
        readers += key in request.loading
    for _, read in state.cascades:
        readers += read == key
    return readers


def only_ready_is_read(seen: Seen) -> str | None:
    """Whoever reads a chunk reads one that is ready."""
    chunks = seen.after.chunks
    for who, request in enumerate(seen.after.requests):
        for key in request.loading:
            chunk = chunks[key]
            if chunk is None or chunk.stage != READY:
                return f"request {who} loads key {key}, which is not ready"
    for tier, key in seen.after.cascades:
        chunk = chunks[key]
        if chunk is None or chunk.stage != READY:
            return f"tier {tier} reads key {key}, which is not ready"
    return None


def ready_is_true(seen: Seen) -> str | None:
    """A ready row holds its key's bytes."""
    for key, chunk in _chunks(seen.after):
        content = seen.after.contents[chunk.row]
        if chunk.stage == READY and (content is None or content.key != key):
            return f"key {key} is ready, but row {chunk.row} holds other bytes"
    return None


def revoked_is_never_served(seen: Seen) -> str | None:
    """No ready row, and no load that counts, is of an older epoch."""
    for key, chunk in _chunks(seen.after):
        content = seen.after.contents[chunk.row]
        if chunk.stage == READY and content is not None and not content.fresh:
            return f"key {key} is ready with bytes of a revoked epoch"
    if seen.event == "reset":
        for who, request in enumerate(seen.after.requests):
            if request.phase == LOADING:
                return f"request {who} goes on with a load from before the reset"
    return None


def sealed_before_ready(seen: Seen) -> str | None:
    """A chunk becomes ready by being sealed or proven, in no other way."""
    for key, chunk in _chunks(seen.after):
        before = seen.before.chunks[key]
        was_ready = before is not None and before.stage == READY
        if chunk.stage == READY and not was_ready and seen.event not in ("sealed", "proven"):
            return f"key {key} became ready by '{seen.event}'"
        if chunk.stage == READY and before is not None and before.stage in (WRITING, FETCHING):
            return f"key {key} became ready while its row was being written"
    return None


def failed_is_never_visible(seen: Seen) -> str | None:
    """What failed, was refused or is overdue has no chunk afterwards."""
    if seen.event in _FAILURES and seen.after.chunks[seen.who[-1]] is not None:
        return f"key {seen.who[-1]} still has a chunk after '{seen.event}'"
    return None


_FAILURES = ("write failed", "seal refused", "fetch failed", "refused", "overdue store",
             "overdue fetch")  # fmt: skip


def withdrawn_is_never_offered(seen: Seen) -> str | None:
    """No new reader of a withdrawn chunk, and none of them stays without a reader."""
    for key, chunk in _chunks(seen.after):
        before = seen.before.chunks[key]
        if before is not None and before.withdrawn and chunk.pins > before.pins:
            return f"key {key} was withdrawn and has a new reader"
        if chunk.withdrawn and chunk.pins == 0:
            return f"key {key} is withdrawn, read by nobody, and still there"
    if seen.event == "load refused":
        refused = seen.after.chunks[seen.who[1]]
        if refused is not None and not refused.withdrawn:
            return f"key {seen.who[1]} was refused and is still offered"
    return None


def _evicted(seen: Seen) -> list[tuple[int, Chunk]]:
    """Ready chunks that a move took away to make room."""
    if seen.event not in ("store", "promote", "no store", "no room"):
        return []
    after = seen.after.chunks
    return [(key, chunk) for key, chunk in _chunks(seen.before) if after[key] is None]


def pinned_is_never_evicted(seen: Seen) -> str | None:
    """Only what is ready and read by nobody is evicted."""
    for key, chunk in _evicted(seen):
        if chunk.refcount != 0 or _readers(seen.before, key):
            return f"key {key} was evicted with refcount {chunk.refcount}"
    return None


def own_input_is_never_evicted(seen: Seen) -> str | None:
    """A store evicts nothing of its own offer."""
    if seen.event == "store":
        keys = seen.before.requests[seen.who[0]].keys
        for key, _ in _evicted(seen):
            if key in keys:
                return f"the store of request {seen.who[0]} evicted its own key {key}"
    return None


def unread_survives_promotions(seen: Seen) -> str | None:
    """A promotion evicts nothing that a request was told hit or pending and has not read."""
    if seen.event == "promote":
        for key, _ in _evicted(seen):
            for who, request in enumerate(seen.before.requests):
                if key in request.awaits:
                    return f"a promotion evicted key {key}, which request {who} has not read"
    return None


def hits_stand_until_loaded(seen: Seen) -> str | None:
    """What was told hit in this step is ready when it is loaded."""
    if seen.event == "load":
        request = seen.before.requests[seen.who[0]]
        for key in request.keys[: request.position]:
            chunk = seen.before.chunks[key]
            if chunk is None or chunk.stage != READY or chunk.withdrawn:
                return f"request {seen.who[0]} was told hit for key {key}, and it is not there"
    return None


def failed_eviction_changes_nothing(seen: Seen) -> str | None:
    """No room: chunks, rows, residents and counters are as before."""
    if seen.event not in ("no store", "no room"):
        return None
    before, after, policy = seen.before, seen.after, seen.world.policy
    same = (
        before.chunks == after.chunks
        and before.free == after.free
        and before.counts == after.counts
        and policy.resident(before.order) == policy.resident(after.order)
    )
    return None if same else f"'{seen.event}' changed what is resident"


def rows_have_one_owner(seen: Seen) -> str | None:
    """Every row is owned by one chunk, or free, or retired; never two of them, never none."""
    retired = {late.row for late in seen.after.late if late.kind == LATE_FETCH}
    owned = [chunk.row for _, chunk in _chunks(seen.after)]
    owned += seen.after.free
    owned += retired
    if len(owned) == seen.world.rows == len(set(owned)):
        return None
    row = next(row for row in range(seen.world.rows) if owned.count(row) != 1)
    return f"row {row} has {owned.count(row)} owners"


def capacity_holds(seen: Seen) -> str | None:
    """No more chunks than rows, and the policy knows exactly the chunks that there are."""
    chunks = dict(_chunks(seen.after))
    resident = list(seen.world.policy.resident(seen.after.order))
    if len(chunks) > seen.world.rows:
        return f"{len(chunks)} chunks in {seen.world.rows} rows"
    if sorted(resident) != sorted(chunks):
        return f"the policy has {resident}, the rows have {sorted(chunks)}"
    return None


def ghosts_are_bounded(seen: Seen) -> str | None:
    """ARC: lines are disjoint, ghosts at most capacity, target between 0 and capacity."""
    order = seen.after.order
    if seen.world.policy.name != "arc":
        return None
    rows = seen.world.rows
    if len(order.b1) > rows or len(order.b2) > rows:
        return "more ghosts than rows"
    if not 0 <= order.target <= rows:
        return f"target {order.target} outside 0 to {rows}"
    keys = [key for line in order[:4] for key in line]
    return None if len(keys) == len(set(keys)) else "a key stands in two lines"


def one_request_is_not_frequency(seen: Seen) -> str | None:
    """ARC: a key reaches T2 only when a request ends that read what it had not inserted."""
    if seen.world.policy.name != "arc":
        return None
    for before, after in zip(seen.before.requests, seen.after.requests, strict=True):
        own = (after.access.reused - before.access.reused) & before.access.inserted
        if own:
            return f"reading its own key {min(own)} counted as a second use"
    new = set(seen.after.order.t2) - set(seen.before.order.t2)
    ending = range(seen.world.requests) if seen.event == "shut down" else seen.who[:1]
    for key in new:
        if seen.event not in ("finish", "abort", "shut down"):
            return f"key {key} became frequent by '{seen.event}'"
        if not any(key in seen.before.requests[who].access.reused for who in ending):
            return f"key {key} became frequent by the request that inserted it"
    return None


def counts_equal_recount(seen: Seen) -> str | None:
    """The counters are what a recount gives."""
    if seen.before.chunks == seen.after.chunks and seen.before.counts == seen.after.counts:
        return None
    refcounts = [chunk.refcount for _, chunk in _chunks(seen.after)]
    recount = (refcounts.count(0), refcounts.count(-1))
    if recount != tuple(seen.after.counts):
        return f"counted {tuple(seen.after.counts)} evictable and pending, there are {recount}"
    return None


def pins_equal_readers(seen: Seen) -> str | None:
    """A refcount is the number of readers, and never below its floor."""
    for key, chunk in _chunks(seen.after):
        if chunk.pins < 0:
            return f"key {key} has {chunk.pins} pins"
        if chunk.pins != _readers(seen.after, key):
            readers = _readers(seen.after, key)
            return f"key {key} has {chunk.pins} pins and {readers} readers"
    return None


def one_write_per_key(seen: Seen) -> str | None:
    """Nothing begins to write a key whose write is already under way, or which is ready."""
    if seen.event not in ("store", "promote"):
        return None
    for key, chunk in _chunks(seen.after):
        before = seen.before.chunks[key]
        if before is not None and chunk.refcount == -1 and chunk != before:
            return f"a second write of key {key} began"
    return None


def hooks_in_order(seen: Seen) -> str | None:
    """Tiers hear new first, finish last and once; nothing is submitted outside of that."""
    for who, request in enumerate(seen.after.requests):
        if len(request.hooked) != (0 if request.phase == AWAY else seen.world.tiers):
            return f"tiers and request {who} disagree whether it is known"
    for key, chunk in _chunks(seen.after):
        if chunk.by >= 0 and seen.after.requests[chunk.by].phase == AWAY:
            return f"key {key} will be submitted for request {chunk.by}, which was finalised"
    if seen.event == "sealed" and len(seen.after.cascades) > len(seen.before.cascades):
        before = seen.before.chunks[seen.who[0]]
        if before is None or seen.before.requests[before.by].phase == AWAY:
            return f"key {seen.who[0]} was cascaded after its request was finalised"
    return None


def late_changes_nothing(seen: Seen) -> str | None:
    """A late report leaves chunks and counters alone, and no owned row is written late."""
    if seen.event not in ("late report", "late write"):
        return None
    before, after = seen.before, seen.after
    if before.chunks != after.chunks or before.counts != after.counts:
        return f"'{seen.event}' changed a chunk"
    for key, chunk in _chunks(after):
        if before.contents[chunk.row] != after.contents[chunk.row]:
            return f"'{seen.event}' wrote into the row of key {key}"
    return None


def cascades_only_what_is_ready(seen: Seen) -> str | None:
    """A parked key is cascaded when it is ready, and forgotten when it failed."""
    if seen.event != "step":
        return None
    for who, request in enumerate(seen.before.requests):
        left = seen.after.requests[who].parked
        for key in request.parked:
            chunk = seen.before.chunks[key]
            ready = chunk is not None and chunk.stage == READY and not chunk.withdrawn
            if ready and (key in left or (0, key) not in seen.after.cascades):
                return f"key {key} is ready and was not cascaded for request {who}"
            if chunk is None and key in left:
                return f"key {key} failed and request {who} still waits to cascade it"
    return None


def closed_is_untouched(seen: Seen) -> str | None:
    """Nobody reads or writes a row after the rows were given back."""
    if seen.after.door != CLOSED:
        return None
    late = any(late.kind == LATE_FETCH for late in seen.after.late)
    busy = any(chunk.refcount != 0 for _, chunk in _chunks(seen.after))
    if late or busy or seen.after.cascades or any(r.loading for r in seen.after.requests):
        return "the rows were given back while somebody used them"
    return None


SAFETY: Final[tuple[Safety, ...]] = tuple(
    Safety(check.__name__.replace("_", " "), (check.__doc__ or "").strip(), check)
    for check in (
        only_ready_is_read,
        ready_is_true,
        revoked_is_never_served,
        sealed_before_ready,
        failed_is_never_visible,
        withdrawn_is_never_offered,
        pinned_is_never_evicted,
        own_input_is_never_evicted,
        unread_survives_promotions,
        hits_stand_until_loaded,
        failed_eviction_changes_nothing,
        rows_have_one_owner,
        capacity_holds,
        ghosts_are_bounded,
        one_request_is_not_frequency,
        counts_equal_recount,
        pins_equal_readers,
        one_write_per_key,
        hooks_in_order,
        late_changes_nothing,
        cascades_only_what_is_ready,
        closed_is_untouched,
    )
)

# SPDX-License-Identifier: Apache-2.0
"""Wrong guards and effects for `mutants`, each one small mistake beside the right function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvsafe.lifecycle import requests as req
from kvsafe.lifecycle import rows
from kvsafe.lifecycle import transfers as way
from kvsafe.lifecycle import upheaval as end
from kvsafe.lifecycle.arc import Arc, ArcOrder
from kvsafe.lifecycle.policy import Key
from kvsafe.lifecycle.words import (
    AWAY,
    ENDED,
    LATE_CASCADE,
    LATE_FETCH,
    LATE_STORE,
    LOADING,
    NONE,
    OPEN,
    PROVING,
    READY,
    RUNNING,
    WAITING,
    Content,
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
    key = req.next_key(state, who)
    return key is not None and state.chunks[key] is not None


def hit_withdrawn(world: World, state: State, who: int) -> bool:
    """Does not look whether the chunk was withdrawn."""
    key = req.next_key(state, who)
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
    return rows.victims(world, state, 1, way.unread(state) | {key})


# ---- stores -----------------------------------------------------------------------------


def written_is_ready(world: World, state: State, key: int) -> State:
    """Ready before it is sealed."""
    return way.sealed(world, way.written(world, state, key), key)


def seal_if_alive(world: World, state: State, key: int) -> bool:
    """Drops the seals of requests that have ended."""
    chunk = state.chunks[key]
    return way.can_seal(world, state, key) and chunk is not None and (
        state.requests[chunk.by].phase != ENDED
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


# ---- promotions and cascades ------------------------------------------------------------


def promote_again(world: World, state: State, who: int, tier: int) -> bool:
    """Does not look whether a write of the key is under way."""
    key = req.next_key(state, who)
    if key is None or not req.in_tier(world, state, who, tier, key):
        return False
    return not rows.offered(state, key) and bool(state.free)


def promote_spent(world: World, state: State, who: int, tier: int) -> bool:
    """Waits for a key again and again."""
    key = req.next_key(state, who)
    if key is None or state.chunks[key] is not None:
        return False
    return way.promotion_room(world, state, key) is not None


def promote_like_vllm(world: World, state: State, who: int, tier: int) -> bool:
    """No wait is ever spent, nothing unread is protected."""
    key = req.next_key(state, who)
    if key is None or state.chunks[key] is not None:
        return False
    return room_of_unread(world, state, key) is not None


def promote_over_unread(world: World, state: State, who: int, tier: int) -> State:
    """The effect that belongs to `promote_like_vllm`."""
    return way.promote(world, state, who, tier, room=room_of_unread)


def no_room_like_vllm(world: World, state: State, who: int, tier: int) -> bool:
    """The counterpart of `promote_like_vllm`."""
    key = req.next_key(state, who)
    if key is None or state.chunks[key] is not None:
        return False
    return room_of_unread(world, state, key) is None


def miss_like_vllm(world: World, state: State, who: int) -> bool:
    """A key that some tier has is not a miss."""
    key = req.next_key(state, who)
    if key is None or state.chunks[key] is not None:
        return False
    return not any(line[key] for line in state.objects)


def _proves(state: State, key: int, contents: Sequence[Content | None]) -> bool:
    chunk = state.chunks[key]
    if chunk is None or chunk.stage != PROVING:
        return False
    return state.contents[chunk.row] in contents


def prove_all(world: World, state: State, key: int) -> bool:
    """Opens whatever is there."""
    chunk = state.chunks[key]
    return chunk is not None and chunk.stage == PROVING


def prove_any_epoch(world: World, state: State, key: int) -> bool:
    """Opens chunks of a revoked epoch."""
    return _proves(state, key, (Content(key, True), Content(key, False)))


def cascade_keeps_pin(world: World, state: State, tier: int, key: int) -> State:
    """The cascade is over, its pin is not."""
    left = list(state.cascades)
    left.remove((tier, key))
    return state._replace(cascades=tuple(left))


def cascaded_keeps_pin(world: World, state: State, tier: int, key: int) -> State:
    """The tier has the object and its pin stays."""
    content = state.contents[rows.chunk_of(state, key).row]
    state = way.set_object(state, tier, key, way.object_of(content, key))
    return cascade_keeps_pin(world, state, tier, key)


def step_forgets_parked(world: World, state: State) -> State:
    """Parked keys are not looked at again."""
    for who in range(world.requests):
        state = req.with_request(state, who, parked=NONE)
    return way.step(world, state)


def step_keeps_parked(world: World, state: State) -> State:
    """Parked keys are never let go."""
    parked = [request.parked for request in state.requests]
    state = way.step(world, state)
    for who, keys in enumerate(parked):
        state = req.with_request(state, who, parked=keys)
    return state


# ---- upheaval ---------------------------------------------------------------------------


def overdue_frees(world: World, state: State, key: int) -> State:
    """The row is given away although the tier may still write into it."""
    row = rows.chunk_of(state, key).row
    return rows.release(end.overdue_fetch(world, state, key), row)


def late_store_lands(world: World, state: State, which: int) -> State:
    """A worker that was given up writes into its row all the same."""
    late = state.late[which]
    state = end.report_late(world, state, which)
    if late.kind != LATE_STORE:
        return state
    return rows.fill(state, late.row, Content(late.key, True))


def late_cascade_unpins(world: World, state: State, which: int) -> State:
    """A cascade that was given up takes a pin that is not its own."""
    late = state.late[which]
    state = end.report_late(world, state, which)
    chunk = state.chunks[late.key]
    if late.kind == LATE_CASCADE and chunk is not None and chunk.pins > 0:
        state = rows.unpin(world, state, (late.key,))
    return state


def late_fetch_is_lost(world: World, state: State, which: int) -> bool:
    """Nobody listens to a tier's late write."""
    return which < len(state.late) and state.late[which].kind != LATE_FETCH


def _restored(before: State, after: State, phase: int, **changes: Any) -> State:
    requests = tuple(
        old._replace(**changes) if old.phase == phase else new
        for old, new in zip(before.requests, after.requests, strict=True)
    )
    return after._replace(requests=requests)


def reset_keeps_loads(world: World, state: State) -> State:
    """A load from before the reset counts."""
    return _restored(state, end.reset(world, state), LOADING, loading=NONE)


def reset_keeps_running(world: World, state: State) -> State:
    """What was computed before the reset is stored after it."""
    return _restored(state, end.reset(world, state), RUNNING, tainted=True)


def reset_keeps_chunks(world: World, state: State) -> State:
    """Raises the epoch and forgets nothing."""
    after = end.reset(world, state)
    idle = all(chunk is None or chunk.refcount == 0 for chunk in state.chunks)
    if not idle:
        return after
    kept = {name: getattr(state, name) for name in ("chunks", "free", "order", "counts")}
    return after._replace(contents=end.aged(state.contents), **kept)


def close_at_once(world: World, state: State) -> bool:
    """Does not wait for those who touch rows."""
    return state.door == end.CLOSING


# ---- policies ---------------------------------------------------------------------------


class UntrimmedArc(Arc):
    """Ghosts without an end."""

    def evict(self, order: ArcOrder, victims: Sequence[Key], capacity: int) -> ArcOrder:
        """Never trims."""
        return super().evict(order, victims, 1_000)


class BoundlessArc(Arc):
    """A target that only grows."""

    def _adapt(self, order: ArcOrder, key: Key, capacity: int) -> ArcOrder:
        return super()._adapt(order, key, 1_000)


class EagerArc(Arc):
    """Takes every access for a second one."""

    def finished(
        self, order: ArcOrder, seen: Sequence[Key], inserted: Iterable[Key], reused: Iterable[Key]
    ) -> ArcOrder:
        """Everything that was seen becomes frequent."""
        return super().finished(order, seen, (), seen)



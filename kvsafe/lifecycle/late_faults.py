# SPDX-License-Identifier: Apache-2.0
"""Wrong guards and effects for `mutants`: tiers, deadlines, resets, shutdown and policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvsafe.lifecycle import faults as bad
from kvsafe.lifecycle import lookups as look
from kvsafe.lifecycle import promotions as up
from kvsafe.lifecycle import requests as req
from kvsafe.lifecycle import rows
from kvsafe.lifecycle import transfers as way
from kvsafe.lifecycle import upheaval as end
from kvsafe.lifecycle.arc import Arc, ArcOrder
from kvsafe.lifecycle.policy import Key
from kvsafe.lifecycle.words import (
    CLOSING,
    LATE_CASCADE,
    LATE_FETCH,
    LATE_STORE,
    LOADING,
    NONE,
    PROVING,
    RUNNING,
    Content,
    State,
)
from kvsafe.lifecycle.world import World

# ---- promotions and cascades ------------------------------------------------------------


def promote_again(world: World, state: State, who: int, tier: int) -> bool:
    """Does not look whether a write of the key is under way."""
    key = look.next_key(state, who)
    if key is None or not look.in_tier(world, state, who, tier, key):
        return False
    return not rows.offered(state, key) and bool(state.free)


def promote_spent(world: World, state: State, who: int, tier: int) -> bool:
    """Waits for a key again and again."""
    key = look.next_key(state, who)
    if key is None or state.chunks[key] is not None:
        return False
    return up.promotion_room(world, state, key) is not None


def promote_like_vllm(world: World, state: State, who: int, tier: int) -> bool:
    """No wait is ever spent, nothing unread is protected."""
    key = look.next_key(state, who)
    if key is None or state.chunks[key] is not None:
        return False
    return bad.room_of_unread(world, state, key) is not None


def promote_over_unread(world: World, state: State, who: int, tier: int) -> State:
    """The effect that belongs to `promote_like_vllm`."""
    return up.promote(world, state, who, tier, room=bad.room_of_unread)


def no_room_like_vllm(world: World, state: State, who: int, tier: int) -> bool:
    """The counterpart of `promote_like_vllm`."""
    key = look.next_key(state, who)
    if key is None or state.chunks[key] is not None:
        return False
    return bad.room_of_unread(world, state, key) is None


def miss_like_vllm(world: World, state: State, who: int) -> bool:
    """A key that some tier has is not a miss."""
    key = look.next_key(state, who)
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
    return state.door == CLOSING


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

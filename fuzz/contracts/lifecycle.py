# SPDX-License-Identifier: Apache-2.0
"""Contracts of `kvsafe.lifecycle`: the replacement orders and the refcount transitions."""

from __future__ import annotations

from kvsafe.lifecycle.arc import Arc, ArcOrder
from kvsafe.lifecycle.lru import Lru
from kvsafe.lifecycle.rows import (
    allocate,
    evict,
    evictable,
    make_ready,
    offered,
    pin,
    unpin,
    victims,
    withdraw,
)
from kvsafe.lifecycle.words import NOBODY, READY, WRITING, Chunk, Counts, State
from kvsafe.lifecycle.world import World

KEYS = 3
ROWS = 2


def _world() -> World:
    return World("contract", "", Lru(), KEYS, ROWS, 1, 1, ((0, 1, 2),), frozenset())


def _state(pins: int, withdrawn: bool, stage: int) -> State:
    """Key 0 in row 0 as told, key 1 ready and idle in row 1, key 2 nowhere."""
    ready = stage == READY
    counts = Counts(evictable=1 + (ready and pins == 0), pending=int(not ready))
    return (
        _world()
        .start()
        ._replace(
            chunks=(Chunk(0, stage, pins, withdrawn), Chunk(1, READY), None),
            free=(),
            order=(0, 1),
            counts=counts,
        )
    )


def _sound(pins: int, withdrawn: bool, stage: int) -> bool:
    """Whether these describe a chunk that the machine can have."""
    if not 0 <= stage <= READY:
        return False
    return pins >= (1 if withdrawn else 0) if stage == READY else pins == 0 and not withdrawn


def _recount(state: State) -> Counts:
    chunks = [chunk for chunk in state.chunks if chunk is not None]
    return Counts(
        sum(chunk.refcount == 0 for chunk in chunks), sum(chunk.refcount < 0 for chunk in chunks)
    )


def only_ready_is_offered(pins: int, withdrawn: bool, stage: int) -> None:
    """A lookup says hit exactly for what is ready and was not refused."""
    assert pins <= 3
    assert _sound(pins, withdrawn, stage)
    state = _state(pins, withdrawn, stage)
    assert offered(state, 0) == (stage == READY and not withdrawn)
    assert not (evictable(state, 0) and (pins > 0 or stage != READY))


def a_pin_and_its_unpin_change_nothing(pins: int) -> None:
    """Refcounts come back, and so do the counters."""
    assert 0 <= pins <= 3
    state = _state(pins, False, READY)
    held = pin(state, (0,))
    assert held.chunks[0] is not None
    assert held.chunks[0].refcount == pins + 1
    assert held.counts == _recount(held)
    assert not evictable(held, 0)
    assert unpin(_world(), held, (0,)) == state


def a_withdrawn_chunk_leaves_with_its_last_reader(pins: int) -> None:
    """While read it stays, hidden; after that its row is free."""
    assert 0 <= pins <= 3
    world, state = _world(), _state(pins, False, READY)
    state = withdraw(world, state, 0)
    assert not offered(state, 0)
    for left in range(pins, 0, -1):
        assert state.chunks[0] is not None
        assert state.chunks[0].pins == left
        state = unpin(world, state, (0,))
    assert state.chunks[0] is None
    assert state.free == (0,)
    assert state.counts == _recount(state)


def victims_are_idle_and_unprotected(
    pins: int, withdrawn: bool, stage: int, count: int, protected: int
) -> None:
    """Nothing pinned, pending or protected is evicted, and never half of what is needed."""
    assert pins <= 3
    assert _sound(pins, withdrawn, stage)
    assert 1 <= count <= 2
    assert 0 <= protected < KEYS
    state = _state(pins, withdrawn, stage)
    found = victims(_world(), state, count, (protected,))
    idle = [key for key in (0, 1) if evictable(state, key) and key != protected]
    if len(idle) < count:
        assert found is None
    else:
        assert found is not None
        assert len(found) == count
        assert set(found) <= set(idle)


def evicted_rows_are_free_and_owned_once(first: bool) -> None:
    """After an eviction each row has one owner or none, and the counters are right."""
    assert first in (True, False)
    world, state = _world(), _state(0, False, READY)
    gone = 0 if first else 1
    state = evict(world, state, (gone,))
    assert state.free == (gone,)
    assert state.counts == _recount(state)
    state = allocate(world, state, 2, WRITING, NOBODY, NOBODY)
    rows = [chunk.row for chunk in state.chunks if chunk is not None]
    assert sorted((*rows, *state.free)) == [0, 1]
    assert not offered(state, 2)
    state = make_ready(state, 2)
    assert offered(state, 2)
    assert state.counts == _recount(state)


def lru_touches_keep_every_key(a: int, b: int, touched: int) -> None:
    """A touch moves keys to the end and loses none."""
    assert 0 <= a < 3
    assert 0 <= b < 3
    assert a != b
    order = Lru().touch((a, b), (touched,))
    assert sorted(order) == sorted((a, b))
    if touched in (a, b):
        assert order[-1] == touched
    else:
        assert order == (a, b)


def lru_victims_are_the_oldest(a: int, b: int, c: int, allowed: int) -> None:
    """The first of the line that may go, and None rather than too few."""
    assert a != b
    assert b != c
    assert a != c
    line = (a, b, c)
    found = Lru().victims(line, 1, lambda key: key == allowed)
    assert found == ((allowed,) if allowed in line else None)


def arc_target_stays_within_the_rows(
    ghosts1: int, ghosts2: int, asked: int, target: float, capacity: int
) -> None:
    """Whatever ghost is asked for, the target is never below 0 nor above the capacity."""
    assert 0 <= ghosts1 <= 3
    assert 0 <= ghosts2 <= 3
    assert 1 <= capacity <= 3
    assert 0 <= target <= capacity
    b1 = tuple(range(ghosts1))
    b2 = tuple(range(10, 10 + ghosts2))
    order = ArcOrder((), (), b1, b2, target)
    after = Arc().missed(order, (asked,), capacity)
    assert 0 <= after.target <= capacity
    assert sorted(after.b1) == list(b1)
    assert sorted(after.b2) == list(b2)
    if asked not in b1 and asked not in b2:
        assert after == order


def arc_ghosts_are_trimmed(size: int, capacity: int) -> None:
    """Each ghost line keeps its newest `capacity` keys."""
    assert 1 <= size <= 4
    assert 1 <= capacity <= 3
    keys = tuple(range(size))
    after = Arc().evict(ArcOrder(keys), keys, capacity)
    assert after.t1 == ()
    assert after.b1 == keys[-capacity:]


def arc_own_touches_are_not_frequency(key: int, again: int) -> None:
    """A key that the request itself inserted stays in T1, however often it was seen."""
    assert 0 <= key <= 3
    assert 1 <= again <= 3
    order = Arc().insert(Arc().empty(), key)
    after = Arc().finished(order, (key,) * again, (key,), ())
    assert after.t1 == (key,)
    assert after.t2 == ()
    reused = Arc().finished(after, (key,), (), (key,))
    assert reused.t1 == ()
    assert reused.t2 == (key,)

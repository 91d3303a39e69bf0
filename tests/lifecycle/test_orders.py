# SPDX-License-Identifier: Apache-2.0
"""LRU and ARC step by step, without vLLM: small orders whose outcome is plain to see."""

from __future__ import annotations

from kvsafe.lifecycle.arc import Arc, ArcOrder
from kvsafe.lifecycle.lru import Lru


def _anybody(key: int) -> bool:
    return True


def test_lru_evicts_the_front_and_touches_prefixes_tail_first() -> None:
    lru = Lru()
    order = lru.empty()
    for key in (1, 2, 3, 4):
        order = lru.insert(order, key)
    assert lru.resident(order) == order == (1, 2, 3, 4)
    order = lru.finished(order, (1, 3, 9), (), ())
    assert order == (2, 4, 3, 1)
    assert lru.missed(order, (9,), 4) == order
    assert lru.victims(order, 2, _anybody) == (2, 4)
    assert lru.victims(order, 2, lambda key: key % 2 == 1) == (3, 1)
    assert lru.victims(order, 3, lambda key: key % 2 == 1) is None
    assert lru.victims(order, 0, _anybody) == ()
    assert lru.evict(order, (4, 2), 4) == (3, 1)
    assert lru.remove(order, 3) == (2, 4, 1)
    assert lru.relabel((2, 0), (5, 6, 7)) == (7, 5)
    assert [lru.place(order, key) for key in (2, 1, 9)] == [(1,), (4,), (0,)]


def test_arc_inserts_into_t1_and_forgets_the_ghost() -> None:
    arc = Arc()
    assert arc.empty() == ArcOrder((), (), (), (), 0.0)
    order = arc.insert(ArcOrder((1,), (2,), (3, 4), (5, 6)), 3)
    assert order == ArcOrder((1, 3), (2,), (4,), (5, 6))
    assert arc.insert(order, 5) == ArcOrder((1, 3, 5), (2,), (4,), (6,))
    assert arc.resident(order) == (1, 3, 2)
    assert arc.remove(ArcOrder((1, 2), (3,), (4,), (5,)), 1) == ArcOrder((2,), (3,), (4,), (5,))
    assert arc.remove(ArcOrder((1, 2), (3,), (4,), (5,)), 3) == ArcOrder((1, 2), (), (4,), (5,))


def test_arc_moves_its_target_by_the_longer_ghost_line() -> None:
    arc = Arc()
    order = ArcOrder((), (), (1, 2), (3, 4, 5, 6), 1.0)
    # A return to B1 makes T1 larger by |B2| / |B1|, at least by one, at most to the capacity.
    assert arc.missed(order, (1,), 9) == ArcOrder((), (), (2, 1), (3, 4, 5, 6), 3.0)
    assert arc.missed(order, (1,), 2).target == 2.0
    assert arc.missed(order._replace(b2=()), (1,), 9).target == 2.0
    # A return to B2 makes it smaller by |B1| / |B2|, at least by one, at least to zero.
    order = ArcOrder((), (), (1, 2, 7, 8), (3, 4), 5.0)
    assert arc.missed(order, (3,), 9) == ArcOrder((), (), (1, 2, 7, 8), (4, 3), 3.0)
    assert arc.missed(order._replace(target=1.0), (3,), 9).target == 0.0
    assert arc.missed(order._replace(b1=()), (3,), 9).target == 4.0
    assert arc.missed(order, (9,), 9) == order
    # The tail of a prefix comes first.
    assert arc.missed(order, (3, 4), 9).b2 == (4, 3)
    assert arc.missed(order, (4, 3), 9).b2 == (3, 4)


def test_arc_makes_frequent_what_a_second_request_read() -> None:
    arc = Arc()
    order = ArcOrder((1, 2, 3), (4, 5))
    assert arc.finished(order, (1, 2), (), (1, 2)) == ArcOrder((3,), (4, 5, 2, 1))
    assert arc.finished(order, (4, 1), (), (4, 1)) == ArcOrder((2, 3), (5, 1, 4))
    # What it inserted itself is only recent, in whichever line it is.
    assert arc.finished(order, (1, 4), (1, 4), (1,)) == ArcOrder((2, 3, 1), (5, 4))
    # Neither inserted nor read: nothing. Read, but gone: nothing.
    assert arc.finished(order, (1, 9), (), (9,)) == order
    assert arc.finished(order, (9,), (9,), ()) == order


def test_arc_takes_from_t1_down_to_its_target() -> None:
    arc = Arc()
    order = ArcOrder((1, 2, 3), (4, 5), (), (), 2.0)
    # T1 has three, its target is two: two go (it is "at its target or above"), then T2.
    assert arc.victims(order, 3, _anybody) == (1, 2, 4)
    assert arc.victims(order, 5, _anybody) == (1, 2, 4, 5, 3)
    assert arc.victims(order, 6, _anybody) is None
    assert arc.victims(order._replace(target=9.0), 3, _anybody) == (4, 5, 1)
    assert arc.victims(order, 2, lambda key: key > 3) == (4, 5)
    assert arc.victims(order, 2, lambda key: key == 3) is None
    assert arc.victims(order, 1, lambda key: key == 3) == (3,)
    assert arc.victims(order._replace(target=2.9), 2, _anybody) == (1, 2)


def test_arc_keeps_the_newest_ghosts() -> None:
    arc = Arc()
    order = ArcOrder((1, 2), (3, 4), (5, 6), (7, 8), 1.5)
    assert arc.evict(order, (2, 3), 3) == ArcOrder((1,), (4,), (5, 6, 2), (7, 8, 3), 1.5)
    assert arc.evict(order, (2, 3, 1), 2) == ArcOrder((), (4,), (2, 1), (8, 3), 1.5)
    assert arc.evict(order, (3, 4), 9).b2 == (7, 8, 3, 4)


def test_arc_renames_and_places() -> None:
    arc = Arc()
    order = ArcOrder((0,), (1,), (2, 3), (4,), 0.5)
    assert arc.relabel(order, (4, 3, 2, 1, 0)) == ArcOrder((4,), (3,), (2, 1), (0,), 0.5)
    places = [arc.place(order, key) for key in range(6)]
    assert places == [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (0,)]


def test_only_arc_asks_what_a_request_did() -> None:
    assert (Arc().name, Arc().counts_reuse) == ("arc", True)
    assert (Lru().name, Lru().counts_reuse) == ("lru", False)

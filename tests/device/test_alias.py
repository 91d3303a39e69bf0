# SPDX-License-Identifier: Apache-2.0
"""Which pages share bytes: the first pair, of all pairs of sets, against a byte-by-byte search."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvsafe.device.alias import StridedBytes, first_overlap, overlapping_pairs

from .test_geometry import all_bytes, covered, strided_sets


def slow_first(left: StridedBytes, right: StridedBytes) -> tuple[int, int] | None:
    """The lowest page of `left` that meets anything, and the lowest page of `right` there."""
    for pair in product(range(left.count), range(right.count)):
        if covered(left, pair[0]) & covered(right, pair[1]):
            return pair
    return None


@given(strided_sets(), strided_sets())
@example(StridedBytes(0, 8, 4, 2), StridedBytes(12, 8, 4, 2))
@example(StridedBytes(12, 8, 4, 2), StridedBytes(0, 8, 4, 2))
@settings(max_examples=300, deadline=None)
def test_the_first_pair_is_the_lowest(left: StridedBytes, right: StridedBytes) -> None:
    assert first_overlap(left, right) == slow_first(left, right)
    same = StridedBytes(right.start, left.stride, min(right.page, left.stride), right.count)
    assert first_overlap(left, same) == slow_first(left, same)


@given(st.lists(strided_sets(), max_size=5))
@settings(max_examples=150, deadline=None)
def test_every_pair_of_sets_is_found_once(sets: list[StridedBytes]) -> None:
    found = {}
    for left, right, page, other in overlapping_pairs(sets):
        assert slow_first(sets[left], sets[right]) == (page, other)
        pair = frozenset((left, right))
        assert pair not in found and len(pair) == 2
        found[pair] = True
    wanted = {
        frozenset((a, b))
        for a, b in product(range(len(sets)), repeat=2)
        if a < b and all_bytes(sets[a]) & all_bytes(sets[b])
    }
    assert set(found) == wanted


@pytest.mark.parametrize(("stride", "other"), [(8, 8), (8, 12)])
def test_neighbours_do_not_meet(stride: int, other: int) -> None:
    left, right = StridedBytes(0, stride, 4, 3), StridedBytes(20, other, 4, 2)
    assert left.end == right.start
    assert first_overlap(left, right) is first_overlap(right, left) is None
    assert first_overlap(left, StridedBytes(19, other, 4, 2)) == (2, 0)

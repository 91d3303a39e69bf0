# SPDX-License-Identifier: Apache-2.0
"""Contracts of `kvsafe.device`: overlap of strided pages against the slow way."""

from __future__ import annotations

from kvsafe.device.alias import StridedBytes, _same_stride, first_overlap


def _bytes_of(part: StridedBytes, page: int) -> range:
    start = part.start + page * part.stride
    return range(start, start + part.page)


def _slow(left: StridedBytes, right: StridedBytes) -> tuple[int, int] | None:
    for i in range(left.count):
        for j in range(right.count):
            mine, theirs = _bytes_of(left, i), _bytes_of(right, j)
            if mine.start < theirs.stop and theirs.start < mine.stop:
                return i, j
    return None


def equal_strides_agree_with_the_slow_way(start: int, stride: int, left: int, right: int) -> None:
    """Two sets of pages with one stride overlap exactly where a walk over all pairs says."""
    assert -6 <= start <= 6
    assert 1 <= left <= stride
    assert 1 <= right <= stride
    assert stride <= 4
    one = StridedBytes(8, stride, left, 2)
    two = StridedBytes(8 + start, stride, right, 2)
    assert _same_stride(one, two) == _slow(one, two)


def sets_that_do_not_meet_do_not_overlap(start: int, gap: int, page: int) -> None:
    """A set that begins behind the end of another shares nothing with it."""
    assert 0 <= start <= 1 << 20
    assert 0 <= gap <= 1 << 20
    assert 1 <= page <= 1 << 20
    one = StridedBytes(start, page, page, 3)
    two = StridedBytes(one.end + gap, page, page, 2)
    assert first_overlap(one, two) is None
    assert first_overlap(two, one) is None
    assert first_overlap(one, one) == (0, 0)

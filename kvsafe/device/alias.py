# SPDX-License-Identifier: Apache-2.0
"""Exact overlap of two strided sets of bytes: pages of `page` bytes, one every `stride` bytes.

Packed layouts interleave the pages of many layers in one storage, so their outer ranges always
intersect; only arithmetic on the pages tells an interleaving from an aliasing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class StridedBytes:
    """`count` pages of `page` bytes; page i starts at `start + i * stride` (all in bytes)."""

    start: int
    stride: int
    page: int
    count: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + (self.count - 1) * self.stride + self.page


def first_overlap(left: StridedBytes, right: StridedBytes) -> tuple[int, int] | None:
    """The first pair (page of left, page of right) that shares a byte, or None."""
    if left.end <= right.start or right.end <= left.start:
        return None
    if left.stride == right.stride:
        return _same_stride(left, right)
    return _any_stride(left, right)


def _same_stride(left: StridedBytes, right: StridedBytes) -> tuple[int, int] | None:
    # Pages i and i + k overlap exactly when -left.page < delta - k * stride < right.page.
    delta = left.start - right.start
    low = max(-((right.page - 1 - delta) // left.stride), -(left.count - 1))
    high = min((delta + left.page - 1) // left.stride, right.count - 1)
    if low > high:
        return None
    # The smallest page of left, and with it the smallest of right, as `_any_stride` answers.
    i = max(0, -high)
    return i, i + max(low, -i)


def _any_stride(left: StridedBytes, right: StridedBytes) -> tuple[int, int] | None:
    starts = left.start + np.arange(left.count, dtype=np.int64) * left.stride
    low = -((right.start + right.page - 1 - starts) // right.stride)
    high = (starts + left.page - 1 - right.start) // right.stride
    low = np.maximum(low, 0)
    hits = np.flatnonzero(low <= np.minimum(high, right.count - 1))
    if hits.size == 0:
        return None
    i = int(hits[0])
    return i, int(low[i])


def overlapping_pairs(pages: Sequence[StridedBytes]) -> Iterator[tuple[int, int, int, int]]:
    """Every pair of sets that shares a byte, as (left, right, page of left, page of right).

    Sets whose outer ranges do not meet are never compared, so separate storages cost a sort.
    """
    by_start = sorted(range(len(pages)), key=lambda index: pages[index].start)
    for place, left in enumerate(by_start):
        for right in by_start[place + 1 :]:
            if pages[right].start >= pages[left].end:
                break
            hit = first_overlap(pages[left], pages[right])
            if hit is not None:
                yield left, right, hit[0], hit[1]

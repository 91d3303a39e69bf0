# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a slice a row's plan copies, and which it leaves."""

from typing import NamedTuple

from kvsafe.device.geometry import Geometry, GroupPage
from kvsafe.device.plan import RowPlan

_CACHE_LIMIT = 1024


class Span(NamedTuple):
    """One copy: `length` bytes between slice offset `offset` and `device_offset` of a tensor.

    `offset` counts from the start of the slice, `device_offset` from the tensor's block 0.
    """

    offset: int
    tensor: int
    device_offset: int
    length: int


class Gap(NamedTuple):
    """Slice bytes [offset, offset + length) that a plan does not copy."""

    offset: int
    length: int


class _Run(NamedTuple):
    slot: int
    block: int
    length: int


class SliceMap:
    """Spans and gaps of row plans over one geometry.  Plans must have passed `check_plan`."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._page_bytes = [sum(p.used for p in pages) for pages in geometry.group_pages]
        self._gaps: dict[tuple[int, tuple[int, ...]], tuple[Gap, ...]] = {}

    def spans(self, row: RowPlan) -> list[Span]:
        """The copies of a row in slice order, joined where both sides are neighbours."""
        runs = _runs(row.blocks)
        spans: list[Span] = []
        for page in self._geometry.group_pages[row.group]:
            if page.used == page.page_bytes == page.stride:
                spans.extend(_joined(page, run) for run in runs)
            else:
                spans.extend(_single(page, slot, block) for slot, block in row.blocks)
        return spans

    def size(self, row: RowPlan) -> int:
        """Bytes that the row copies."""
        return self._page_bytes[row.group] * len(row.blocks)

    def gaps(self, row: RowPlan) -> tuple[Gap, ...]:
        """The bytes of the slice that the row leaves: other slots, other tensors, padding."""
        key = (row.group, tuple(slot for slot, _ in row.blocks))
        found = self._gaps.get(key)
        if found is None:
            found = self._find_gaps(*key)
            if len(self._gaps) >= _CACHE_LIMIT:
                self._gaps.clear()
            self._gaps[key] = found
        return found

    def _find_gaps(self, group: int, slots: tuple[int, ...]) -> tuple[Gap, ...]:
        gaps: list[Gap] = []
        at = 0
        for page in self._geometry.group_pages[group]:
            for slot in slots:
                start = page.area + slot * page.page_bytes
                if start > at:
                    gaps.append(Gap(at, start - at))
                at = start + page.used
        if at < self._geometry.slice_bytes:
            gaps.append(Gap(at, self._geometry.slice_bytes - at))
        return tuple(gaps)


def _runs(blocks: tuple[tuple[int, int], ...]) -> list[_Run]:
    """Stretches in which slot and block both go up by one."""
    runs: list[_Run] = []
    slot0 = block0 = count = -1
    for slot, block in blocks:
        if count > 0 and slot == slot0 + count and block == block0 + count:
            count += 1
            continue
        if count > 0:
            runs.append(_Run(slot0, block0, count))
        slot0, block0, count = slot, block, 1
    runs.append(_Run(slot0, block0, count))
    return runs


def _joined(page: GroupPage, run: _Run) -> Span:
    size = page.page_bytes
    return Span(page.area + run.slot * size, page.tensor, run.block * size, run.length * size)


def _single(page: GroupPage, slot: int, block: int) -> Span:
    return Span(page.area + slot * page.page_bytes, page.tensor, block * page.stride, page.used)

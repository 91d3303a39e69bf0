# SPDX-License-Identifier: Apache-2.0
"""What is to be copied, and the check that every plan passes before a byte moves."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise, starmap
from operator import lt
from typing import NoReturn

import torch

from kvsafe.device.geometry import Geometry, GeometryError

NULL_BLOCK = 0


class Direction(Enum):
    """STORE copies device -> host row, LOAD copies host row -> device."""

    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row: its number, the KV group, and (slot in the chunk, block id) pairs by slot."""

    row: int
    group: int
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One job: all its rows go the same way."""

    job: int
    direction: Direction
    rows: tuple[RowPlan, ...]


@dataclass(frozen=True, slots=True)
class RowWindow:
    """This worker's slices of the shared host memory; all sizes in bytes.

    base: 1-D contiguous int8 tensor over the whole region, on the CPU.
    Row r is at `rows_offset + r * row_stride`; the slice is at `slice_offset` inside the row,
    counted from the row's first byte, header included.
    """

    base: torch.Tensor
    rows_offset: int
    num_rows: int
    row_stride: int
    slice_offset: int
    slice_bytes: int

    def slice_start(self, row: int) -> int:
        """Offset in `base` where the slice of row `row` begins."""
        return self.rows_offset + row * self.row_stride + self.slice_offset

    def check(self, geometry: Geometry) -> None:
        """Raise GeometryError unless every slice lies in the region and fits the geometry."""
        problems = [text for bad, text in self._conditions(geometry) if bad]
        if problems:
            raise GeometryError(problems)

    def _conditions(self, geometry: Geometry) -> list[tuple[bool, str]]:
        base = self.base
        end = self.rows_offset + self.num_rows * self.row_stride
        plain = base.ndim == 1 and base.is_contiguous() and base.device.type == "cpu"
        return [
            (base.dtype is not torch.int8, f"host memory must be torch.int8, is {base.dtype}"),
            (not plain, "host memory must be one contiguous dimension on the cpu"),
            (self.num_rows <= 0, f"no rows: {self.num_rows}"),
            (self.rows_offset < 0, f"rows begin at {self.rows_offset}"),
            (self.slice_offset < 0, f"slice begins at {self.slice_offset} of its row"),
            (
                self.slice_offset + self.slice_bytes > self.row_stride,
                f"slice ends at {self.slice_offset + self.slice_bytes} "
                f"of a row of {self.row_stride} bytes",
            ),
            (
                self.slice_bytes != geometry.slice_bytes,
                f"slice has {self.slice_bytes} bytes, the geometry needs {geometry.slice_bytes}",
            ),
            (end > base.numel(), f"rows end at {end} of {base.numel()} bytes"),
        ]


@dataclass(frozen=True, slots=True)
class PlanFault:
    """The first thing found wrong with a plan, as a value."""

    field: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}"


class PlanError(ValueError):
    """A plan that must not be carried out; nothing of it was copied."""

    def __init__(self, field: str, expected: object, found: object) -> None:
        self.fault = PlanFault(field, expected, found)
        super().__init__(f"copy plan: {self.fault}")

    @property
    def field(self) -> str:
        """What was wrong: `row`, `group`, `slot`, `block`, `destination`, ..."""
        return self.fault.field


def check_plan(plan: CopyPlan, geometry: Geometry, window: RowWindow) -> None:
    """Raise PlanError unless every byte of the plan may move.

    On the path of every job: C-level passes over the ids of each row decide; only a plan that
    fails is walked in Python, to name the fault.  `geometry` and `window` passed their checks.
    """
    if not isinstance(plan.direction, Direction):
        raise PlanError("direction", "STORE or LOAD", plan.direction)
    if not plan.rows:
        raise PlanError("rows", "at least one row", 0)
    if window.slice_bytes != geometry.slice_bytes:
        raise PlanError("slice_bytes", geometry.slice_bytes, window.slice_bytes)
    for row in plan.rows:
        if not _row_is_sound(row, geometry, window.num_rows):
            _explain_row(row, geometry, window.num_rows)
    _check_host_range(plan, window)
    if plan.direction is Direction.LOAD:
        _check_blocks_once(plan.rows, geometry)
    else:
        _check_rows_once(plan.rows)


def _row_is_sound(row: RowPlan, geometry: Geometry, num_rows: int) -> bool:
    try:
        slots, blocks = zip(*row.blocks, strict=True)
        if set(map(type, (row.row, row.group, *slots, *blocks))) != {int}:
            return False
        return (
            0 <= row.row < num_rows
            and 0 <= row.group < len(geometry.groups)
            and slots[0] >= 0
            and slots[-1] < geometry.blocks_per_chunk
            and all(starmap(lt, pairwise(slots)))
            and min(blocks) > NULL_BLOCK
            and max(blocks) <= geometry.group_reach[row.group]
            and len(set(blocks)) == len(blocks)
        )
    except (TypeError, ValueError):
        return False


def _explain_row(row: RowPlan, geometry: Geometry, num_rows: int) -> NoReturn:
    """Raise the PlanError of a row that is not sound."""
    _expect_index("row", row.row, num_rows)
    _expect_index("group", row.group, len(geometry.groups))
    if not isinstance(row.blocks, tuple) or not row.blocks:
        raise PlanError("blocks", "at least one (slot, block)", row.blocks)
    last = -1
    seen: set[int] = set()
    for pair in row.blocks:
        slot, block = _expect_pair(pair)
        _expect_index("slot", slot, geometry.blocks_per_chunk)
        if slot <= last:
            raise PlanError("slot", f"above {last}", slot)
        _expect_block(block, geometry, row.group)
        if block in seen:
            raise PlanError("block", "each block once in a row", block)
        last = slot
        seen.add(block)
    raise PlanError("row", "a sound row", row)


def _expect_pair(pair: object) -> tuple[int, int]:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise PlanError("blocks", "(slot, block) pairs", pair)
    slot, block = pair
    return slot, block


def _expect_index(field: str, value: object, limit: int) -> None:
    if type(value) is not int or not 0 <= value < limit:
        raise PlanError(field, f"an int in [0, {limit})", value)


def _expect_block(block: int, geometry: Geometry, group: int) -> None:
    _expect_index("block", block, geometry.num_blocks)
    if block == NULL_BLOCK:
        raise PlanError("block", "not the null block", block)
    if block > geometry.group_reach[group]:
        raise PlanError("device range", f"block at most {geometry.group_reach[group]}", block)


def _check_host_range(plan: CopyPlan, window: RowWindow) -> None:
    first = min(row.row for row in plan.rows)
    last = max(row.row for row in plan.rows)
    end = window.slice_start(last) + window.slice_bytes
    if window.slice_start(first) < 0 or end > window.base.numel():
        span = (window.slice_start(first), end)
        raise PlanError("host range", f"inside {window.base.numel()} bytes", span)


def _check_rows_once(rows: Sequence[RowPlan]) -> None:
    if len({row.row for row in rows}) == len(rows):
        return
    seen: set[int] = set()
    for row in rows:
        if row.row in seen:
            raise PlanError("destination", "each row stored once", row.row)
        seen.add(row.row)


def _check_blocks_once(rows: Sequence[RowPlan], geometry: Geometry) -> None:
    """No block of any tensor is written twice, whichever groups say so."""
    blocks = [block for row in rows for _, block in row.blocks]
    if len(set(blocks)) == len(blocks):
        return
    written: dict[int, int] = {}
    for row in rows:
        mask = geometry.group_masks[row.group]
        for _, block in row.blocks:
            before = written.get(block, 0)
            if before & mask:
                raise PlanError("destination", "each block loaded once", block)
            written[block] = before | mask

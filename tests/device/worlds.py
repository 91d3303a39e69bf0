# SPDX-License-Identifier: Apache-2.0
"""Geometries, windows and plans for the tests, and a slow oracle that knows the layout rule."""

import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from kvsafe.device import (
    CopyPlan,
    DeviceTensor,
    Direction,
    Geometry,
    GroupRef,
    RowPlan,
    RowWindow,
)

STORE, LOAD = Direction.STORE, Direction.LOAD


def plain_tensor(blocks: int, page: int, *layers: str) -> DeviceTensor:
    return DeviceTensor(torch.zeros((blocks, page), dtype=torch.int8), page, layers)


def packed_tensors(blocks: int, pages: list[int], padding: int = 0) -> tuple[DeviceTensor, ...]:
    """Tensors whose pages take turns inside each block of one storage."""
    stride = sum(pages) + padding
    storage = torch.zeros(blocks * stride, dtype=torch.int8)
    tensors, at = [], 0
    for index, page in enumerate(pages):
        view = storage.as_strided((blocks, page), (stride, 1), at)
        tensors.append(DeviceTensor(view, page, (f"layer{index}",)))
        at += page
    return tuple(tensors)


def simple_geometry(blocks: int = 8, page: int = 16, tensors: int = 2, span: int = 2) -> Geometry:
    """One group over all tensors."""
    made = tuple(plain_tensor(blocks, page, f"layer{i}") for i in range(tensors))
    return Geometry(made, (tuple(GroupRef(i, page) for i in range(tensors)),), span)


def window_for(
    geometry: Geometry, rows: int = 4, header: int = 32, before: int = 8, after: int = 8
) -> RowWindow:
    """Rows with a header, another worker's bytes before the slice and after it."""
    stride = header + before + geometry.slice_bytes + after
    lead = 24
    base = torch.zeros(lead + rows * stride, dtype=torch.int8)
    return RowWindow(base, lead, rows, stride, header + before, geometry.slice_bytes)


def fill(tensor: torch.Tensor, seed: int) -> None:
    """Random bytes, in place, for views of any stride."""
    maker = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randint(-128, 128, tensor.shape, generator=maker, dtype=torch.int8))


def fill_world(geometry: Geometry, window: RowWindow, seed: int = 7) -> None:
    for index, tensor in enumerate(geometry.tensors):
        fill(tensor.view, seed + index)
    fill(window.base, seed + 1000)


def slice_bytes_of(window: RowWindow, row: int) -> list[int]:
    start = window.rows_offset + row * window.row_stride + window.slice_offset
    return [int(value) for value in window.base[start : start + window.slice_bytes].tolist()]


def place_of(geometry: Geometry, row: RowPlan) -> list[tuple[int, int, int] | None]:
    """For each byte of the slice: (tensor, block, byte of the page) that belongs there, or None.

    Walks the slice byte by byte along the layout rule; shares nothing with the code under test.
    """
    blocks = dict(row.blocks)
    places: list[tuple[int, int, int] | None] = []
    for index, tensor in enumerate(geometry.tensors):
        used = [ref.page_bytes for ref in geometry.groups[row.group] if ref.tensor == index]
        for slot in range(geometry.blocks_per_chunk):
            for byte in range(tensor.page_bytes):
                held = slot in blocks and byte < max(used, default=0)
                places.append((index, blocks[slot], byte) if held else None)
    return places


def device_bytes(geometry: Geometry) -> list[list[list[int]]]:
    return [tensor.view.tolist() for tensor in geometry.tensors]


@dataclass
class Oracle:
    """Expected bytes on both sides, moved one by one."""

    geometry: Geometry
    window: RowWindow

    def __post_init__(self) -> None:
        self.device = device_bytes(self.geometry)
        self.host = self.window.base.tolist()

    def apply(self, plan: CopyPlan) -> None:
        window = self.window
        for row in plan.rows:
            start = window.rows_offset + row.row * window.row_stride + window.slice_offset
            for at, place in enumerate(place_of(self.geometry, row)):
                self._byte(plan.direction, start + at, place)

    def _byte(self, way: Direction, at: int, place: tuple[int, int, int] | None) -> None:
        if way is STORE:
            tensor, block, byte = place or (0, 0, 0)
            self.host[at] = self.device[tensor][block][byte] if place else 0
        elif place:
            tensor, block, byte = place
            self.device[tensor][block][byte] = self.host[at]

    def agrees(self) -> bool:
        same_host = self.host == self.window.base.tolist()
        return same_host and self.device == device_bytes(self.geometry)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Plain, padded and packed tensors; groups that share them, with padding and repeats."""
    blocks = draw(st.integers(2, 9))
    pages = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    kind = draw(st.sampled_from(["plain", "padded", "packed"]))
    if kind == "packed":
        tensors = packed_tensors(blocks, pages, draw(st.integers(0, 3)))
    else:
        pad = draw(st.integers(1, 5)) if kind == "padded" else 0
        tensors = tuple(_padded(blocks, page, pad, i) for i, page in enumerate(pages))
    count = draw(st.integers(1, 3))
    groups = tuple(draw(_refs(pages)) for _ in range(count))
    return Geometry(tensors, groups, draw(st.integers(1, 4)))


def _padded(blocks: int, page: int, pad: int, index: int) -> DeviceTensor:
    storage = torch.zeros(3 + blocks * (page + pad), dtype=torch.int8)
    view = storage.as_strided((blocks, page), (page + pad, 1), 3)
    return DeviceTensor(view, page, (f"layer{index}",))


@st.composite
def _refs(draw: st.DrawFn, pages: list[int]) -> tuple[GroupRef, ...]:
    indexes = draw(st.lists(st.integers(0, len(pages) - 1), min_size=1, max_size=4))
    return tuple(GroupRef(i, draw(st.integers(1, pages[i]))) for i in indexes)


@st.composite
def plans(draw: st.DrawFn, geometry: Geometry, rows: int, direction: Direction) -> CopyPlan:
    """A valid plan: rows once, blocks once, slots in order."""
    ids = list(range(1, geometry.num_blocks))
    random.Random(draw(st.integers(0, 2**16))).shuffle(ids)
    if draw(st.booleans()):
        ids.sort()
    made: list[RowPlan] = []
    for row in draw(st.permutations(range(rows)).map(lambda p: p[: len(ids)])):
        slots = draw(st.sets(st.integers(0, geometry.blocks_per_chunk - 1), min_size=1))
        chosen = sorted(slots)[: len(ids)]
        if not chosen:
            break
        blocks = tuple((slot, ids.pop(0)) for slot in chosen)
        made.append(RowPlan(row, draw(st.integers(0, len(geometry.groups) - 1)), blocks))
    return CopyPlan(draw(st.integers(0, 99)), direction, tuple(made))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Geometry, RowWindow]:
    geometry = draw(geometries())
    rows = draw(st.integers(1, 3))
    return geometry, window_for(geometry, rows, header=draw(st.integers(0, 9)))

# SPDX-License-Identifier: Apache-2.0
"""The real geometry of the registered KV-cache tensors: what a block's bytes are and where."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvsafe.device.document import describe_geometry
from kvsafe.device.problems import geometry_problems


class GeometryError(ValueError):
    """Tensors, groups or the row window cannot be used; `problems` lists every reason found."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("unusable geometry: " + "; ".join(self.problems))


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """One distinct KV-cache tensor.

    view: int8, shape (num_blocks, page_bytes), stride (stride(0) >= page_bytes, 1).
    page_bytes: bytes of one page, padding included.
    layers: names of the layers whose bytes live in this tensor.
    """

    view: torch.Tensor
    page_bytes: int
    layers: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks in the tensor."""
        return int(self.view.shape[0])

    @property
    def stride(self) -> int:
        """Bytes from one block to the next."""
        return int(self.view.stride(0))

    @property
    def extent(self) -> int:
        """Bytes from the first byte of block 0 to one past the last byte of the last block."""
        return (self.num_blocks - 1) * self.stride + self.page_bytes

    def flat(self) -> torch.Tensor:
        """The same bytes as a 1-D int8 tensor of `extent` bytes; block b is at b * stride."""
        return self.view.as_strided((self.extent,), (1,))


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A group's use of one tensor: index into the tensors, unpadded bytes of each page."""

    tensor: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class GroupPage:
    """Where one page of a group lies on both sides (bytes).

    Host: slot j is at `area + j * page_bytes` of the slice.  Device: block b is at `b * stride`
    of the tensor.  Only the first `used` bytes are the group's.
    """

    tensor: int
    area: int
    page_bytes: int
    stride: int
    used: int


@dataclass(frozen=True)
class Geometry:
    """All distinct tensors of this worker, the groups that use them, and the chunk's span.

    Call `check()` once before use: the other members suppose that it passed.
    """

    tensors: tuple[DeviceTensor, ...]
    groups: tuple[tuple[GroupRef, ...], ...]
    blocks_per_chunk: int

    def check(self) -> None:
        """Raise GeometryError with every problem of tensors, groups and aliasing."""
        problems = geometry_problems(self)
        if problems:
            raise GeometryError(problems)

    def describe(self) -> dict[str, object]:
        """A small CBOR-able document of all that decides the bytes of a slice.

        It holds neither block counts nor addresses: they differ from start to start.
        """
        return describe_geometry(self)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks that every tensor has."""
        return min(tensor.num_blocks for tensor in self.tensors)

    @cached_property
    def device_type(self) -> str:
        """`cpu`, `cuda`, ..."""
        return str(self.tensors[0].view.device.type)

    @cached_property
    def slice_bytes(self) -> int:
        """Bytes of this worker's slice of one row."""
        return self.blocks_per_chunk * sum(tensor.page_bytes for tensor in self.tensors)

    @cached_property
    def _areas(self) -> tuple[int, ...]:
        areas, at = [], 0
        for tensor in self.tensors:
            areas.append(at)
            at += tensor.page_bytes * self.blocks_per_chunk
        return tuple(areas)

    def tensor_area(self, tensor: int) -> int:
        """Byte offset in the slice where the area of tensor `tensor` begins."""
        return self._areas[tensor]

    @cached_property
    def group_pages(self) -> tuple[tuple[GroupPage, ...], ...]:
        """Per group, its pages in tensor order.

        Layers that share their KV give one group several refs to one tensor; they are one page
        here, as long as the longest ref.
        """
        return tuple(self._pages(refs) for refs in self.groups)

    def _pages(self, refs: tuple[GroupRef, ...]) -> tuple[GroupPage, ...]:
        used: dict[int, int] = {}
        for ref in refs:
            used[ref.tensor] = max(used.get(ref.tensor, 0), ref.page_bytes)
        return tuple(self._page(index, used[index]) for index in sorted(used))

    def _page(self, index: int, used: int) -> GroupPage:
        tensor = self.tensors[index]
        return GroupPage(index, self._areas[index], tensor.page_bytes, tensor.stride, used)

    @cached_property
    def group_masks(self) -> tuple[int, ...]:
        """Per group, a bit mask of the tensors it uses."""
        masks = []
        for pages in self.group_pages:
            masks.append(sum(1 << page.tensor for page in pages))
        return tuple(masks)

    @cached_property
    def group_classes(self) -> tuple[int, ...]:
        """Per group, the number of its class; groups of one class may share a tensor."""
        merged: list[int] = []
        for mask in self.group_masks:
            touching = [other for other in merged if other & mask]
            merged = [other for other in merged if not other & mask]
            merged.append(mask | sum(touching))
        return tuple(
            next(number for number, union in enumerate(merged) if union & mask)
            for mask in self.group_masks
        )

    @cached_property
    def group_reach(self) -> tuple[int, ...]:
        """Per group, the highest block id whose bytes lie inside every storage it uses."""
        return tuple(min(map(self._reach, pages)) for pages in self.group_pages)

    def _reach(self, page: GroupPage) -> int:
        view = self.tensors[page.tensor].view
        room = int(view.untyped_storage().nbytes()) - int(view.storage_offset()) - page.used
        return min(self.num_blocks - 1, room // max(page.stride, 1))

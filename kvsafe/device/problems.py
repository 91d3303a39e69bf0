# SPDX-License-Identifier: Apache-2.0
"""Everything that can be wrong with registered tensors, as sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvsafe.device.alias import StridedBytes, overlapping_pairs

if TYPE_CHECKING:
    from kvsafe.device.geometry import DeviceTensor, Geometry


def geometry_problems(geometry: Geometry) -> list[str]:
    """Every problem of the geometry, in a fixed order; empty when it is usable."""
    found = list(_size_problems(geometry))
    sound: dict[int, DeviceTensor] = {}
    for index, tensor in enumerate(geometry.tensors):
        mine = [f"tensor {index}: {problem}" for problem in _tensor_problems(tensor)]
        if not mine:
            sound[index] = tensor
        found.extend(mine)
    found.extend(_common_problems(sound))
    found.extend(_group_problems(geometry))
    found.extend(_alias_problems(sound))
    return found


def _size_problems(geometry: Geometry) -> Iterator[str]:
    if geometry.blocks_per_chunk <= 0:
        yield f"blocks_per_chunk must be positive, found {geometry.blocks_per_chunk}"
    if not geometry.tensors:
        yield "no tensors"
    if not geometry.groups:
        yield "no groups"


def _tensor_problems(tensor: DeviceTensor) -> Iterator[str]:
    view = tensor.view
    if view.dtype is not torch.int8:
        yield f"dtype must be torch.int8, found {view.dtype}"
    if view.ndim != 2:
        yield f"must have 2 dimensions, found {view.ndim}"
        return
    blocks, width = view.shape
    if tensor.page_bytes <= 0 or blocks <= 0:
        yield f"zero size: {blocks} blocks of {tensor.page_bytes} bytes"
        return
    if width != tensor.page_bytes:
        yield f"page must have {tensor.page_bytes} bytes, the view has {width}"
    if width > 1 and view.stride(1) != 1:
        yield f"bytes of a page must be consecutive, stride(1) is {view.stride(1)}"
    if blocks > 1 and view.stride(0) < width:
        yield f"blocks overlap: stride(0) {view.stride(0)} is below the page of {width} bytes"
    yield from _bounds_problems(view)


def _bounds_problems(view: torch.Tensor) -> Iterator[str]:
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    end = (int(view.storage_offset()) + reach + 1) * view.element_size()
    size = view.untyped_storage().nbytes()
    if end > size:
        yield f"reaches byte {end} of a storage of {size} bytes"


def _common_problems(sound: dict[int, DeviceTensor]) -> Iterator[str]:
    if not sound:
        return
    first, reference = next(iter(sound.items()))
    for index, tensor in sound.items():
        if tensor.num_blocks != reference.num_blocks:
            yield (
                f"tensor {index}: {tensor.num_blocks} blocks, "
                f"tensor {first} has {reference.num_blocks}"
            )
        if tensor.view.device != reference.view.device:
            yield (
                f"tensor {index}: on {tensor.view.device}, "
                f"tensor {first} is on {reference.view.device}"
            )


def _group_problems(geometry: Geometry) -> Iterator[str]:
    for number, refs in enumerate(geometry.groups):
        if not refs:
            yield f"group {number}: no refs"
        for ref in refs:
            if not 0 <= ref.tensor < len(geometry.tensors):
                yield f"group {number}: no tensor {ref.tensor}, have {len(geometry.tensors)}"
                continue
            page = geometry.tensors[ref.tensor].page_bytes
            if not 0 < ref.page_bytes <= page:
                yield (
                    f"group {number}: {ref.page_bytes} bytes "
                    f"of a page of {page} bytes in tensor {ref.tensor}"
                )


def _alias_problems(sound: dict[int, DeviceTensor]) -> Iterator[str]:
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in sound.items():
        by_device.setdefault(tensor.view.device, []).append(index)
    for indexes in by_device.values():
        pages = [_addresses(sound[index]) for index in indexes]
        for left, right, block, other in overlapping_pairs(pages):
            yield (
                f"tensors {indexes[left]} and {indexes[right]} share bytes: "
                f"block {block} of one, block {other} of the other"
            )


def _addresses(tensor: DeviceTensor) -> StridedBytes:
    # A lone block's stride means nothing; the page size keeps the arithmetic defined.
    stride = max(tensor.stride, tensor.page_bytes)
    return StridedBytes(tensor.view.data_ptr(), stride, tensor.page_bytes, tensor.num_blocks)

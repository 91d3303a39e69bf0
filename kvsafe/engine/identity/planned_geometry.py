# SPDX-License-Identifier: Apache-2.0
"""The geometry that workers will register, said from the configuration alone.

Under vLLM's own spec no worker of ours tells what it registered. vLLM places KV-cache tensors by
`KVCacheConfig.kv_cache_tensors` and hands them to offloading in the order of the groups' layers;
the same is done here, so that the document equals the one that our workers write and files are
readable through both doors. What cannot be said with certainty is refused, not guessed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    get_offloading_group_ids,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from kvsafe.device import (
    DeviceTensor,
    ExpectedGroup,
    Geometry,
    GeometryExpectation,
    GroupRef,
    check_expectation,
)

Place = tuple[int, int]
"""(first byte of block 0 in the allocation, bytes from block to block)"""


class GeometryUnknown(RuntimeError):
    """The configuration does not say for certain where the workers will have their bytes."""


@dataclass(frozen=True)
class PlannedGeometry(Geometry):
    """A geometry without memory: its views are on torch's `meta` device."""

    planned_device: str = ""

    @property
    def device_type(self) -> str:
        """The device that the workers use."""
        return self.planned_device


def planned_geometry(
    kv_cache_config: Any, expectation: GeometryExpectation, *, pipeline_stages: int
) -> Geometry:
    """The geometry of every worker. Raises `GeometryUnknown`."""
    if pipeline_stages != 1:
        raise GeometryUnknown("pipeline stages hold different layers, which only they know")
    places = _places(kv_cache_config)
    pages: dict[Place, int] = {}
    layers: dict[Place, list[str]] = {}
    ids = get_offloading_group_ids(kv_cache_config)
    for group_id, group in zip(ids, expectation.groups, strict=True):
        spec = kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
        for layer in group.layers:
            places[layer] = place = _dense(places, layer, spec)
            pages.setdefault(place, int(spec.page_size_bytes))
            layers.setdefault(place, []).append(layer)
    order = {place: index for index, place in enumerate(layers)}
    made = PlannedGeometry(
        tuple(DeviceTensor(_view(pages[p]), pages[p], tuple(layers[p])) for p in layers),
        tuple(_refs(group, places, order) for group in expectation.groups),
        expectation.blocks_per_chunk,
        expectation.device_type,
    )
    if differences := check_expectation(expectation, made):
        raise GeometryUnknown("; ".join(str(item) for item in differences))
    return made


def _places(kv_cache_config: Any) -> dict[str, Place]:
    """Where every layer lies, by what the workers allocate from."""
    found: dict[str, Place] = {}
    in_host = getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None
    for tensor in kv_cache_config.kv_cache_tensors:
        if in_host or tensor.host_resident:
            raise GeometryUnknown("part of the KV cache is in host memory")
        for index, layer in enumerate(tensor.layers):
            start = int(tensor.offset) + index * int(tensor.layer_stride)
            found[layer] = (start, int(tensor.block_stride))
    return found


def _dense(places: dict[str, Place], layer: str, spec: Any) -> Place:
    """Where a layer lies, if its pages follow one another; else vLLM offloads packed blocks."""
    if layer not in places:
        raise GeometryUnknown(f"no KV-cache tensor holds layer {layer}")
    start, stride = places[layer]
    page = int(spec.page_size_bytes)
    if isinstance(spec, AttentionSpec) and stride != page:
        raise GeometryUnknown(f"layer {layer}: packed blocks, or layers of unlike sizes")
    # State pages are taken as dense by vLLM whatever the stride is.
    return start, page


def _refs(
    group: ExpectedGroup, places: dict[str, Place], order: dict[Place, int]
) -> tuple[GroupRef, ...]:
    if len(group.layers) != len(group.page_bytes):
        raise GeometryUnknown("a group without one page for each layer")
    pairs = zip(group.layers, group.page_bytes, strict=True)
    return tuple(GroupRef(order[places[layer]], used) for layer, used in pairs)


def _view(page: int) -> torch.Tensor:
    return torch.empty((1, page), dtype=torch.int8, device="meta")

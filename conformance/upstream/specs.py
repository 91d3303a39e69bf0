# SPDX-License-Identifier: Apache-2.0
"""Our spec in place of vLLM's two, with an identity of the test's own."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from conformance.upstream.bench import bare_station
from kvsafe.device import ExpectedGroup, GeometryExpectation, RowWindow
from kvsafe.engine.spec import Assembly, KVSafeSpec
from kvsafe.host import HostRegion


class Spec(KVSafeSpec):
    """Our spec, made as theirs: from a configuration alone."""

    _theirs = "vllm.v1.kv_offload.tiering.spec"
    # Tests of options bring no tensors at all, and ours makes no rows of nothing.
    _least_bytes = 1

    def __init__(self, config: OffloadingConfig) -> None:
        station = bare_station(
            config.extra_config.get("cpu_bytes_to_use"), int(config.parallel.world_size)
        )
        block_bytes = max(config.worker_kv_bytes_per_block, self._least_bytes)
        config = replace(config, worker_kv_bytes_per_block=block_bytes)
        self.worker_bytes = block_bytes
        expected = GeometryExpectation(
            device_type="cpu",
            blocks_per_chunk=config.cache.blocks_per_chunk,
            slice_bytes=block_bytes * config.cache.blocks_per_chunk,
            groups=(ExpectedGroup(("layer",), (block_bytes,)),),
        )
        super().__init__(config, Assembly(station, expected, (), fail_loads=False))

    def create_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        """Ours, over tensors that fit; the slice that it takes is told in vLLM's words."""
        if isinstance(kv_caches, MagicMock):
            kv_caches = _fitting(self.worker_bytes, len(self.config.groups))
        return self.get_worker(kv_caches)

    def _window(self, region: HostRegion, slot: int) -> RowWindow:
        region.forget_name()
        window = super()._window(region, slot)
        layout = self.station.seal_setting.layout
        told: Any = sys.modules[self._theirs]
        told.SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=(window.slice_offset - layout.header_bytes) // window.slice_bytes,
            kv_bytes_per_chunk=region.shape.row_bytes,
            cpu_page_size=window.slice_bytes,
        )
        return window


def _fitting(block_bytes: int, groups: int) -> CanonicalKVCaches:
    """One tensor of four blocks, in every group."""
    tensor = torch.zeros((4, block_bytes), dtype=torch.int8)
    refs = [CanonicalKVCacheRef(tensor_idx=0, page_size_bytes=block_bytes)]
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, block_bytes)], [refs] * groups)


class CpuSpec(Spec):
    """Our spec in place of their spec without tiers: ours without any."""

    _theirs = "vllm.v1.kv_offload.cpu.spec"
    _least_bytes = 0

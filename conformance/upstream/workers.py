# SPDX-License-Identifier: Apache-2.0
"""Our worker in place of vLLM's, on whatever device the tensors of a test are.

Rows are sealed rows of a region of their own, and every copy goes through the checked copier
with the real proof around it. A load needs rows that were sealed: the stand-in seals what a
test has written into them. A test's flat lists become plans in the way of our scheduler half.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec

from conformance.upstream.bench import KEY_BYTES, bare_station
from kvsafe.device import (
    Copier,
    DeviceTensor,
    Geometry,
    GroupRef,
    RowWindow,
    cpu_copier,
    cuda_copier,
)
from kvsafe.engine.rows.placement import FlatBlocks, place_run
from kvsafe.engine.rows.proof import RowProof
from kvsafe.engine.rows.transfer import SealedRowsSpec
from kvsafe.engine.worker import KVSafeWorker
from kvsafe.seal.header import bitmap

DEADLINE_S = 60.0
THREADS = 2


class Rows(torch.Tensor):
    """The bytes of one tensor in all rows; rows have a stride, so a view can be a copy."""

    def view(self, *shape: Any) -> torch.Tensor:
        """As `reshape`, which their tests use where their own rows have a stride."""
        return self.reshape(*shape)


class CpuWorker(KVSafeWorker):
    """Our worker, made as theirs."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        num_cpu_chunks: int,
        mmap_region: Any = None,
        canonical_layout: bool = False,
    ) -> None:
        geometry = geometry_of(kv_caches, blocks_per_chunk)
        self._slots = blocks_per_chunk
        self._mmap_region = mmap_region
        self._station = bare_station(1 << 20, 1)
        self._station.lay_out(
            key_bytes=KEY_BYTES, slots=blocks_per_chunk, slice_bytes=(geometry.slice_bytes,)
        )
        self._region = self._station.open_region(num_cpu_chunks)
        self._region.forget_name()
        self._station.register(0, geometry.describe())
        self._region.announce_epoch(1)
        window = self._window()
        proof = RowProof(self._station, self._region, 0, once=False)
        groups = {group: group for group in range(len(geometry.groups))}
        super().__init__(_copier(geometry, window, proof), proof, groups, DEADLINE_S)
        self._look(kv_caches, geometry, window)

    def _window(self) -> RowWindow:
        layout, shape = self._station.seal_setting.layout, self._region.shape
        place = layout.slices[0]
        return RowWindow(
            base=torch.frombuffer(self._region.memory, dtype=torch.int8),
            rows_offset=shape.rows_offset,
            num_rows=shape.num_rows,
            row_stride=shape.row_bytes,
            slice_offset=layout.header_bytes + place.offset,
            slice_bytes=place.length,
        )

    def _look(self, kv_caches: CanonicalKVCaches, geometry: Geometry, window: RowWindow) -> None:
        """What their tests look at in the two handlers of their worker."""
        device = [item.tensor for item in kv_caches.tensors]
        host = [
            torch.as_strided(
                window.base,
                size=(window.num_rows, item.page_size_bytes * self._slots),
                stride=(window.row_stride, 1),
                storage_offset=window.slice_start(0) + geometry.tensor_area(index),
            ).as_subclass(Rows)
            for index, item in enumerate(kv_caches.tensors)
        ]
        refs = kv_caches.group_data_refs
        self._store_handler: Any = _Handler(self, device, host, refs)
        self._load_handler: Any = _Handler(self, host, device, refs)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        """Blocks to rows."""
        return super().submit_store(job_id, src_spec, self._sealed(src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        """Rows to blocks; the rows are sealed first, as they are."""
        spec = self._sealed(dst_spec, src_spec)
        whole = bitmap(self._slots, range(self._slots))
        writer, sealer = self._station.slice_sealer(0), self._station.header_sealer()
        for number, key, generation in zip(
            spec.block_ids.tolist(), spec.keys, spec.generations, strict=True
        ):
            row = self._region.row(number)
            writer.seal_slice(row, key, spec.epoch, generation)
            sealer.seal(row, key, spec.epoch, generation, whole)
        return super().submit_load(job_id, spec, dst_spec)

    def _sealed(self, blocks: GPULoadStoreSpec, chunks: Any) -> SealedRowsSpec:
        flat = FlatBlocks(blocks.block_ids.tolist(), blocks.group_sizes, blocks.block_indices)
        placed = place_run(flat, self._slots)
        rows = chunks.block_ids.tolist()
        keys = [
            row.to_bytes(KEY_BYTES - 4, "big") + group.to_bytes(4, "big")
            for row, (group, _) in zip(rows, placed, strict=True)
        ]
        generations = [self._region.ledger.allocate(row) for row in rows]
        spec = SealedRowsSpec(rows, keys, generations, self._region.epoch)
        spec.blocks = [slots for _, slots in placed]
        return spec

    def shutdown(self) -> None:
        """Stop, and let the test's region go as their worker does."""
        super().shutdown()
        if self._mmap_region is not None:
            self._mmap_region.cleanup()
            self._mmap_region = None


class _Handler:
    """One direction of our worker, as their tests look at it."""

    def __init__(self, worker: CpuWorker, src: list[Any], dst: list[Any], refs: Any) -> None:
        self._worker = worker
        self.src_tensors, self.dst_tensors = src, dst
        self.layer_refs_per_group = refs

    @property
    def _transfers(self) -> list[Any]:
        return [SimpleNamespace(job_id=job) for job in self._worker._keys]


def geometry_of(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> Geometry:
    """Our geometry of these tensors. Raises `GeometryError` when it is not sound."""
    tensors = tuple(
        DeviceTensor(item.tensor.view(torch.int8), item.page_size_bytes, ())
        for item in kv_caches.tensors
    )
    groups = tuple(
        tuple(GroupRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs)
        for refs in kv_caches.group_data_refs
    )
    geometry = Geometry(tensors, groups, blocks_per_chunk)
    geometry.check()
    return geometry


def _copier(geometry: Geometry, window: RowWindow, proof: RowProof) -> Copier:
    if geometry.device_type == "cuda":
        return cuda_copier(geometry, window, proof, ops.swap_blocks_batch, THREADS)
    return cpu_copier(geometry, window, proof, threads=THREADS)

# SPDX-License-Identifier: Apache-2.0
"""vLLM's own `TieringOffloadingSpec` on a CPU engine: only the copying worker is replaced.

vLLM's worker takes CUDA and XPU only (`CPUOffloadingSpec.get_worker` raises elsewhere). Manager,
primary tier, shared region, row layout and tier factory are vLLM's, untouched.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):
    """Copies between CPU blocks and rows laid out as vLLM's worker lays them out."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._pages = [item.page_size_bytes for item in kv_caches.tensors]
        self._blocks = [item.tensor for item in kv_caches.tensors]
        self._rows = [
            region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Blocks to rows."""
        return self._copy(job_id, src_spec, dst_spec.block_ids, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Rows to blocks."""
        return self._copy(job_id, dst_spec, src_spec.block_ids, store=False)

    def _copy(self, job_id: int, device: Any, rows: Any, *, store: bool) -> bool:
        taken = at = size_of_all = 0
        sizes = zip(self._groups, device.group_sizes, device.block_indices, strict=True)
        for refs, size, index in sizes:
            first = index % self._per_chunk
            for place in range(size):
                row = int(rows[taken + (first + place) // self._per_chunk])
                slot = (first + place) % self._per_chunk
                block = int(device.block_ids[at + place])
                for ref in refs:
                    self._copy_page(ref, block, row, slot, store)
                    size_of_all += ref.page_size_bytes
            if size:
                taken += -(-(first + size) // self._per_chunk)
            at += size
        self._done.append(TransferResult(job_id, True, size_of_all, 0.001))
        return True

    def _copy_page(self, ref: Any, block: int, row: int, slot: int, store: bool) -> None:
        start = slot * self._pages[ref.tensor_idx]
        host = self._rows[ref.tensor_idx][row, start : start + ref.page_size_bytes]
        mine = self._blocks[ref.tensor_idx][block, : ref.page_size_bytes]
        (host if store else mine).copy_(mine if store else host)

    def get_finished(self) -> list[TransferResult]:
        """What has been copied since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Copies end before they are reported."""

    def shutdown(self) -> None:
        """Let go of the region."""
        self._rows.clear()
        self._region.cleanup()


class StockOnCpu(TieringOffloadingSpec):
    """vLLM's spec with a worker that runs here."""

    _worker: CpuWorker | None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker half."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker

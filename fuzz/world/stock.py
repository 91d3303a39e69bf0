# SPDX-License-Identifier: Apache-2.0
"""The stock flavour: vLLM's managers unchanged, and a worker that derives places as vLLM's does.

vLLM's own CPU worker needs a CUDA device, so its arithmetic (`transfer_async` of
`vllm/v1/kv_offload/cpu/gpu_worker.py`) is done again here: jobs of one direction end in order,
the blocks of a group fill the rows from the first block's place in its chunk on.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from fuzz.world import parts
from fuzz.world.checks import chunks_of
from fuzz.world.content import Numbers
from fuzz.world.device import NUMBER_BYTES, PAGE_BYTES
from fuzz.world.outcome import WrongWorld
from fuzz.world.plan import BLOCK_TOKENS
from fuzz.world.tier import HandTier


class Rows:
    """Host rows in plain memory: int64, shape (rows, blocks per chunk, tokens per block)."""

    def __init__(self, rows: int, per_chunk: int) -> None:
        self.numbers = np.zeros((rows, per_chunk, BLOCK_TOKENS), dtype=np.int64)
        self._bytes = self.numbers.reshape(rows, per_chunk * BLOCK_TOKENS).view(np.uint8)

    def create_kv_memoryview(self) -> memoryview:
        """All rows, uint8, shape (rows, bytes per row)."""
        return self._bytes.data

    def cleanup(self) -> None:
        """Plain memory goes by itself."""


@dataclass(slots=True)
class _Job:
    number: int
    places: list[tuple[int, int, int]]  # device block, row, slot
    keys: dict[int, bytes]  # of a store: key of each row


class FlatWorker(OffloadingWorker):
    """Copies between blocks and rows when the driver says so; never fails, as vLLM's."""

    def __init__(self, world: parts.Parts, rows: Rows, per_chunk: int) -> None:
        self._world = world
        self._rows = rows.numbers
        self._per_chunk = per_chunk
        self._queues: dict[bool, deque[_Job]] = {True: deque(), False: deque()}
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Device to rows."""
        self._submit(job_id, True, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Rows to device."""
        self._submit(job_id, False, dst_spec, src_spec)
        return True

    def _submit(self, job_id: int, store: bool, flat: Any, rows: Any) -> None:
        numbers = rows.block_ids.tolist()
        keys = self._world.store_keys.pop(job_id) if store else {}
        self._queues[store].append(_Job(job_id, self._places(flat, numbers), keys))

    def _places(self, flat: Any, rows: list[int]) -> list[tuple[int, int, int]]:
        places = []
        block_at = row_at = 0
        for size, first in zip(flat.group_sizes, flat.block_indices, strict=True):
            if size == 0:
                continue
            skip = first % self._per_chunk
            count = -(-(size + skip) // self._per_chunk)
            assert row_at + count <= len(rows), "vLLM: dst_end_offset <= num_dst_blocks"
            slots = [
                (row, slot) for row in rows[row_at:][:count] for slot in range(self._per_chunk)
            ]
            blocks = flat.block_ids[block_at : block_at + size].tolist()
            places += [
                (block, row, slot)
                for block, (row, slot) in zip(blocks, slots[skip : skip + size], strict=True)
            ]
            block_at, row_at = block_at + size, row_at + count
        assert row_at == len(rows), "vLLM: dst_offset == num_dst_blocks"
        return places

    @property
    def waiting(self) -> int:
        """Jobs that the driver may let run: the oldest of each direction."""
        return sum(bool(queue) for queue in self._queues.values())

    def run(self, index: int) -> None:
        """Run the oldest job of one direction."""
        ready = [store for store, queue in self._queues.items() if queue]
        self._run(ready[index])

    def _run(self, store: bool) -> None:
        job = self._queues[store].popleft()
        device = self._world.device.numbers
        # What a reset has overtaken writes what it will, and the row is written anew.
        stale = job.number < self._world.half._stale_job_threshold
        held = chunks_of(self._world.manager).items() if store else ()
        owners = {chunk.chunk_id: key for key, chunk in held}
        for block, row, slot in job.places:
            if store:
                if not stale and job.keys[row] == owners.get(row):
                    self._judge(job.keys[row], slot, device[block])
                self._rows[row, slot] = device[block]
            else:
                device[block] = self._rows[row, slot]
        self._done.append(TransferResult(job.number, True, len(job.places) * PAGE_BYTES, 0.001))
        if not store:
            self._world.watch.landed([block for block, _, _ in job.places])

    def _judge(self, key: bytes, slot: int, held: Numbers) -> None:
        """A block goes where its key and its place in the chunk say. Raises `WrongWorld`."""
        world = self._world
        demanded = world.keys.numbers(key, world.model.weights)
        if demanded is None:
            return
        parts_ = demanded.reshape(self._per_chunk, -1)
        if np.array_equal(parts_[slot], held):
            return
        shifted = any(np.array_equal(part, held) for part in parts_)
        group = world.setting.windows[int.from_bytes(key[-4:], "big")]
        what = "another slot of the chunk" if shifted else "another chunk or request"
        raise WrongWorld(
            "wrong-store", f"{'window' if group else 'full'} group: stored what belongs to {what}"
        )

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Run until these jobs have ended."""
        for store, queue in self._queues.items():
            while any(job.number in job_ids for job in queue):
                self._run(store)

    def shutdown(self) -> None:
        """Nothing to stop."""


class StockSpec(CPUOffloadingSpec):
    """vLLM's spec with the world's rows and the worker above; found by name by vLLM's factory."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.num_chunks = parts.current().setting.rows
        self.kv_bytes_per_chunk = self.blocks_per_chunk * BLOCK_TOKENS * NUMBER_BYTES

    def get_manager(self) -> OffloadingManager:
        """vLLM's manager for these tiers."""
        world = parts.current()
        setting, events = world.setting, self.kv_events_config.enable_kv_cache_events
        rows = Rows(setting.rows, setting.blocks_per_chunk)
        world.copies = FlatWorker(world, rows, setting.blocks_per_chunk)
        world.manager = self._manager_of(world, rows, events)
        made: OffloadingManager = world.manager
        return made

    def _manager_of(self, world: parts.Parts, rows: Rows, events: bool) -> OffloadingManager:
        setting = world.setting
        if not setting.tiers:
            return CPUOffloadingManager(
                setting.rows, cache_policy=setting.policy, enable_events=events
            )
        primary = CPUPrimaryTierOffloadingManager(
            setting.rows,
            rows,
            cache_policy=setting.policy,
            enable_events=events,
        )
        view = primary.get_kv_memoryview()
        world.tiers = [HandTier(view, world.counts, request_level=wish) for wish in setting.tiers]
        return TieringOffloadingManager(primary, list(world.tiers))

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker above."""
        return parts.current().copies

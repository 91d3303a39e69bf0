# SPDX-License-Identifier: Apache-2.0
"""The placer: gives every job of the scheduler half its exact slots and blocks.

It knows the requests' own block tables and key positions; what vLLM says about a job only
flatly is compared with them, and a job whose two descriptions disagree is withheld.
"""

from collections.abc import Mapping, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey

from kvsafe.engine.rows.placement import (
    FlatBlocks,
    chunk_blocks,
    disagreement,
    place_run,
    place_single_blocks,
    run_chunks,
)
from kvsafe.engine.rows.transfer import SealedRowsSpec, SlotBlocks
from kvsafe.seal.refusal import Refusal

Placed = list[tuple[int, SlotBlocks]]


class Placer:
    """Places jobs. Groups are named by their index in the configuration, as vLLM's lists are."""

    def __init__(
        self, config: SchedulerOffloadConfig, requests: Mapping[str, RequestOffloadState]
    ) -> None:
        self._config = config
        self._requests = requests
        self._group_index = {
            group.group_idx: index for index, group in enumerate(config.kv_group_configs)
        }
        self.hashed_groups = frozenset(
            index
            for index, group in enumerate(config.kv_group_configs)
            if isinstance(group.kv_cache_spec, AttentionSpec)
        )

    def place_load(self, job: TransferJob) -> None:
        """Fill in the blocks of a load, or withhold it."""
        spec = job.src_spec
        if not isinstance(spec, SealedRowsSpec) or not isinstance(job.dst_spec, GPULoadStoreSpec):
            return
        flat = _flat(job.dst_spec)
        spec.blocks = [blocks for _, blocks in place_run(flat, self._config.blocks_per_chunk)]
        if spec.withheld is None:
            spec.withheld = self._compare_chunks(job.req_id, spec, flat)
            spec.blamed = list(spec.keys) if spec.withheld is not None else []

    def place_store(self, job: TransferJob) -> None:
        """Fill in the blocks of a store, or withhold it."""
        spec = job.dst_spec
        if not isinstance(spec, SealedRowsSpec) or not isinstance(job.src_spec, GPULoadStoreSpec):
            return
        flat = _flat(job.src_spec)
        placed = self._place_by_keys(job.req_id, spec.keys)
        if placed is None:
            # State at a boundary that is no chunk of the request: one block for each key.
            placed = place_single_blocks(flat, self._config.blocks_per_chunk)
            spec.withheld = self._compare_groups(spec, placed)
        elif _flattened(placed) != list(flat.block_ids):
            spec.withheld = disagreement("blocks", _flattened(placed)[:8], list(flat.block_ids)[:8])
        spec.blocks = [blocks for _, blocks in placed]

    def find_chunk(self, req_id: str, key: OffloadKey) -> tuple[int, int] | None:
        """(index of the group, chunk in the request) of a key of this request."""
        status = self._requests.get(req_id)
        index = self._group_index.get(int.from_bytes(key[-4:], "big"))
        if status is None or index is None:
            return None
        end = status.req_context.get_offload_key_position(key)
        if end is None:
            return None
        chunk = end // self._config.kv_group_configs[index].tokens_per_chunk - 1
        keys = status.group_states[index].offload_keys
        if 0 <= chunk < len(keys) and keys[chunk] == key:
            return index, chunk
        return None

    def _place_by_keys(self, req_id: str, keys: Sequence[bytes]) -> Placed | None:
        """Placement from the request's own block table; None if a key is no chunk of it."""
        status = self._requests.get(req_id)
        if status is None:
            return None
        placed = []
        for key in keys:
            found = self.find_chunk(req_id, OffloadKey(key))
            if found is None or found[0] not in self.hashed_groups:
                return None
            index, chunk = found
            block_ids = status.group_states[index].block_ids
            placed.append((index, chunk_blocks(block_ids, chunk, self._config.blocks_per_chunk)))
        return placed

    def _compare_groups(self, spec: SealedRowsSpec, placed: Placed) -> Refusal | None:
        configs = self._config.kv_group_configs
        ours = [configs[group].group_idx for group, _ in placed]
        theirs = [int.from_bytes(key[-4:], "big") for key in spec.keys]
        return None if ours == theirs else disagreement("groups", theirs[:8], ours[:8])

    def _compare_chunks(
        self, req_id: str, spec: SealedRowsSpec, flat: FlatBlocks
    ) -> Refusal | None:
        """Each key must be of the group and at the place in the prompt that the run says."""
        configs = self._config.kv_group_configs
        run = run_chunks(flat, self._config.blocks_per_chunk)
        ours = [(configs[group].group_idx, chunk) for group, chunk in run]
        theirs = [self._claim(req_id, key) for key in spec.keys]
        return None if ours == theirs else disagreement("chunks", theirs[:8], ours[:8])

    def _claim(self, req_id: str, key: bytes) -> tuple[int, int]:
        """(group, chunk) that a key stands for in this request; -1 where it is not known."""
        group = int.from_bytes(key[-4:], "big")
        status, index = self._requests.get(req_id), self._group_index.get(group)
        if status is None or index is None:
            return group, -1
        end = status.req_context.get_offload_key_position(OffloadKey(key))
        # A partial tail ends inside its chunk.
        tokens = self._config.kv_group_configs[index].tokens_per_chunk
        return group, -1 if end is None else -(-end // tokens) - 1


def _flat(spec: GPULoadStoreSpec) -> FlatBlocks:
    return FlatBlocks(spec.block_ids.tolist(), spec.group_sizes, spec.block_indices)


def _flattened(placed: Placed) -> list[int]:
    return [block for _, blocks in placed for _, block in blocks]

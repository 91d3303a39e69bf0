# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: vLLM's, with exact placement, failure handling and adapter binding."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.kv_offload.base import (
    OffloadKey,
    ReqContext,
    make_offload_key,
)

from kvsafe.engine.adapters import (
    AdapterDigest,
    AdapterLedger,
    AdapterUnknown,
    bind_adapter,
)
from kvsafe.engine.journal import logger
from kvsafe.engine.manager import IssuedStore, KVSafeManager
from kvsafe.engine.placer import Placer
from kvsafe.engine.transfer import (
    ChunkFailure,
    KVSafeWorkerMetadata,
    SealedRowsSpec,
    SlotBlocks,
)
from kvsafe.seal.header import bitmap
from kvsafe.seal.refusal import Refusal, RefusalKind

_REST_S = 0.0005


@dataclass(slots=True)
class AdapterRequestState(RequestOffloadState):
    """A request that runs with an adapter: its keys are bound to the adapter's content."""

    adapter: bytes = b""
    answer: AdapterDigest | None = None
    offload_limit: int | None = None

    def update_offload_keys(self) -> None:
        """Extend the keys by the block hashes that have become known."""
        for group_config, group_state in zip(
            self.config.kv_group_configs, self.group_states, strict=True
        ):
            stride = group_config.hashes_per_chunk
            first = stride * (len(group_state.offload_keys) + 1) - 1
            for block_hash in islice(self.req.block_hashes, first, None, stride):
                bound = bind_adapter(block_hash, self.adapter)
                key = make_offload_key(bound, group_config.group_idx)
                group_state.offload_keys.append(key)
                end = len(group_state.offload_keys) * group_config.tokens_per_chunk
                self.req_context.set_offload_key_position(key, end)


class KVSafeConnectorScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler half of the connector over sealed rows."""

    manager: KVSafeManager
    _current_batch_jobs_to_flush: set[int]

    def __init__(
        self, spec: Any, vllm_config: Any, kv_cache_config: Any, adapters: AdapterLedger
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self.block_pool: Any = None
        self._adapters = adapters
        self._failed_loads: set[int] = set()
        self._placer = Placer(self.config, self._req_status)

    # Requests and adapters

    def on_new_request(self, request: Any) -> None:
        """Begin a request; with an adapter its keys are bound to the adapter's content."""
        super().on_new_request(request)
        if request.lora_request is not None:
            status = self._req_status[request.request_id]
            self._req_status[request.request_id] = self._bound_state(status, request)

    def _bound_state(self, status: RequestOffloadState, request: Any) -> AdapterRequestState:
        lora = request.lora_request
        answer = self._adapters.digest_for(
            lora.lora_name, lora.lora_int_id, lora.lora_path, lora.load_inplace
        )
        known = answer if isinstance(answer, AdapterDigest) else None
        bound = AdapterRequestState(
            config=status.config,
            req=status.req,
            req_context=status.req_context,
            offloading_context=status.offloading_context,
            # An adapter of unknown content: a key of its own that nothing can ever match.
            adapter=os.urandom(32) if known is None else known.digest,
            answer=known,
        )
        bound.offload_limit = bound.max_offload_tokens
        if isinstance(answer, AdapterUnknown):
            logger.warning(
                "kvsafe: adapter %s is served without offload: %s", lora.name, answer.reason
            )
            bound.max_load_tokens = 0
        if known is None or not known.storable:
            bound.max_offload_tokens = 0
        return bound

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """vLLM's answer.

        After an adapter was reloaded in place the accelerator's prefix cache may hold blocks of
        the old content under the same hashes. A request that takes nothing from it computes
        every block itself, and may store them; one that does may not.
        """
        status = self._req_status.get(request.request_id)
        if isinstance(status, AdapterRequestState) and status.answer is not None:
            fresh = status.answer.storable or num_computed_tokens == 0
            status.max_offload_tokens = status.offload_limit if fresh else 0
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens, max_num_new_tokens
        )
        return matched

    def _make_boundary_key(
        self, request: Any, group_idx: int, boundary_tokens: int, req_context: ReqContext
    ) -> OffloadKey:
        status = self._req_status.get(request.request_id)
        if not isinstance(status, AdapterRequestState):
            return super()._make_boundary_key(request, group_idx, boundary_tokens, req_context)
        index = boundary_tokens // self.config.tokens_per_hash - 1
        bound = bind_adapter(request.block_hashes[index], status.adapter)
        key = make_offload_key(bound, group_idx)
        req_context.set_offload_key_position(key, boundary_tokens)
        return key

    # Loads

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM's bookkeeping of a load, then the exact place of every block."""
        first = self._job_counter
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        for job_id in range(first, self._job_counter):
            job = self._current_batch_load_jobs.get(job_id)
            if job is not None:
                self._placer.place_load(job)

    # Stores

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """vLLM's metadata of this step, then the exact place of every block to be stored."""
        with self._reloading_requests_spared(scheduler_output):
            meta = super().build_connector_meta(scheduler_output)
        if isinstance(meta, OffloadingConnectorMetadata):
            for job in meta.store_jobs.values():
                self._placer.place_store(job)
                self._announce_store(job)
        if not scheduler_output.total_num_scheduled_tokens and self.manager.has_pending_work():
            # Nothing to compute in this step: leave the interpreter to proofs and tiers.
            time.sleep(_REST_S)
        return meta

    @contextlib.contextmanager
    def _reloading_requests_spared(self, scheduler_output: Any) -> Iterator[None]:
        """Keep vLLM from taking a request's new load for a store that has to be flushed.

        A request that a reset has preempted can be admitted again, and begin a load, in the
        very step that reports its preemption; it has no store left to flush by then. The
        workers still get to see the preemption.
        """
        preempted = scheduler_output.preempted_req_ids
        loading = {self._jobs[job_id].req_id for job_id in self._current_batch_load_jobs}
        if preempted and loading:
            scheduler_output.preempted_req_ids = set(preempted) - loading
        try:
            yield
        finally:
            scheduler_output.preempted_req_ids = preempted

    def _announce_store(self, job: TransferJob) -> None:
        """Tell the manager what a placed store will write, or that it is withheld."""
        spec = job.dst_spec
        if not isinstance(spec, SealedRowsSpec):
            return
        if spec.withheld is None:
            self._issue(job.req_id, spec)
            return
        for key in spec.keys:
            self.manager.issue_store(OffloadKey(key), spec.withheld)

    def _issue(self, req_id: str, spec: SealedRowsSpec) -> None:
        """Tell the manager what will be written; leave out rows whose source is not right."""
        slots = self.config.blocks_per_chunk
        keep: list[int] = []
        blocks = spec.blocks or []
        for index, (key, generation) in enumerate(zip(spec.keys, spec.generations, strict=True)):
            wrong = self._wrong_source(req_id, OffloadKey(key), blocks[index])
            if wrong is not None:
                self.manager.issue_store(OffloadKey(key), wrong)
                continue
            keep.append(index)
            coverage = bitmap(slots, [slot for slot, _ in blocks[index]])
            self.manager.issue_store(OffloadKey(key), IssuedStore(generation, spec.epoch, coverage))
        if len(keep) < len(spec.keys):
            spec.keep_only(keep)

    def _wrong_source(self, req_id: str, key: OffloadKey, blocks: SlotBlocks) -> Refusal | None:
        """Where the block pool knows what a block holds, it must be what the key says."""
        pool, status = self.block_pool, self._req_status.get(req_id)
        if isinstance(status, AdapterRequestState) and not self._adapter_is_current(status):
            return Refusal.of(
                RefusalKind.SOURCE_HASH, "adapter", "the content of the key", "reloaded since"
            )
        if pool is None or status is None:
            return None
        found = self._placer.find_chunk(req_id, key)
        if found is None or found[0] not in self._placer.hashed_groups:
            return None
        index, chunk = found
        config = self.config.kv_group_configs[index]
        per_block = config.tokens_per_block // self.config.tokens_per_hash
        for slot, block in blocks:
            at = (chunk * self.config.blocks_per_chunk + slot + 1) * per_block - 1
            refusal = _compare_source(pool, block, status.req.block_hashes, at)
            if refusal is not None:
                return refusal
        return None

    def _adapter_is_current(self, status: AdapterRequestState) -> bool:
        return status.answer is not None and self._adapters.is_current(status.answer)

    # Completions

    def update_connector_output(self, connector_output: Any) -> None:
        """Completions of this step: vLLM's bookkeeping, and what failed or was proven."""
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, KVSafeWorkerMetadata):
            super().update_connector_output(connector_output)
            return
        self._failed_loads.update(item.job for item in meta.failures if item.load)
        self._rewind_requests(meta.failures)
        loads = {
            job_id: len(status.keys)
            for job_id in meta.completed_jobs
            if (status := self._jobs.get(job_id)) is not None and not status.is_store
        }
        super().update_connector_output(connector_output)
        self._count_served(loads)
        self.manager.fail_chunks(meta.failures)
        self.manager.counters.worker_proofs(meta.counts)

    def _rewind_requests(self, failures: Iterable[ChunkFailure]) -> None:
        """Let the prefix that is about to be recomputed be offered for storing again."""
        for failure in failures:
            job = self._jobs.get(failure.job)
            status = None if job is None else self._req_status.get(job.req_id)
            if failure.load and status is not None:
                for state in status.group_states:
                    state.next_stored_chunk_idx = 0

    def _count_served(self, loads: dict[int, int]) -> None:
        for job_id, chunks in loads.items():
            if job_id in self._jobs:
                continue
            if job_id in self._failed_loads:
                self._failed_loads.discard(job_id)
            else:
                self.manager.counters.served(chunks)

    # Reset

    def reset_cache(self) -> None:
        """Forget everything; may be called again before the next step."""
        flush, self._current_batch_jobs_to_flush = self._current_batch_jobs_to_flush, set()
        super().reset_cache()
        self._current_batch_jobs_to_flush |= flush
        if self.block_pool is not None and not _holds_cached_blocks(self.block_pool):
            self._adapters.prefix_cache_reset()
        self._failed_loads.clear()


def _holds_cached_blocks(pool: Any) -> bool:
    return any(block.block_hash is not None for block in pool.blocks)


def _compare_source(
    pool: Any, block: int, block_hashes: Sequence[bytes], at: int
) -> Refusal | None:
    held = pool.blocks[block]
    known = held.block_hash
    if known is None or at >= len(block_hashes):
        return None
    expected = block_hashes[at]
    if known[:-4] == expected:
        return None
    others = pool.cached_block_hashes_by_block.get(block, ())
    if any(other[:-4] == expected for other in others):
        return None
    return Refusal.of(
        RefusalKind.SOURCE_HASH, f"block[{block}]", "the block of the key", "another block"
    )

# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: vLLM's, with exact placement, failure handling and adapter binding."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
    TransferJobStatus,
)
from vllm.v1.kv_offload.base import (
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    make_offload_key,
)

from kvsafe.engine.counters import PUT_OFF
from kvsafe.engine.identity.adapters import AdapterLedger, bind_adapter
from kvsafe.engine.manager import IssuedStore, KVSafeManager
from kvsafe.engine.requests.adapted import (
    AdapterRequestState,
    bound_state,
    limit_stores,
    reloaded_since,
)
from kvsafe.engine.requests.failing import failing_load, failing_tokens
from kvsafe.engine.requests.prompts import attach_prompt
from kvsafe.engine.requests.source import SourceCheck
from kvsafe.engine.requests.turns import turns_for
from kvsafe.engine.requests.verdicts import Verdicts
from kvsafe.engine.requests.windows import give_up_stored_blocks, wanted_slots, windowed_groups
from kvsafe.engine.rows.placer import Placer
from kvsafe.engine.rows.retired import TransferRows
from kvsafe.engine.rows.transfer import (
    ChunkFailure,
    KVSafeWorkerMetadata,
    SealedRowsSpec,
    SlotBlocks,
)
from kvsafe.seal.header import bitmap
from kvsafe.seal.refusal import Refusal

_REST_S = 0.0005
_MATCH_TRIES = 4


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
        self._windowed = windowed_groups(self.config)
        self._source = SourceCheck(self.config, self._req_status, self._placer, self._windowed)
        self._turns = turns_for(self.config, vllm_config, kv_cache_config, self._note_put_off)
        found = getattr(spec, "verdicts", None)
        # Only a spec of ours knows the policy.
        self._verdicts = found if isinstance(found, Verdicts) else Verdicts(active=False)
        self._transfer_rows = TransferRows(self.config.num_workers)
        self._reset_events: list[Any] = []

    # Requests and adapters

    def on_new_request(self, request: Any) -> None:
        """Begin a request; with an adapter its keys are bound to the adapter's content."""
        super().on_new_request(request)
        attach_prompt(self._req_status[request.request_id].req_context, request)
        if request.lora_request is not None:
            status = self._req_status[request.request_id]
            self._req_status[request.request_id] = self._bound_state(status, request)

    def _bound_state(self, status: RequestOffloadState, request: Any) -> AdapterRequestState:
        return bound_state(status, request, self._adapters)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """vLLM's answer, or "later"; a request that met a refused chunk gets a load that fails."""
        limit_stores(self._req_status.get(request.request_id), num_computed_tokens)
        req_id = request.request_id
        found: tuple[int | None, bool] = None, False
        if not self._verdicts.is_condemned(req_id):
            found = self._offer(request, num_computed_tokens, max_num_new_tokens)
        if self._verdicts.is_condemned(req_id):
            return self._offer_failure(request, num_computed_tokens)
        return found

    def _offer(self, request: Any, local: int, limit: int | None) -> tuple[int | None, bool]:
        """What there is to load, or "later" while others that have loaded need the room."""
        req_id, waits = request.request_id, self.manager.waits
        if self._turns and self._stands_back(request):
            return None, False
        waits.begin(req_id)
        found = self._covered_match(request, local, limit)
        condemned = self._verdicts.is_condemned(req_id)
        if found[0] and not condemned and not self._turns.fits(request, local + found[0]):
            found = self._put_off(request, local)
        waits.end(req_id, offered=bool(found[0]))
        if self._verdicts.active:
            self._verdicts.waits_only(req_id, waits.told(req_id))
        return found

    def _offer_failure(self, request: Any, local: int) -> tuple[int | None, bool]:
        """A load that will fail, for a request that met a refused chunk and is to fail with it."""
        self.manager.waits.forget(request.request_id)
        nothing, _ = super().get_num_new_matched_tokens(request, local, 0)
        if nothing is None:
            # Transfers of its own are under way.
            return None, False
        return failing_tokens(request.num_tokens, local, self.config), True

    def _covered_match(
        self, request: Any, local: int, limit: int | None
    ) -> tuple[int | None, bool]:
        """vLLM's match, shortened until every chunk of it holds the blocks that will be read."""
        for _ in range(_MATCH_TRIES):
            matched, later = super().get_num_new_matched_tokens(request, local, limit)
            if not matched or self._is_covered(request.request_id, local, local + matched):
                return matched, later
            limit = matched - 1
        nothing: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, local, 0)
        return nothing

    def _stands_back(self, request: Any) -> bool:
        if request.request_id not in self._turns:
            return False
        waits = self.manager.waits
        waits.failed.setdefault(request.request_id, 0)  # A reset may have forgotten it.
        free = 0 if self.block_pool is None else self.block_pool.get_num_free_blocks()
        return self._turns.stands_back(request, free) and not waits.tires(request.request_id)

    def _put_off(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Later, until others that have loaded run; after a while the request is computed."""
        if not self.manager.waits.tires(request.request_id):
            return None, False
        nothing: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, local, 0)
        return nothing

    def _note_put_off(self, reason: str) -> None:
        self.manager.counters.add(PUT_OFF, 1, (reason,))

    def _is_covered(self, req_id: str, local: int, total: int) -> bool:
        status, per_chunk = self._req_status[req_id], self.config.blocks_per_chunk
        if per_chunk == 1:
            return True
        covers = self.manager.primary_tier.covers
        for index in self._windowed:
            keys = status.group_states[index].offload_keys
            group = self.config.kv_group_configs[index]
            for chunk, slots in wanted_slots(group, per_chunk, local, total):
                if not covers(keys[chunk], slots):
                    return False
        return True

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
        refusal = self._verdicts.take(request.request_id) if num_external_tokens else None
        if refusal is not None:
            self._begin_failure(request, blocks, refusal)
            return
        first = self._job_counter
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._note_admitted(request, num_external_tokens)
        for job_id in range(first, self._job_counter):
            job = self._current_batch_load_jobs.get(job_id)
            if job is not None:
                self._placer.place_load(job)
                self._note_rows(job_id, job.src_spec)

    def _begin_failure(self, request: Any, blocks: Any, refusal: Refusal) -> None:
        """In place of vLLM's bookkeeping of a load: one that brings nothing and fails."""
        req_id = request.request_id
        status, job_id = self._req_status[req_id], self._generate_job_id()
        status.load_key_ranges.clear()
        status.transfer_jobs.add(job_id)
        given = {block.block_id for group in blocks.blocks for block in group}
        self._current_batch_allocated_block_ids |= given - {0}
        self._current_batch_load_jobs[job_id] = failing_load(req_id, refusal, self.config)
        workers = self.config.num_workers
        self._jobs[job_id] = TransferJobStatus(req_id, workers, keys=set(), is_store=False)
        self._verdicts.release(req_id)

    def _note_admitted(self, request: Any, loaded: int) -> None:
        req_id = request.request_id
        self._verdicts.release(req_id)
        if loaded:
            self.manager.waits.loads(req_id)
        else:
            self.manager.waits.forget(req_id)
        local = self._req_status[req_id].num_locally_computed_tokens
        self._turns.admit(request, local, loaded)

    def _note_rows(self, job_id: int, spec: Any) -> None:
        if isinstance(spec, SealedRowsSpec):
            self._transfer_rows.begin(job_id, map(int, spec.block_ids))

    # Stores

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """vLLM's metadata of this step, then the exact place of every block to be stored."""
        self._forget_preempted_blocks(scheduler_output.preempted_req_ids or ())
        ended = scheduler_output.finished_req_ids or ()
        if self._turns:
            self._turns.pass_on(scheduler_output.num_scheduled_tokens)
        self._turns.forget(ended)
        self._source.note_offers([*scheduler_output.num_scheduled_tokens, *ended])
        with self._reloading_requests_spared(scheduler_output):
            meta = super().build_connector_meta(scheduler_output)
        if isinstance(meta, OffloadingConnectorMetadata):
            for job_id, job in meta.store_jobs.items():
                self._note_rows(job_id, job.dst_spec)
                self._placer.place_store(job)
                self._announce_store(job)
        if not scheduler_output.total_num_scheduled_tokens and self.manager.has_pending_work():
            # Nothing to compute in this step: leave the interpreter to proofs and tiers.
            time.sleep(_REST_S)
        return meta

    def _forget_preempted_blocks(self, preempted: Iterable[str]) -> None:
        """A preempted request has no blocks any more, and may end before it gets new ones.

        Its last token can still be on its way: then vLLM stores what its old blocks hold by then.
        """
        for req_id in preempted:
            status = self._req_status.get(req_id)
            for state in status.group_states if status is not None else ():
                state.block_ids.clear()

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
        reloaded = reloaded_since(self._req_status.get(req_id), self._adapters)
        return reloaded or self._source.judge(self.block_pool, req_id, key, blocks)

    # Completions

    def update_connector_output(self, connector_output: Any) -> None:
        """Completions of this step: vLLM's bookkeeping, and what failed or was proven."""
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, KVSafeWorkerMetadata):
            super().update_connector_output(connector_output)
            return
        self._transfer_rows.report(meta.completed_jobs, self.manager.primary_tier)
        failed = {item.job for item in meta.failures if item.load}
        self._failed_loads |= failed.intersection(self._jobs)
        self._rewind_requests(meta.failures)
        self.manager.note_failed_stores(item for item in meta.failures if item.job in self._jobs)
        loads = {
            job_id: len(status.keys)
            for job_id in meta.completed_jobs
            if (status := self._jobs.get(job_id)) is not None and not status.is_store
        }
        super().update_connector_output(connector_output)
        self._count_served(loads)
        self.manager.fail_chunks(meta.failures)
        for item in meta.failures:
            if item.load:
                self._verdicts.doubt(item.key, item.refusal)
        self.manager.counters.worker_proofs(meta.counts)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping; also until overtaken transfers were reported."""
        return self._transfer_rows.owed or bool(super().has_pending_push_work())

    def _rewind_requests(self, failures: Iterable[ChunkFailure]) -> None:
        """Let the prefix that is about to be recomputed be offered for storing again."""
        for failure in failures:
            job = self._jobs.get(failure.job)
            status = None if job is None else self._req_status.get(job.req_id)
            if failure.load and status is not None:
                give_up_stored_blocks(status, self._windowed)
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
        self._transfer_rows.retire(self.manager.primary_tier)
        for status in self._req_status.values():
            give_up_stored_blocks(status, self._windowed)
        self._take_back_announcements()
        super().reset_cache()
        self._current_batch_jobs_to_flush |= flush
        if self.block_pool is not None and not _holds_cached_blocks(self.block_pool):
            self._adapters.prefix_cache_reset()
        self._failed_loads.clear()

    def _take_back_announcements(self) -> None:
        """Tell listeners what a reset is about to drop, while it is known what was announced."""
        primary = self.manager.primary_tier
        if primary.events is None:
            return
        self._reset_events += super().take_events()
        gone = primary.written()
        if gone:
            event = OffloadingEvent(keys=gone, medium=primary.medium, removed=True)
            self._reset_events += self._events_tracker.take_events([event])

    def take_events(self) -> Iterable[Any]:
        """What a reset took back, then vLLM's events."""
        events, self._reset_events = self._reset_events, []
        yield from events
        yield from super().take_events()


def _holds_cached_blocks(pool: Any) -> bool:
    return any(block.block_hash is not None for block in pool.blocks)

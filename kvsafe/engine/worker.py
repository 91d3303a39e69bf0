# SPDX-License-Identifier: Apache-2.0
"""The worker half: vLLM's connector worker, with failures as reports instead of assertions."""

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvsafe.device import Copier, CopyOutcome, CopyPlan, Direction, PlanFault
from kvsafe.engine.journal import logger
from kvsafe.engine.rows.proof import RowProof, SealedRowPlan
from kvsafe.engine.rows.transfer import (
    ChunkFailure,
    KVSafeWorkerMetadata,
    ProofCounts,
    SealedRowsSpec,
)
from kvsafe.seal.refusal import Refusal, RefusalKind

_REST_S = 0.001


class KVSafeWorker(OffloadingWorker):
    """Moves chunks between accelerator blocks and sealed rows through the checked copier."""

    def __init__(
        self,
        copier: Copier,
        proof: RowProof | None,
        group_index: dict[int, int],
        deadline_s: float,
    ) -> None:
        self._copier = copier
        self._proof = proof
        self._group_index = group_index
        self._deadline_s = deadline_s
        self._keys: dict[int, dict[int, bytes]] = {}
        self._failed_early: list[TransferResult] = []
        self._failures: list[ChunkFailure] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Accelerator blocks to rows. A spec that cannot be used fails the job, not the engine."""
        self._submit(job_id, Direction.STORE, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Rows to accelerator blocks, each row proven before its first byte moves."""
        self._submit(job_id, Direction.LOAD, src_spec)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call."""
        results, self._failed_early = self._failed_early, []
        results.extend(self._result(outcome) for outcome in self._copier.poll())
        return results

    def rest(self) -> None:
        """Give the copier's threads the interpreter for a moment, or until they are done.

        An engine that has nothing to compute polls in a loop; with worker and scheduler in one
        process that loop and the copier would fight for the interpreter lock, and every small
        step of a copy would wait for a whole switch interval.
        """
        if self._keys:
            self._copier.wait(set(self._keys), _REST_S)

    def take_failures(self) -> list[ChunkFailure]:
        """Chunks that failed since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def take_counts(self) -> ProofCounts:
        """What was proven since the last call."""
        return self._proof.take_counts() if self._proof is not None else ProofCounts()

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs no longer touch any block. Raises `TimeoutError`.

        The caller is about to reuse the blocks; going on with a copy still running would
        store or load another request's KV, so this is the one place that must not give up
        silently.
        """
        if not self._copier.wait(job_ids, self._deadline_s):
            raise TimeoutError(
                f"transfers {sorted(job_ids)[:8]} still ran after {self._deadline_s:.0f} s"
            )

    def shutdown(self) -> None:
        """Stop the copier."""
        self._copier.shutdown()

    def _submit(self, job: int, direction: Direction, spec: LoadStoreSpec) -> None:
        load = direction is Direction.LOAD
        if not isinstance(spec, SealedRowsSpec) or spec.blocks is None:
            refusal = Refusal.of(RefusalKind.COPY_PLAN, "spec", "rows with blocks", type(spec))
            self._fail_early(job, load, (b"",), refusal)
            return
        if spec.withheld is not None:
            # The scheduler side knows about a withheld store already.
            self._fail_early(job, load, spec.blamed if load else (), spec.withheld)
            return
        rows = self._row_plans(spec)
        if not rows:
            self._failed_early.append(TransferResult(job, True, 0, 0.0))
            return
        self._keys[job] = {row.row: row.key for row in rows}
        self._copier.submit(CopyPlan(job, direction, rows))

    def _row_plans(self, spec: SealedRowsSpec) -> tuple[SealedRowPlan, ...]:
        plans = zip(
            spec.block_ids.tolist(), spec.keys, spec.generations, spec.blocks or (), strict=True
        )
        return tuple(
            SealedRowPlan(
                row=row,
                group=self._group_index.get(int.from_bytes(key[-4:], "big"), -1),
                blocks=blocks,
                key=key,
                generation=generation,
                epoch=spec.epoch,
            )
            for row, key, generation, blocks in plans
        )

    def _fail_early(self, job: int, load: bool, keys: Iterable[bytes], refusal: Refusal) -> None:
        self._failures.extend(ChunkFailure(job, load, key, refusal) for key in keys)
        self._failed_early.append(TransferResult(job, False))

    def _result(self, outcome: CopyOutcome) -> TransferResult:
        keys = self._keys.pop(outcome.job, {})
        load = outcome.direction is Direction.LOAD
        for row, value in outcome.failures:
            key = keys.get(row.row, b"")
            self._failures.append(ChunkFailure(outcome.job, load, key, as_refusal(value)))
        return TransferResult(outcome.job, outcome.ok, outcome.bytes, outcome.seconds)


def as_refusal(value: object) -> Refusal:
    """A failure of the copier as a refusal."""
    if isinstance(value, Refusal):
        return value
    if isinstance(value, PlanFault):
        return Refusal.of(RefusalKind.COPY_PLAN, value.field, value.expected, value.found)
    return Refusal.of(RefusalKind.COPY_FAULT, "copy", "done", value)


class KVSafeConnectorWorker(OffloadingConnectorWorker):
    """vLLM's worker half of the connector; a failed job is a report, never an assertion."""

    worker: KVSafeWorker | None

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._connector_worker_meta: OffloadingWorkerMetadata = KVSafeWorkerMetadata()
        self._failed_requests: set[str] = set()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, well or badly (`take_failed_requests` tells)."""
        received: set[str] = set()
        if self.worker is None:
            return set(), received
        for result in self.worker.get_finished():
            self._record(result)
            self._connector_worker_meta.mark_completed(result.job_id)
            request = self._load_jobs.pop(result.job_id, None)
            if request is None:
                continue
            received.add(request)
            if not result.success:
                self._failed_requests.add(request)
        self._collect()
        return set(), received

    def take_failed_requests(self) -> set[str]:
        """Requests of which a load failed since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """vLLM's report, with failures and counts, or None when there is nothing to say."""
        meta = self._connector_worker_meta
        if not isinstance(meta, KVSafeWorkerMetadata):
            return super().build_connector_worker_meta()
        if not (meta.completed_jobs or meta.failures or meta.counts.opened):
            return None
        self._connector_worker_meta = KVSafeWorkerMetadata()
        return meta

    def shutdown(self) -> None:
        """Stop; failures that nobody will read any more are logged."""
        super().shutdown()
        self._connector_worker_meta = KVSafeWorkerMetadata()
        if self._failed_requests:
            logger.warning("kvsafe: %d failed loads at shutdown", len(self._failed_requests))

    def _record(self, result: TransferResult) -> None:
        if result.transfer_time is None or result.transfer_size is None:
            return
        stats = self._connector_worker_meta.transfer_stats
        kind = stats.load if result.job_id in self._load_jobs else stats.store
        kind.record(result.transfer_size, result.transfer_time)

    def _collect(self) -> None:
        meta = self._connector_worker_meta
        if self.worker is None or not isinstance(meta, KVSafeWorkerMetadata):
            return
        meta.failures.extend(self.worker.take_failures())
        meta.counts.add(self.worker.take_counts())

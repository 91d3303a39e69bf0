# SPDX-License-Identifier: Apache-2.0
"""The scheduler-side manager: vLLM's tiering manager, with sealing before readiness.

A store becomes ready only when its header is closed over the records of all writers; a
chunk that a worker refused is withdrawn; a reset raises the epoch before anything else.
"""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from kvsafe.engine.counters import SEALED, STORES_FAILED, Counters
from kvsafe.engine.journal import RefusalJournal
from kvsafe.engine.requests.parking import Parking
from kvsafe.engine.requests.verdicts import Verdicts
from kvsafe.engine.requests.waits import Claims, Waits
from kvsafe.engine.rows.epochs import EpochKeeper
from kvsafe.engine.rows.loads import OpenLoads
from kvsafe.engine.rows.primary import SealedPrimaryTier
from kvsafe.engine.rows.sealwork import SealedBatch, SealWork
from kvsafe.engine.rows.transfer import ChunkFailure, SealedRowsSpec
from kvsafe.engine.station import Station
from kvsafe.engine.tiers.rest import Rest
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.sealing import HeaderSealer

HOST_TIER = "0:primary"


class IssuedStore(NamedTuple):
    """A store job under way for one chunk: its allocation, its epoch, what it will cover."""

    generation: int
    epoch: int
    coverage: bytes


class KVSafeManager(TieringOffloadingManager):
    """vLLM's `TieringOffloadingManager` over sealed rows."""

    primary_tier: SealedPrimaryTier

    def __init__(
        self,
        primary_tier: SealedPrimaryTier,
        secondary_tiers: list[SecondaryTierManager],
        station: Station,
        epochs: EpochKeeper,
        counters: Counters,
        journal: RefusalJournal,
        verdicts: Verdicts,
        threads: ThreadPoolExecutor,
    ) -> None:
        super().__init__(primary_tier=primary_tier, secondary_tiers=secondary_tiers)
        self.counters = counters
        self._station = station
        self._epochs = epochs
        self._journal = journal
        self._verdicts = verdicts
        self._threads = threads
        self._seals = SealWork(threads)
        self._issued: dict[OffloadKey, IssuedStore | Refusal] = {}
        # Of these, stores whose refusal a worker has reported (and `fail_chunks` has counted).
        self._told: set[OffloadKey] = set()
        self.waits = Waits(station.config.load_deadline_s)
        self._loads = OpenLoads(station.config.load_deadline_s)
        self._rest = Rest(station.config.store_deadline_s)
        self._claims = Claims()
        self._parking = Parking(primary_tier.generation_of)
        # Now, not at the first store: documents that do not fit a header must stop the start.
        self._sealer: HeaderSealer = station.header_sealer()

    def lookup(
        self,
        key: OffloadKey,
        req_context: ReqContext,
        *,
        exclude_tier_idx: int | None = None,
    ) -> LookupResult:
        """vLLM's answer, but every wait ends: over its deadline, or begun twice, it is a miss."""
        if not self._epochs.certain or self.primary_tier.stopped:
            return LookupResult.MISS
        if self.waits.failed and self.waits.is_barred(req_context.req_id):
            return LookupResult.MISS
        result = self._look(key, req_context, exclude_tier_idx)
        if result is LookupResult.HIT:
            self._await(key, req_context)
        elif result is LookupResult.HIT_PENDING:
            limit = self._station.config.load_deadline_s
            if self.primary_tier.pending_for(key) > limit:
                self._note_overdue(key, limit)
                return LookupResult.MISS
            self._await(key, req_context)
            self._verdicts.waits(req_context.req_id, key)
        elif result is LookupResult.RETRY:
            self.waits.asks_again(req_context.req_id, key)
            self._verdicts.waits(req_context.req_id, key)
        elif result is LookupResult.MISS and self._verdicts.has_to_fail(req_context.req_id, key):
            return LookupResult.HIT
        return result

    def _look(
        self, key: OffloadKey, req_context: ReqContext, exclude_tier_idx: int | None
    ) -> LookupResult:
        request = req_context.req_id
        hidden = self.primary_tier.hides(key) and self._stays_hidden(key)
        if hidden or self.waits.is_spent(request, key):
            # Withdrawn and still read: nothing can be fetched beside it. Or promoted for this
            # request before: if it is gone again, it is not fetched again.
            self._maybe_process_finished_jobs()
            return self.primary_tier.lookup(key, req_context)
        result = super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx)
        if result is LookupResult.RETRY and self.waits.tires(request):
            return LookupResult.MISS
        return result

    def _stays_hidden(self, key: OffloadKey) -> bool:
        # The poll may end its last reader.
        self._maybe_process_finished_jobs()
        return self.primary_tier.hides(key)

    def _cascade_existing_chunks_to_request_level_tiers(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        request_level_tiers: set[int],
    ) -> None:
        request = req_context.req_id
        # A key that is offered twice while its write is in flight would be sent twice in one job.
        parked = self._req_state[request].pending_cascade_keys
        super()._cascade_existing_chunks_to_request_level_tiers(
            [key for key in dict.fromkeys(keys) if key not in parked],
            req_context,
            request_level_tiers,
        )
        self._parking.park(request, self._req_state[request].pending_cascade_keys)

    def _flush_pending_cascades(self) -> None:
        """vLLM's flush, of keys whose write is still the one that they were parked for."""
        for request, state in list(self._req_state.items()):
            if state.pending_cascade_keys:
                held = self._parking.waiting(request, state.pending_cascade_keys)
                state.pending_cascade_keys = held
                if not held:
                    self._maybe_finalize_request(request)
        super()._flush_pending_cascades()
        self._parking.keep(
            (request, key)
            for request, state in self._req_state.items()
            for key in state.pending_cascade_keys
        )

    def _await(self, key: OffloadKey, req_context: ReqContext) -> None:
        self.waits.tell(req_context.req_id, key)
        self.primary_tier.shield.cover(key)

    def _initiate_promotion(self, tier_idx: int, key: OffloadKey, req_context: ReqContext) -> bool:
        """vLLM's promotion, into a row that nobody awaits and no store has a claim to."""
        if self._claims or self.primary_tier.row_of(key) is not None:
            return False
        self.primary_tier.shield.lift(self.waits.awaited)
        begun = bool(super()._initiate_promotion(tier_idx, key, req_context))
        if begun:
            self.waits.start_promotion(req_context.req_id, key)
        return begun

    def _note_overdue(self, key: OffloadKey, limit: float) -> None:
        if self.primary_tier.note_overdue(key):
            self._tell_late("write", key, limit)

    def _tell_late(self, what: str, key: bytes, limit: float) -> None:
        refusal = Refusal.of(
            RefusalKind.DEADLINE, what, f"done within {limit:g} s", "still pending"
        )
        self.counters.refused(refusal, HOST_TIER)
        self._journal.note(refusal, key, HOST_TIER)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """vLLM's answer; nothing is stored while the epoch is not certain."""
        if not self._epochs.certain or self.primary_tier.stopped:
            return None
        output = super().prepare_store(keys, req_context)
        if output is not None:
            self._claims.drop(req_context.req_id)
        elif len(keys) <= self.primary_tier.num_rows:
            self._claims.make(req_context.req_id)
        return output

    def issue_store(self, key: OffloadKey, issued: "IssuedStore | Refusal") -> None:
        """Note what the store job that was just built will write, or why it will not."""
        self._issued[key] = issued

    def note_failed_stores(self, failures: Iterable[ChunkFailure]) -> None:
        """Stores that a worker did not finish: not sealed, and not counted a second time."""
        for failure in failures:
            key = OffloadKey(failure.key)
            if not failure.load and key in self._issued:
                self._issued[key] = failure.refusal
                self._told.add(key)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin rows for a load; a chunk that is gone since its lookup fails the load.

        vLLM asserts here. Nothing pins a chunk between `lookup` and `prepare_load`, and a
        lookup of another group of the same request may promote into its row.
        """
        self._loads.begin(req_context.req_id, keys)
        present = self.primary_tier.ready(keys)
        if len(present) == len(keys):
            return super().prepare_load(keys, req_context)
        lost = [key for key in keys if key not in present]
        self._loads.lose(req_context.req_id, lost)
        spec = super().prepare_load(present, req_context)
        if isinstance(spec, SealedRowsSpec):
            self._withhold(spec, lost, req_context)
        return spec

    def _withhold(
        self, spec: SealedRowsSpec, lost: list[OffloadKey], req_context: ReqContext
    ) -> None:
        condemned = self._verdicts.take(req_context.req_id)
        if condemned is not None:
            # Counted and logged where it was refused.
            spec.withheld = condemned
            return
        spec.withheld = Refusal.of(
            RefusalKind.TIER_READ, "chunk", "as at its lookup", "evicted before its load"
        )
        spec.blamed = [bytes(key) for key in lost]

    def on_request_finished(
        self, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> None:
        """vLLM's end of a request."""
        self._verdicts.forget(req_context.req_id)
        self.waits.forget(req_context.req_id)
        self._claims.drop(req_context.req_id)
        self._loads.leave(req_context.req_id)
        super().on_request_finished(req_context, exclude_tier_idx=exclude_tier_idx)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin what `prepare_load` pinned."""
        super().complete_load(self._loads.end(req_context.req_id, keys), req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """vLLM's end of step, and a look whether another process has raised the epoch."""
        self._epochs.poll()
        for keys in self._loads.overdue():
            self._tell_late("load", b"", self._station.config.load_deadline_s)
            self.primary_tier.withdraw(keys)
        super().on_schedule_end(context)
        self.primary_tier.shield.lower()
        self._claims.end_step()
        self.primary_tier.end_step()

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Hand what all workers have written over to be sealed; it becomes ready after that."""
        if success:
            self._seals.submit(keys, req_context, self._seal_one)
        else:
            self._finish_store((), keys, req_context)

    def _seal_one(self, key: OffloadKey) -> Refusal | None:
        # In a proof thread. The row cannot be given away meanwhile: it is not ready, and a
        # reset waits for the batch.
        issued = self._issued.get(key)
        row = self.primary_tier.row_of(key)
        region = self._station.region
        if issued is None or row is None or region is None:
            return Refusal.of(RefusalKind.FENCE, "row", "the row of this store", "none")
        if isinstance(issued, Refusal):
            return issued
        present = region.ledger.generation(row)
        if present != issued.generation:
            return Refusal.of(RefusalKind.FENCE, "generation", present, issued.generation)
        return self._sealer.seal(
            region.row(row), key, issued.epoch, issued.generation, issued.coverage
        )

    def _collect_seals(self, batches: Iterable[SealedBatch]) -> None:
        """Make ready what was sealed and drop what was not."""
        for batch in batches:
            failed = {**self._overtaken(batch.keys), **batch.refusals}
            for key, refusal in failed.items():
                if key in self._told:
                    self._told.discard(key)
                    continue
                self.counters.refused(refusal, HOST_TIER)
                self._journal.note(refusal, key, HOST_TIER)
            sealed = [key for key in batch.keys if key not in failed]
            self.primary_tier.note_proven(sealed)
            self._finish_store(sealed, failed, batch.req_context)

    def _overtaken(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, Refusal]:
        """Stores whose epoch passed before they were ready: sealed, but never to be served."""
        present = self._epochs.epoch if self._epochs.certain else -1
        found = {}
        for key in keys:
            issued = self._issued.pop(key, None)
            if isinstance(issued, IssuedStore) and issued.epoch != present:
                found[key] = Refusal.of(RefusalKind.FENCE, "epoch", present, issued.epoch)
        return found

    def _finish_store(
        self,
        sealed: Collection[OffloadKey],
        failed: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        for key in failed:
            self._issued.pop(key, None)
            self._told.discard(key)
        if failed:
            self.counters.add(STORES_FAILED, len(failed))
        if not sealed:
            super().complete_store(failed, req_context, success=False)
            return
        if failed:
            # One call per store to super(): it counts calls. The rest goes to the tier itself.
            self.primary_tier.complete_store(failed, req_context, success=False)
        self.counters.add(SEALED, len(sealed))
        super().complete_store(sealed, req_context, success=True)
        self.counters.stored(len(sealed))

    def _maybe_process_finished_jobs(self) -> None:
        """Once per step: what was sealed meanwhile, then what tiers have finished."""
        if self._seals and not self._processed_jobs_this_step:
            self._collect_seals(self._seals.finished())
        super()._maybe_process_finished_jobs()

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping; for a tier alone it does not do so for ever."""
        if self._seals or self._jobs or len(self._parking):
            self._rest.disturb()
            return True
        return self._rest.keeps_awake(bool(super().has_pending_work()))

    def settle(self) -> None:
        """Wait until every store that was completed is sealed and accounted for."""
        self._collect_seals(self._seals.drain())

    def shutdown(self) -> None:
        """End proofs before the rows go away, then everything else."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        super().shutdown()

    def fail_chunks(self, failures: Iterable[ChunkFailure]) -> None:
        """Withdraw chunks that a worker refused; they are not offered again from here."""
        failures = list(failures)
        for failure in failures:
            self.counters.refused(failure.refusal, HOST_TIER)
            self._journal.note(failure.refusal, failure.key, HOST_TIER)
        refused = frozenset(failure.key for failure in failures if failure.load)
        self.primary_tier.withdraw(map(OffloadKey, refused))
        for request in self._loads.take_failed(refused):
            self.waits.fails(request)

    def reset_cache(self) -> None:
        """Forget every chunk (the epoch was raised before, by the connector)."""
        # Sealing must not touch a row that is about to mean something else.
        self.settle()
        super().reset_cache()
        self._issued.clear()
        self._told.clear()
        self._parking.clear()
        self._loads.clear()
        self.waits.clear()
        self._claims.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """vLLM's statistics and ours."""
        stats = self.counters.drain(self._epochs.persistent)
        theirs = super().get_stats()
        if theirs is not None:
            stats.aggregate(theirs)
        return stats

# SPDX-License-Identifier: Apache-2.0
"""The scheduler-side manager: vLLM's tiering manager, with sealing before readiness.

A store becomes ready only when its header is closed over the records of all writers; a
chunk that a worker refused is withdrawn; a reset raises the epoch before anything else.
"""

from collections import Counter
from collections.abc import Collection, Iterable
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
from kvsafe.engine.epochs import EpochKeeper
from kvsafe.engine.journal import RefusalJournal
from kvsafe.engine.primary import SealedPrimaryTier
from kvsafe.engine.station import Station
from kvsafe.engine.transfer import ChunkFailure, SealedRowsSpec
from kvsafe.engine.verdicts import Verdicts
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
    ) -> None:
        super().__init__(primary_tier=primary_tier, secondary_tiers=secondary_tiers)
        self.counters = counters
        self._station = station
        self._epochs = epochs
        self._journal = journal
        self._verdicts = verdicts
        self._issued: dict[OffloadKey, IssuedStore | Refusal] = {}
        self._lost: Counter[OffloadKey] = Counter()
        self._sealer: HeaderSealer | None = None

    def lookup(
        self,
        key: OffloadKey,
        req_context: ReqContext,
        *,
        exclude_tier_idx: int | None = None,
    ) -> LookupResult:
        """vLLM's answer, but a write that is over its deadline is a miss, not a wait."""
        if not self._epochs.certain:
            return LookupResult.MISS
        result = super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx)
        if result is LookupResult.HIT_PENDING:
            limit = self._station.config.load_deadline_s
            if self.primary_tier.pending_for(key) > limit:
                return LookupResult.MISS
            self._verdicts.waits(req_context.req_id, key)
        elif result is LookupResult.MISS and self._verdicts.has_to_fail(req_context.req_id, key):
            return LookupResult.HIT
        return result

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """vLLM's answer; nothing is stored while the epoch is not certain."""
        if not self._epochs.certain:
            return None
        return super().prepare_store(keys, req_context)

    def issue_store(self, key: OffloadKey, issued: "IssuedStore | Refusal") -> None:
        """Note what the store job that was just built will write, or why it will not."""
        self._issued[key] = issued

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin rows for a load; a chunk that is gone since its lookup fails the load.

        vLLM asserts here. Nothing pins a chunk between `lookup` and `prepare_load`, and a
        lookup of another group of the same request may promote into its row.
        """
        present = [
            key for key in keys if self.primary_tier.lookup(key, req_context) is LookupResult.HIT
        ]
        if len(present) == len(keys):
            return super().prepare_load(keys, req_context)
        lost = [key for key in keys if key not in present]
        self._lost.update(lost)
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
        super().on_request_finished(req_context, exclude_tier_idx=exclude_tier_idx)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin what `prepare_load` pinned."""
        if self._lost:
            keys = [key for key in keys if not self._found_again(key)]
        super().complete_load(keys, req_context)

    def _found_again(self, key: OffloadKey) -> bool:
        if self._lost[key] == 0:
            del self._lost[key]
            return False
        self._lost[key] -= 1
        if self._lost[key] == 0:
            del self._lost[key]
        return True

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """vLLM's end of step, and a look whether another process has raised the epoch."""
        self._epochs.poll()
        super().on_schedule_end(context)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Seal what all workers have written; what cannot be sealed never becomes ready."""
        sealed = [key for key in keys if self._seal(key)] if success else []
        failed = [key for key in keys if key not in sealed]
        if failed:
            self.counters.add(STORES_FAILED, len(failed))
        if not sealed:
            super().complete_store(failed, req_context, success=False)
            return
        if failed:
            # One call per store to super(): it counts calls. The rest goes to the tier itself.
            self.primary_tier.complete_store(failed, req_context, success=False)
        super().complete_store(sealed, req_context, success=True)
        self.counters.stored(len(sealed))

    def fail_chunks(self, failures: Iterable[ChunkFailure]) -> None:
        """Withdraw chunks that a worker refused; they are not offered again from here."""
        failures = list(failures)
        for failure in failures:
            self.counters.refused(failure.refusal, HOST_TIER)
            self._journal.note(failure.refusal, failure.key, HOST_TIER)
        self.primary_tier.withdraw(failure.key for failure in failures if failure.load)

    def reset_cache(self) -> None:
        """Forget every chunk (the epoch was raised before, by the connector)."""
        super().reset_cache()
        self._issued.clear()
        self._lost.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """vLLM's statistics and ours."""
        stats = self.counters.drain(self._epochs.epoch)
        theirs = super().get_stats()
        if theirs is not None:
            stats.aggregate(theirs)
        return stats

    def _seal(self, key: OffloadKey) -> bool:
        refusal = self._try_seal(key)
        if refusal is None:
            self.counters.add(SEALED)
            return True
        self.counters.refused(refusal, HOST_TIER)
        self._journal.note(refusal, key, HOST_TIER)
        return False

    def _try_seal(self, key: OffloadKey) -> Refusal | None:
        issued = self._issued.pop(key, None)
        row = self.primary_tier.row_of(key)
        region = self._station.region
        if issued is None or row is None or region is None:
            return Refusal.of(RefusalKind.FENCE, "row", "the row of this store", "none")
        if isinstance(issued, Refusal):
            return issued
        present = (region.ledger.generation(row), self._epochs.epoch)
        if present != (issued.generation, issued.epoch):
            return Refusal.of(
                RefusalKind.FENCE, "generation, epoch", present, (issued.generation, issued.epoch)
            )
        if self._sealer is None:
            self._sealer = self._station.header_sealer()
        return self._sealer.seal(
            region.row(row), key, issued.epoch, issued.generation, issued.coverage
        )

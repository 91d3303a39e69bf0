# SPDX-License-Identifier: Apache-2.0
"""The second door: `kvsafe-fs` under vLLM's own `TieringOffloadingSpec`, sealing by itself.

    {"type": "SealingFsTier", "module_path": "kvsafe.engine.fs.second_door", "root_dir": ..., ...}

For those who only want their disk sealed: rows are vLLM's, without a header; a file is the same
sealed row that `KVSafeConnector` writes, in the same folder, under the same name. A row is
copied behind a header and sealed on its way out, and opened, all ten steps, on its way back,
both in a private buffer.
"""

from collections import OrderedDict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvsafe.engine.counters import QUARANTINED, metric_definitions
from kvsafe.engine.fs.tier import Job, KVSafeFsTier
from kvsafe.engine.journal import adopt_vllm_handlers, logger
from kvsafe.engine.tiers.self_sealing import SEAL_OPTIONS, TierSeal
from kvsafe.seal.refusal import Refusal
from kvsafe.tiers import Answer, Os, Outcome, Ticket
from kvsafe.tiers.outcome import LATE

_REFUSED_LIMIT = 65536


class SealingFsTier(KVSafeFsTier):
    """A `kvsafe-fs` tier whose rows are vLLM's and whose files are sealed."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        calls: Os | None = None,
        **options: Any,
    ) -> None:
        """Options are those of `kvsafe-fs` and `SEAL_OPTIONS`. Raises as `TierSeal` does."""
        adopt_vllm_handlers()
        self._seal = TierSeal(offloading_spec, options)
        rest = {name: value for name, value in options.items() if name not in SEAL_OPTIONS}
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, backpressure_detector, calls, **rest
        )
        self.objects.on_refusal = self._note_object
        for name in self._seal.config.active_overrides:
            logger.warning("kvsafe: safety override %s is set", name)

    def _prepare(self, offloading_spec: Any) -> tuple[int, str]:
        layout = self._seal.layout
        if layout.payload_bytes > self._row_bytes:
            raise ValueError(
                f"rows of {self._row_bytes} bytes, but a payload of {layout.payload_bytes}"
            )
        return layout.row_bytes, self._seal.config.quarantine

    def _name(self, key: OffloadKey) -> bytes:
        return self._seal.names.name(bytes(key))

    def _epoch(self) -> int:
        return self._seal.epochs.epoch

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """As `kvsafe-fs`; what was refused is a miss until it has been stored anew."""
        if not self._seal.epochs.certain or self._name(key) in self._refused:
            return LookupResult.MISS
        return super().lookup(key, req_context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Seal and store rows; each one succeeds or fails by itself."""
        for key in job_metadata.keys:
            self._refused.pop(self._name(key), None)
        super().submit_store(job_metadata)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """As `kvsafe-fs`, and see whether another process has raised the epoch."""
        self._seal.epochs.poll()
        super().on_schedule_end(context)

    def _store_some(self, job: Job, places: range, ticket: Ticket) -> list[Outcome]:
        buffers = self._buffers.get_all()
        answers: list[Outcome | None] = []
        for place, buffer in zip(places, buffers, strict=False):
            if not ticket.more():
                return []
            with self._row(job.rows[place]) as row:
                answers.append(self._sealed(job, place, row, buffer, ticket))
        new = [at for at, answer in enumerate(answers) if answer is None]
        names = [job.names[places[at]] for at in new]
        stored = iter(self.store.put_all(names, [buffers[at] for at in new], ticket))
        return [next(stored, LATE) if answer is None else answer for answer in answers]

    def _sealed(
        self, job: Job, place: int, row: memoryview, buffer: memoryview, ticket: Ticket
    ) -> Outcome | None:
        """Seal a row into a buffer; None if it is to be stored now."""
        if not self._seal.epochs.certain:
            return Outcome(Answer.UNREACHABLE, "the epoch is not certain")
        standing = self.store.standing(job.names[place])
        if standing is not None:
            return standing
        self._seal.take_in(buffer, row)
        # The row was this chunk's for as long as nobody has answered for the job.
        if not ticket.wanted:
            return LATE
        refusal = self._seal.seal(buffer, bytes(job.keys[place]), job.epoch)
        return None if refusal is None else Outcome(Answer.UNREACHABLE, str(refusal), refusal)

    def _judged(
        self, job: Job, places: range, buffers: list[memoryview], outcomes: list[Outcome]
    ) -> list[Outcome]:
        loaded = [at for at, outcome in enumerate(outcomes) if outcome.good]
        keys = [bytes(job.keys[places[at]]) for at in loaded]
        right = self._seal.right([buffers[at] for at in loaded], keys, job.epoch, self.tier_type)
        answers = list(outcomes)
        for at, good in zip(loaded, right, strict=True):
            if not good:
                answers[at] = self._opened_alone(job, places[at], buffers[at], outcomes[at])
        return answers

    def _opened_alone(self, job: Job, place: int, buffer: memoryview, outcome: Outcome) -> Outcome:
        name, key = job.names[place], bytes(job.keys[place])
        refusal = self._seal.open(buffer, key, job.epoch, self.tier_type)
        if refusal is None:
            return outcome
        moved = self.objects.quarantine(OffloadKey(name), refusal)
        self._note_object(OffloadKey(name), refusal, moved)
        return Outcome(Answer.REFUSED, str(refusal), refusal, moved)

    def _fill_rows(self, rows: list[memoryview], buffers: list[memoryview]) -> None:
        for row, buffer in zip(rows, buffers, strict=True):
            self._seal.give_out(row, buffer)

    def _note(self, job_id: int, first: int, outcomes: list[Outcome]) -> None:
        names = self._jobs[job_id].names
        for place, outcome in enumerate(outcomes, first):
            if outcome.answer is Answer.REFUSED:
                self._refused[names[place]] = None
        while len(self._refused) > _REFUSED_LIMIT:
            self._refused.popitem(last=False)
        super()._note(job_id, first, outcomes)

    def _note_object(self, name: OffloadKey, refusal: Refusal, moved: bool) -> None:
        self._seal.counters.refused(refusal, self.tier_type)
        self._seal.journal.note_name(refusal, bytes(name), self.tier_type)
        if moved:
            self._seal.counters.add(QUARANTINED, 1, (self.tier_type,))

    def drain_jobs(self) -> None:
        """Wait for every job, and revoke what was stored: vLLM drains tiers only for a reset.

        vLLM tells tiers nothing else of a reset, which usually comes with other weights.
        """
        super().drain_jobs()
        self._seal.epochs.raise_epoch("reset of the engine's cache")

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Metrics of `kvsafe-fs`, and of sealing and opening."""
        return {**super().build_metric_definitions(extra_config), **metric_definitions()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Counts since the last call, and the present gauges."""
        stats = self._seal.counters.drain(self._seal.epochs.epoch)
        files = super().get_stats()
        if files is not None:
            stats.aggregate(files)
        return stats

# SPDX-License-Identifier: Apache-2.0
"""`kvsafe-fs`: the disk store of `kvsafe/tiers` as a secondary tier of vLLM.

Under `KVSafeSpec` rows come sealed and are opened by `ProvingTier`, once per promotion, so
the tier itself judges nothing but kind, length, owner and links of a file. Loads go through
a private buffer per thread: a read that returns after its deadline lands there and never in
a row that belongs to somebody else by then.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvsafe.engine.config.problems import ConfigError, Refused, under
from kvsafe.engine.config.tiers import check_kvsafe_fs
from kvsafe.engine.journal import logger
from kvsafe.engine.objects import NoteObject
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.tiers import (
    LOAD,
    LOOK,
    STORE,
    Answer,
    ChunkStore,
    Flaw,
    LookupDesk,
    Os,
    Outcome,
    Pool,
    StoreSetting,
    Ticket,
)
from kvsafe.tiers.buffers import ThreadBuffers, copy, page_aligned

TIER_TYPE = "kvsafe-fs"
OPERATIONS = "kvsafe:fs_operations"
EVICTED = "kvsafe:fs_evicted"
CHARGED = "kvsafe:fs_charged_bytes"
CAPACITY = "kvsafe:fs_capacity_bytes"
STUCK = "kvsafe:fs_stuck_threads"

_PAUSE_S = 0.001
_NOT_THE_OBJECTS_FAULT = (RefusalKind.EPOCH_UNKNOWN, RefusalKind.COPY_FAULT, RefusalKind.FENCE)


@dataclass(slots=True)
class _Job:
    """A transfer under way: its names, how many are open, which succeeded."""

    names: list[OffloadKey]
    load: bool
    started: float
    open: int
    good: set[int] = field(default_factory=set)


class FsTierObjects:
    """The files of a `kvsafe-fs` tier as `ProvingTier` handles refused ones."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self.on_refusal: NoteObject | None = None
        store.on_flaw = self._note

    def exists(self, name: OffloadKey) -> bool:
        """Whether anything stands at the name."""
        return self._store.exists(bytes(name))

    def quarantine(self, name: OffloadKey, refusal: Refusal) -> bool:
        """Take the file that was refused out of the way; one that is newer stays."""
        if refusal.kind in _NOT_THE_OBJECTS_FAULT:
            return False
        if refusal.kind is RefusalKind.EPOCH_REVOKED:
            # Whole but worthless for ever; keeping it aside proves nothing.
            return self._store.discard(bytes(name))
        return self._store.quarantine(bytes(name), refusal.number, str(refusal))

    def _note(self, name: bytes, flaw: Flaw, moved: bool) -> None:
        refusal = Refusal.of(RefusalKind.TIER_OBJECT, flaw.field, flaw.expected, flaw.found)
        if self.on_refusal is not None:
            self.on_refusal(OffloadKey(name), refusal, moved)


class KVSafeFsTier(SecondaryTierManager):
    """vLLM's view of a `ChunkStore`."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        calls: Os | None = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        chosen = _checked(options)
        if "locality" in chosen:
            self.locality = Locality(chosen["locality"])
        station = getattr(offloading_spec, "station", None)
        if station is None:
            raise ValueError(
                f"{TIER_TYPE} takes sealed rows: use it under KVSafeConnector, not under "
                "vLLM's TieringOffloadingSpec"
            )
        self._deadline_s = float(chosen.get("deadline_s", 10.0))
        self._row_bytes = int(self.block_size_bytes)
        self._rows = memoryview(primary_kv_view).cast("B")
        self._aligned = self._row_bytes % 4096 == 0 and page_aligned(self._rows)
        setting = _setting(chosen, self._row_bytes, station.config.quarantine)
        self.store = ChunkStore(setting, calls)
        self.objects = FsTierObjects(self.store)
        self._buffers = ThreadBuffers(self._row_bytes)
        self._desk = LookupDesk()
        threads = int(chosen.get("threads", 16))
        # Half prefers loads, half stores; lookups have a thread that never transfers.
        teams = [(LOAD, STORE) if place % 2 == 0 else (STORE, LOAD) for place in range(threads)]
        self._pool = Pool([(LOOK,), *teams], self._deadline_s, threads, self.store.calls.clock)
        self._jobs: dict[int, _Job] = {}
        self._finished: list[JobResult] = []
        self._told: Counter[tuple[str, str]] = Counter()
        logger.info(
            "kvsafe: tier %s: capacity %d bytes, sync %s, direct I/O %s, %d threads",
            tier_type,
            setting.capacity_bytes,
            setting.sync,
            "on" if self.store.direct else "off",
            threads,
        )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """No wishes."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what the request asked for."""
        self._desk.forget(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT, MISS, or RETRY while the answer is on its way (never longer than deadlines)."""
        found = self._desk.ask(bytes(key), req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send this step's lookups off and take in what is answered."""
        for batch in self._desk.batches():
            self._pool.submit(LOOK, tuple(batch), partial(self._look, batch))
        self._collect()

    def _look(self, names: list[bytes], ticket: Ticket) -> list[bool]:
        return self.store.look(names)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store rows; each one succeeds or fails by itself."""
        self._submit(job_metadata, STORE)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load rows; each one succeeds or fails by itself."""
        self._submit(job_metadata, LOAD)

    def _submit(self, job: TransferJob, lane: int) -> None:
        names = list(job.keys)
        work = self._load_one if lane == LOAD else self._store_one
        self._jobs[job.job_id] = _Job(names, lane == LOAD, time.monotonic(), len(names))
        if not names:
            self._end(job.job_id)
            return
        self._pool.submit_all(
            lane,
            [
                ((job.job_id, place), partial(work, bytes(name), int(row)))
                for place, (name, row) in enumerate(zip(names, job.chunk_ids, strict=True))
            ],
        )

    def _row(self, row: int) -> memoryview:
        return self._rows[row * self._row_bytes : (row + 1) * self._row_bytes]

    def _store_one(self, name: bytes, row: int, ticket: Ticket) -> Outcome:
        with self._row(row) as view:
            return self.store.put(name, view, aligned=self._aligned, wanted=lambda: ticket.wanted)

    def _load_one(self, name: bytes, row: int, ticket: Ticket) -> Outcome:
        buffer = self._buffers.get()
        outcome = self.store.get(name, buffer)
        if not outcome.good:
            return outcome
        # From here to the end of the copy the row cannot be given away.
        if not ticket.claim():
            return Outcome(Answer.LATE)
        with self._row(row) as view:
            copy(view, buffer)
        return outcome

    def _collect(self) -> None:
        for tag, result in self._pool.poll():
            if not isinstance(tag, tuple):
                continue
            if tag and isinstance(tag[0], bytes):
                found = result if isinstance(result, list) else [False] * len(tag)
                self._desk.answer(tag, found)
            elif isinstance(result, Outcome):
                self._note(int(tag[0]), int(tag[1]), result)

    def _note(self, job_id: int, place: int, outcome: Outcome) -> None:
        job = self._jobs[job_id]
        job.open -= 1
        if outcome.good:
            job.good.add(place)
        elif outcome.answer is Answer.LATE:
            self.store.counts[outcome.answer.value] += 1
        if job.load and not outcome.good:
            # Else the same request would come for it again and again.
            self._desk.settle([bytes(job.names[place])], False)
        elif not job.load and outcome.good:
            self._desk.settle([bytes(job.names[place])], True)
        if job.open == 0:
            self._end(job_id)

    def _end(self, job_id: int) -> None:
        job = self._jobs.pop(job_id)
        whole = len(job.good) == len(job.names)
        good = tuple(job.names[place] for place in sorted(job.good))
        self._finished.append(
            JobResult(
                job_id=job_id,
                success=whole,
                successful_keys=good if job.load and good and not whole else None,
                transfer_time=time.monotonic() - job.started,
                transfer_bytes=len(good) * self._row_bytes or None,
            )
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What has ended since the last call."""
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping: deadlines are looked at in its steps."""
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """Wait until every job has ended: by its work or by its deadline."""
        self._collect()
        while self._jobs:
            time.sleep(_PAUSE_S)
            self._collect()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note names as used; the marks on the disk are set in batches, in the background."""
        self.store.touch(bytes(key) for key in keys)

    def shutdown(self) -> None:
        """End threads and give room back. A thread that is stuck in a call is left behind."""
        if not self._pool.stop(self._deadline_s):
            logger.warning("kvsafe: tier %s: a call is stuck, left behind", self.tier_type)
        self.store.close(self._deadline_s)
        try:
            self._rows.release()
        except BufferError:
            logger.warning("kvsafe: tier %s: a stuck write still reads a row", self.tier_type)

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Metrics of this tier."""
        counter, gauge = OffloadingCounterMetadata, OffloadingGaugeMetadata
        return {
            OPERATIONS: counter(
                "Loads and stores of the kvsafe-fs tier, and what came of them.",
                labelnames=("tier", "outcome"),
            ),
            EVICTED: counter("Files evicted from the kvsafe-fs tier.", labelnames=("tier", "kind")),
            CHARGED: gauge("Bytes charged to the store, all writers.", labelnames=("tier",)),
            CAPACITY: gauge("Capacity of the store in bytes.", labelnames=("tier",)),
            STUCK: gauge("Threads that are stuck in a call.", labelnames=("tier",)),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Counts since the last call, and the present gauges."""
        stats = OffloadingConnectorStats()
        store, tier = self.store, self.tier_type
        for name, counts in ((OPERATIONS, store.counts), (EVICTED, store.room.evicted)):
            for label, total in list(counts.items()):
                amount = total - self._told[name, label]
                if amount:
                    stats.increase_counter(name, amount, (tier, label))
                    self._told[name, label] = total
        stats.set_gauge(CHARGED, store.charged, (tier,))
        stats.set_gauge(CAPACITY, store.setting.capacity_bytes, (tier,))
        stats.set_gauge(STUCK, self._pool.counts.stuck, (tier,))
        return stats


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    given: dict[object, object] = {"type": TIER_TYPE}
    given.update(options)
    try:
        return check_kvsafe_fs(given)
    except Refused as refused:
        raise ConfigError(f"{TIER_TYPE}:", under(TIER_TYPE, refused.problems)) from None


def _setting(chosen: dict[str, Any], row_bytes: int, quarantine: str) -> StoreSetting:
    names = ("capacity_bytes", "reserve_bytes", "ttl_s", "sync", "direct_io")
    return StoreSetting(
        root=str(Path(chosen["root_dir"]).expanduser()),
        row_bytes=row_bytes,
        quarantine=chosen.get("quarantine", quarantine),
        flaw_number=int(RefusalKind.TIER_OBJECT),
        **{name: chosen[name] for name in names if name in chosen},
    )

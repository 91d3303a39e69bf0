# SPDX-License-Identifier: Apache-2.0
"""`kvsafe-fs`: the disk store of `kvsafe/tiers` as a secondary tier of vLLM.

Under `KVSafeSpec` rows come sealed and are opened by `ProvingTier`, once per promotion, so
the tier itself judges nothing but kind, length, owner and links of a file. Loads go through
a private buffer per thread: a read that returns after its deadline lands there and never in
a row that belongs to somebody else by then.
"""

import time
from collections.abc import Callable, Collection, Hashable, Iterable
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
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvsafe.engine.config.problems import ConfigError, Refused, under
from kvsafe.engine.config.tiers import check_kvsafe_fs
from kvsafe.engine.fs_objects import FsTally, FsTierObjects, fs_metric_definitions
from kvsafe.engine.journal import logger
from kvsafe.seal.refusal import RefusalKind
from kvsafe.tiers import (
    LOAD,
    LOOK,
    STORE,
    Answer,
    ChunkStore,
    LookupDesk,
    Os,
    Outcome,
    Pool,
    StoreSetting,
    Ticket,
)
from kvsafe.tiers.buffers import ThreadBuffers, copy

TIER_TYPE = "kvsafe-fs"
_PAUSE_S = 0.001
_AT_ONCE = 8
_AT_ONCE_BYTES = 1 << 20


@dataclass(slots=True)
class _Job:
    """A transfer under way: its names, how many are open, which succeeded."""

    names: list[OffloadKey]
    load: bool
    started: float
    open: int
    good: set[int] = field(default_factory=set)


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
        setting = _setting(chosen, self._row_bytes, station.config.quarantine)
        self.store = ChunkStore(setting, calls)
        self.objects = FsTierObjects(self.store)
        self._buffers = ThreadBuffers(self._row_bytes)
        self._desk = LookupDesk()
        # Small rows go several to a thread at once: handing over costs as much as reading.
        self._at_once = max(1, min(_AT_ONCE, _AT_ONCE_BYTES // self._row_bytes))
        self._clock = self.store.calls.clock
        threads = int(chosen.get("threads", 16))
        # Half prefers loads, half stores; lookups have a thread that never transfers.
        teams = [(LOAD, STORE) if place % 2 == 0 else (STORE, LOAD) for place in range(threads)]
        self._pool = Pool([(LOOK,), *teams], self._deadline_s, threads, self.store.calls.clock)
        self._jobs: dict[int, _Job] = {}
        self._finished: list[JobResult] = []
        self._tally = FsTally(self.store, tier_type)
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
        work = self._load_some if lane == LOAD else self._store_some
        self._jobs[job.job_id] = _Job(names, lane == LOAD, time.monotonic(), len(names))
        if not names:
            self._end(job.job_id)
            return
        rows = [int(row) for row in job.chunk_ids]
        pieces: list[tuple[Hashable, Callable[[Ticket], object]]] = []
        for at in range(0, len(names), self._at_once):
            part = slice(at, at + self._at_once)
            pairs = list(zip(names[part], rows[part], strict=True))
            pieces.append(((job.job_id, at, len(pairs)), partial(work, pairs)))
        self._pool.submit_all(lane, pieces)

    def _row(self, row: int) -> memoryview:
        return self._rows[row * self._row_bytes : (row + 1) * self._row_bytes]

    def _store_some(self, pairs: list[tuple[OffloadKey, int]], ticket: Ticket) -> list[Outcome]:
        outcomes = []
        for name, row in pairs:
            if not ticket.renew(self._clock()):
                break
            with self._row(row) as view:
                outcomes.append(self.store.put(name, view, wanted=lambda: ticket.wanted))
        return outcomes

    def _load_some(self, pairs: list[tuple[OffloadKey, int]], ticket: Ticket) -> list[Outcome]:
        buffer = self._buffers.get()
        outcomes = []
        for name, row in pairs:
            if not ticket.renew(self._clock()):
                break
            outcome = self.store.get(name, buffer)
            # From the claim to the end of the copy the row cannot be given away.
            if outcome.good and ticket.claim():
                with self._row(row) as view:
                    copy(view, buffer)
            outcomes.append(outcome)
        return outcomes

    def _collect(self) -> None:
        for tag, result in self._pool.poll():
            if isinstance(tag, tuple) and isinstance(tag[0], bytes):
                found = result if isinstance(result, list) else [False] * len(tag)
                self._desk.answer(tag, found)
            elif isinstance(tag, tuple):
                job_id, first, count = tag
                # One outcome for all is the pool's: late, or a fault of our own.
                outcomes = result if isinstance(result, list) else [result] * count
                for place, outcome in enumerate(outcomes, first):
                    self._note(job_id, place, outcome)

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
        return fs_metric_definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Counts since the last call, and the present gauges."""
        return self._tally.stats(self._pool.counts.stuck)


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

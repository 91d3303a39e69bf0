# SPDX-License-Identifier: Apache-2.0
"""`kvsafe-fs`: the disk store of `kvsafe/tiers` as a secondary tier of vLLM.

Under `KVSafeSpec` rows come sealed and are opened by `ProvingTier`, once per promotion, so
the tier itself judges nothing but kind, length, owner and links of a file. Loads go through
a private buffer per thread: a read that returns after its deadline lands there and never in
a row that belongs to somebody else by then. Under vLLM's own spec `SealingFsTier`
(`second_door.py`) takes its place.
"""

import queue
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvsafe.engine.fs.objects import FsEvents, FsTally, FsTierObjects, fs_metric_definitions
from kvsafe.engine.fs.options import TIER_TYPE, checked_options, deadline_s, store_setting
from kvsafe.engine.journal import logger
from kvsafe.engine.tiers.jobs import OpenJob, OpenJobs
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
    Ticket,
)
from kvsafe.tiers.buffers import Rows, ThreadBuffers
from kvsafe.tiers.outcome import DONE

_AT_ONCE = 16
_AT_ONCE_BYTES = 2 << 20
_LOADING = 8
_LOOKUPS = 2048
_LOOK_S = 0.02


class RowOpener(Protocol):
    """Opens rows where they are, for a tier that asks it to. Called by several threads."""

    def open(
        self, job: int, places: list[int], rows: list[int], data: list[memoryview]
    ) -> list[int]:
        """The places where what a job has read for this place and this row (uint8) is right."""
        ...

    def filled(self, job: int, places: list[int]) -> None:
        """Those bytes are in the rows now. Places are the ones that were right."""
        ...


def _teams(threads: int) -> list[tuple[int, ...]]:
    """What each thread does, beside the one for lookups, which never transfers.

    `threads` of them store, each with one write under way. One that loads has many reads under way,
    or large ones, and with more than a few of those it is slower. Stores may be slow for many
    deadlines, so one more thread only loads.
    """
    loading = max(min(-(-threads // 2), _LOADING), threads // 4)
    both = loading - 1
    return [(LOAD,), *[(LOAD, STORE)] * both, *[(STORE,)] * (threads - both)]


@dataclass(slots=True, kw_only=True)
class Job(OpenJob):
    """A transfer under way, with the object names and the rows of its keys."""

    names: list[bytes]
    rows: list[int]
    epoch: int


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
        chosen = checked_options(options)
        if "locality" in chosen:
            self.locality = Locality(chosen["locality"])
        self._deadline_s = deadline_s(chosen)
        self._row_bytes = int(self.block_size_bytes)
        self._rows = memoryview(primary_kv_view).cast("B")
        file_bytes, quarantine = self._prepare(offloading_spec)
        setting = store_setting(chosen, file_bytes, quarantine)
        self.store = ChunkStore(setting, calls)
        self.objects = FsTierObjects(self.store)
        wanted = getattr(offloading_spec, "kv_events_config", None)
        self.events = (
            FsEvents(self.store, self.locality)
            if getattr(wanted, "enable_kv_cache_events", False)
            else None
        )
        # Small rows go several to a thread at once: handing over costs as much as reading.
        self._at_once = max(1, min(_AT_ONCE, _AT_ONCE_BYTES // file_bytes))
        self._buffers = ThreadBuffers(file_bytes, self._at_once)
        self._desk = LookupDesk(batch=_LOOKUPS)
        self._seen: queue.SimpleQueue[tuple[list[bytes], list[bool]]] = queue.SimpleQueue()
        self._answers_due = False
        threads = int(chosen.get("threads", 32))
        teams = _teams(threads)
        self._pool = Pool([(LOOK,), *teams], self._deadline_s, threads, self.store.calls.clock)
        self._jobs: OpenJobs[Job] = OpenJobs(self._row_bytes)
        self.in_place: RowOpener | None = None
        """Opens rows between their read and their place in memory, in the thread that read."""
        self._tally = FsTally(self.store, tier_type)
        logger.info(
            "kvsafe: tier %s: capacity %d bytes, sync %s, direct I/O %s, %d threads",
            tier_type,
            setting.capacity_bytes,
            setting.sync,
            "on" if self.store.direct else "off",
            threads,
        )

    def _prepare(self, offloading_spec: Any) -> tuple[int, str]:
        """Bytes of a file, and what becomes of a refused one unless the tier's options say it."""
        station = getattr(offloading_spec, "station", None)
        if station is None:
            raise ValueError(
                f"{TIER_TYPE} takes sealed rows: use it under KVSafeConnector, or under vLLM's "
                'TieringOffloadingSpec as {"type": "SealingFsTier", '
                '"module_path": "kvsafe.engine.fs.second_door", ...}'
            )
        return self._row_bytes, str(station.config.quarantine)

    def _name(self, key: OffloadKey) -> bytes:
        """What the store knows a chunk by: under `KVSafeSpec` keys are names already."""
        return bytes(key)

    def _epoch(self) -> int:
        """The epoch in which a job begins: of no concern where rows come sealed."""
        return 0

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """No wishes."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what the request asked for."""
        self._desk.forget(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT, MISS, or RETRY while the answer is on its way (never longer than deadlines)."""
        if self._answers_due:
            # What came in since the last step: else each answer would wait for one step more.
            self._answers_due = False
            self._collect()
        found = self._desk.ask(self._name(key), req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send this step's lookups off and take in what is answered."""
        for batch in self._desk.batches():
            self._pool.submit(LOOK, tuple(batch), partial(self._look, batch))
        self._collect()
        self._answers_due = True

    def _look(self, names: list[bytes], ticket: Ticket) -> None:
        """Look for names a while at a time: the answers of a while do not wait for the rest."""
        some = len(names)
        while names:
            found = self.store.look_for(names[:some], _LOOK_S)
            if not ticket.wanted:
                return
            self._seen.put((names[: len(found)], found))
            names = names[len(found) :]
            # What is asked for and not answered is looked for anew: not all of it where it is slow.
            some = 2 * len(found)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store rows; each one succeeds or fails by itself."""
        self._submit(job_metadata, STORE)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load rows; each one succeeds or fails by itself."""
        self._submit(job_metadata, LOAD)

    def _submit(self, given: TransferJob, lane: int) -> None:
        keys = list(given.keys)
        job = Job(
            number=given.job_id,
            keys=keys,
            names=[self._name(key) for key in keys],
            rows=np.asarray(given.chunk_ids).tolist(),
            load=lane == LOAD,
            epoch=self._epoch(),
        )
        self._jobs.begin(job)
        if self.events is not None and not job.load:
            self.events.begin(job.names)
        if not keys:
            self._end(given.job_id)
            return
        work = self._load_some if job.load else self._store_some
        pieces: list[tuple[Hashable, Callable[[Ticket], object]]] = []
        for first in range(0, len(keys), self._at_once):
            places = range(first, min(first + self._at_once, len(keys)))
            pieces.append(((given.job_id, first, len(places)), partial(work, job, places)))
        self._pool.submit_all(lane, pieces)

    def _row(self, row: int) -> memoryview:
        return self._rows[row * self._row_bytes : (row + 1) * self._row_bytes]

    def _store_some(self, job: Job, places: range, ticket: Ticket) -> list[Outcome]:
        part = slice(places.start, places.stop)
        rows = Rows(self._rows, self._row_bytes, job.rows[part])
        return self.store.put_all(job.names[part], rows, ticket)

    def _load_some(self, job: Job, places: range, ticket: Ticket) -> list[Outcome]:
        buffers = self._buffers.get_all()[: len(places)]
        names = [job.names[place] for place in places]
        outcomes = self.store.get_all(names, buffers, ticket)
        outcomes = self._judged(job, places[: len(outcomes)], buffers, outcomes)
        filled = [at for at, outcome in enumerate(outcomes) if outcome.good]
        if not ticket.more():
            return outcomes
        opened = self._opened(job, [places[at] for at in filled], [buffers[at] for at in filled])
        # From the claim to the end no row of it can be given away.
        if filled and ticket.claim():
            rows = [self._row(job.rows[places[at]]) for at in filled]
            self._fill_rows(rows, [buffers[at] for at in filled])
            if self.in_place is not None:
                self.in_place.filled(job.number, opened)
        return outcomes

    def _opened(self, job: Job, places: list[int], buffers: list[memoryview]) -> list[int]:
        """The places whose bytes were opened already, if that is wanted."""
        if self.in_place is None:
            return []
        rows = [job.rows[place] for place in places]
        return self.in_place.open(job.number, places, rows, buffers)

    def _judged(
        self, job: Job, places: range, buffers: list[memoryview], outcomes: list[Outcome]
    ) -> list[Outcome]:
        """What loads come to: rows that come sealed are opened by whoever has asked for them."""
        return outcomes

    def _fill_rows(self, rows: list[memoryview], buffers: list[memoryview]) -> None:
        self.store.copy(rows, buffers)

    def _collect(self) -> None:
        ended = self._pool.poll()
        while True:
            try:
                self._desk.answer(*self._seen.get_nowait())
            except queue.Empty:
                break
        for tag, result in ended:
            if isinstance(tag, tuple) and isinstance(tag[0], bytes):
                if result is not None:  # late: what it has not found out is a miss
                    self._desk.answer(tag, [False] * len(tag))
            elif isinstance(tag, tuple):
                job_id, first, count = tag
                # One outcome for all is the pool's: late, or a fault of our own.
                outcomes: list[Any] = result if isinstance(result, list) else [result] * count
                self._note(job_id, first, outcomes)

    def _note(self, job_id: int, first: int, outcomes: list[Outcome]) -> None:
        """What has become of rows of a job, from place `first` on."""
        job, places = self._jobs[job_id], range(first, first + len(outcomes))
        bad = [] if outcomes.count(DONE) == len(outcomes) else self._bad(first, outcomes)
        good = [place for place in places if place not in bad] if bad else places
        if job.load:
            # Else the same request would come for it again and again.
            self._desk.settle([job.names[place] for place in bad], False)
        else:
            self._desk.settle([job.names[place] for place in good], True)
        if self._jobs.note(job_id, len(places), good):
            self._end(job_id)

    def _bad(self, first: int, outcomes: list[Outcome]) -> list[int]:
        """The places that failed; those that are late are counted."""
        self.store.counts[Answer.LATE.value] += sum(one.answer is Answer.LATE for one in outcomes)
        return [place for place, outcome in enumerate(outcomes, first) if not outcome.good]

    def _end(self, job_id: int) -> None:
        job = self._jobs.end(job_id)
        if self.events is not None and not job.load:
            places = range(len(job.keys))
            self.events.end((job.names[at], job.keys[at], at in job.good) for at in places)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What has ended since the last call."""
        self._collect()
        return self._jobs.ended()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What was stored, and what of it has gone, if the engine wants KV events."""
        return () if self.events is None else self.events.take()

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping: deadlines are looked at in its steps."""
        return len(self._jobs) > 0

    def drain_jobs(self) -> None:
        """Wait until every job has ended: by its work or by its deadline."""
        self._jobs.drain(self._collect)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note names as used; the marks on the disk are set in batches, in the background."""
        self.store.touch(self._name(key) for key in keys)

    def shutdown(self) -> None:
        """End threads and give room back. A thread that is stuck in a call is left behind."""
        stuck = not self._pool.stop(self._deadline_s)
        if stuck:
            logger.warning("kvsafe: tier %s: a call is stuck, left behind", self.tier_type)
        self.store.close(self._deadline_s, stuck=stuck)
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

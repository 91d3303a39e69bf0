# SPDX-License-Identifier: Apache-2.0
"""A secondary tier of vLLM behind a proof: nothing it brings is ready before it is opened.

Wraps any `SecondaryTierManager`. On the way out the keys become keyed object names, so that
a listing of the tier confirms no guessed prompt and chunks of another identity have other
names. On the way back every promoted row is opened, all ten steps, in threads, and only the
keys that passed are reported as loaded. A refused chunk is quarantined where the tier has a
way for it and is not offered again until it has been stored anew.
"""

import contextlib
import queue
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    ParentManager,
    SecondaryTierManager,
    TransferJob,
)

from kvsafe.engine.counters import QUARANTINED, Counters
from kvsafe.engine.journal import RefusalJournal, logger
from kvsafe.engine.requests.verdicts import Verdicts
from kvsafe.engine.rows.epochs import EpochKeeper
from kvsafe.engine.station import Station
from kvsafe.engine.tiers.door import TierDoor
from kvsafe.engine.tiers.elsewhere import Elsewhere
from kvsafe.engine.tiers.guests import DetectorDoor, ParentDoor, source_of
from kvsafe.engine.tiers.in_place import open_in_place
from kvsafe.engine.tiers.names import ObjectNames
from kvsafe.engine.tiers.objects import ObjectStore
from kvsafe.engine.tiers.openings import Openings
from kvsafe.engine.tiers.patience import JobWatch, RowKeeper, ends_within
from kvsafe.engine.tiers.promotion import Promotion
from kvsafe.seal.refusal import Refusal, RefusalKind

_REFUSED_LIMIT = 65536
_DRAIN_S = 20.0
_Proof = tuple[int, OffloadKey, Refusal | None]


@dataclass(frozen=True, slots=True)
class ProofDesk:
    """What every wrapped tier of one engine shares."""

    station: Station
    epochs: EpochKeeper
    counters: Counters
    journal: RefusalJournal
    names: ObjectNames
    verdicts: Verdicts
    threads: ThreadPoolExecutor
    rows: RowKeeper


class ProvingTier(SecondaryTierManager):
    """A vLLM tier whose promotions are proven before they are ready."""

    def __init__(
        self, inner: SecondaryTierManager, index: int, desk: ProofDesk, store: ObjectStore | None
    ) -> None:
        # Not super().__init__: everything it would set up is the inner tier's.
        self.inner = inner
        self.tier_type = inner.tier_type
        self.locality = inner.locality
        self.medium = inner.medium
        self.cache_hit_source = source_of(inner)
        self.label = f"{index + 1}:{inner.tier_type}"
        self._desk = desk
        self._store = store
        self._door = TierDoor(inner, self.label, desk.counters)
        self._watch = JobWatch(desk.rows)
        self._parent = ParentDoor(self.label, desk.rows.ready, self._begin_foreign_store)
        found = inner.bp_detector
        self._detector = None if found is None else DetectorDoor(found, self._door)
        self._dead = False
        # Names that a load which was given up may still deliver: asking the tier for one of them
        # now would confuse vLLM's own lookup manager when that load fails in the end.
        self._owed: dict[int, frozenset[bytes]] = {}
        self._abandoned: dict[int, Promotion] = {}
        self._failed: list[JobResult] = []
        self._promotions: dict[int, Promotion] = {}
        self._proofs: queue.SimpleQueue[_Proof] = queue.SimpleQueue()
        self._open_proofs: set[Future[None]] = set()
        self._refused: OrderedDict[OffloadKey, None] = OrderedDict()
        self._elsewhere = Elsewhere(desk.names, desk.counters, desk.journal, self.label)
        self._key_of: dict[OffloadKey, OffloadKey] = {}
        self._bad_objects: dict[OffloadKey, Refusal] = {}
        if store is not None:
            store.on_refusal = self._note_object
        self._openings = Openings(desk.station, desk.epochs, desk.counters, self.label)
        open_in_place(inner, self._promotions, self._openings)

    @property
    def block_size_bytes(self) -> int:
        """Bytes per row."""
        return int(self.inner.block_size_bytes)

    @property
    def bp_detector(self) -> Any:
        """The inner tier's back-pressure detector."""
        return self._detector

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """The inner tier's answer for the object name; a refused chunk is a miss."""
        name = self._desk.names.name(key)
        if name in self._refused or self._dead or self._is_owed(name):
            return LookupResult.MISS
        result = self._door.ask(
            "lookup", lambda: self.inner.lookup(name, req_context), LookupResult.MISS
        )
        if result is LookupResult.MISS and self._store is not None:
            self._explain_miss(key, name, req_context)
        return result

    def _is_owed(self, name: bytes) -> bool:
        return bool(self._owed) and any(name in names for names in self._owed.values())

    def _explain_miss(self, key: OffloadKey, name: OffloadKey, req_context: ReqContext) -> None:
        refusal = self._bad_objects.pop(name, None)
        if refusal is not None:
            self._desk.verdicts.condemn(req_context.req_id, key, refusal)
        elif self._desk.names.foreign:
            self._elsewhere.ask(key, req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Cascade sealed rows under their object names."""
        if self._dead:
            self._failed.append(JobResult(job_metadata.job_id, success=False))
            return
        self._watch.begin(job_metadata.job_id, self._desk.station.config.store_deadline_s)
        names = [self._desk.names.name(key) for key in job_metadata.keys]
        for name in names:
            self._refused.pop(name, None)
        if getattr(self.inner, "events", None) is not None:
            if len(self._key_of) > _REFUSED_LIMIT:
                self._key_of.clear()
            self._key_of.update(zip(names, job_metadata.keys, strict=True))
        named = replace(job_metadata, keys=names)
        if not self._door.tell("submit_store", lambda: self.inner.submit_store(named)):
            self._watch.end(job_metadata.job_id)
            self._failed.append(JobResult(job_metadata.job_id, success=False))

    def _begin_foreign_store(self, job: int) -> None:
        self._watch.begin(job, self._desk.station.config.store_deadline_s)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Ask the inner tier for rows; they stay unready until they are proven."""
        if self._dead:
            self._failed.append(JobResult(job_metadata.job_id, success=False))
            return
        rows = dict(zip(job_metadata.keys, map(int, job_metadata.chunk_ids), strict=True))
        limit = self._desk.station.config.load_deadline_s
        self._watch.begin(job_metadata.job_id, limit, rows.values())
        promotion = self._promotions[job_metadata.job_id] = Promotion(rows)
        named = promotion.job(job_metadata, self._desk.names.name)
        if not self._door.tell("submit_load", lambda: self.inner.submit_load(named)):
            # It may have begun all the same: nothing more for this tier until it says so.
            given_up = self._watch.give_up([job_metadata.job_id])
            self._drop(given_up, self._failed, RefusalKind.TIER_READ, "an exception")
            self._dead = True

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Cascades as the inner tier reports them; promotions once every row was judged."""
        done, self._failed = self._failed, []
        done += self._reported()
        self._drop(self._watch.overdue(), done)
        self._collect_proofs()
        for job_id, promotion in list(self._promotions.items()):
            if promotion.result is not None and promotion.waiting == 0:
                del self._promotions[job_id]
                done.append(promotion.outcome())
        return done

    def has_pending_work(self) -> bool:
        """Whether transfers or proofs are under way."""
        if self._promotions or self._failed:
            return True
        return self._door.ask(
            "has_pending_work", lambda: bool(self.inner.has_pending_work()), False
        )

    def drain_jobs(self) -> None:
        """Wait until no transfer and no proof touches a row any more."""
        at_rest = not self._dead and ends_within(self.inner.drain_jobs, _DRAIN_S, "drain")
        # Kept for the manager's own poll, which comes right after.
        self._failed += self._reported()
        left = self._watch.give_up_all()
        self._drop(left, self._failed)
        if left or not at_rest:
            self._dead = self._watch.owes
            logger.error("kvsafe: tier %s does not come to rest, not used until then", self.label)
        self._drain_proofs()

    def _drain_proofs(self) -> None:
        deadline = time.monotonic() + _DRAIN_S
        for proof in list(self._open_proofs):
            with contextlib.suppress(Exception):  # it hangs, or its quarantine failed
                proof.result(timeout=max(0.0, deadline - time.monotonic()))
        self._collect_proofs()
        for job, promotion in list(self._promotions.items()):
            if promotion.waiting:
                self._abandoned[job] = promotion
                self._desk.rows.hold_back(promotion.keys.values())
                self._drop([job], self._failed)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """The inner tier's events, told with keys instead of object names.

        A name whose key is not known any more (or never was: an object of another engine that is
        evicted) is left out: to a listener it would be a key that nobody has.
        """
        for event in self._door.events():
            known = self._key_of.pop if event.removed else self._key_of.get
            keys = [key for name in event.keys if (key := known(name, None)) is not None]
            if keys:
                yield replace(event, keys=keys)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Pass recency on."""
        names = [self._desk.names.name(key) for key in keys]
        self._door.tell("touch", lambda: self.inner.touch(names, req_context))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Pass on."""
        inner, none = self.inner, RequestOffloadingContext()
        return self._door.ask("on_new_request", lambda: inner.on_new_request(req_context), none)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Pass on, and forget what this request asked elsewhere."""
        self._elsewhere.forget(req_context.req_id)
        self._door.tell("on_request_finished", lambda: self.inner.on_request_finished(req_context))

    def serve_external_requests(self, parent: ParentManager) -> None:
        """Lend the manager to the tier for the length of this call."""
        self._parent.parent = parent
        try:
            self._door.tell(
                "serve_external_requests",
                lambda: self.inner.serve_external_requests(self._parent),
            )
        finally:
            self._parent.parent = None

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Pass on, and look in the background for chunks under other identities."""
        self._elsewhere.send(self._store, self._desk.threads)
        self._door.tell("on_schedule_end", lambda: self.inner.on_schedule_end(context))

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Pass on."""
        return self._door.stats()

    def shutdown(self) -> None:
        """Stop the inner tier; proofs end with their threads."""
        if not ends_within(self.inner.shutdown, _DRAIN_S, "shutdown"):
            logger.error("kvsafe: tier %s does not stop; it is left behind", self.label)

    def _reported(self) -> list[JobResult]:
        """What the inner tier reports: proofs begin for promotions, the rest is returned."""
        others = []
        for result in self._door.results():
            if not self._watch.knows(result.job_id):
                self._door.fault("get_finished_jobs", "a job that is not under way")
            elif not self._watch.end(result.job_id):
                self._owed.pop(result.job_id, None)
            elif result.job_id in self._promotions:
                self._begin_proof(result)
            else:
                others.append(result)
        if self._dead and not self._watch.owes:
            self._dead = False
            logger.info("kvsafe: tier %s has come to rest and is used again", self.label)
        return others

    def _drop(
        self,
        jobs: list[int],
        done: list[JobResult],
        kind: RefusalKind = RefusalKind.DEADLINE,
        found: str = "none in time",
    ) -> None:
        """Report jobs as failed that the tier has not reported in time."""
        for job in jobs:
            refusal = Refusal.of(kind, "tier", "an answer", found)
            self._desk.counters.refused(refusal, self.label)
            self._desk.journal.note(refusal, b"", self.label)
            promotion = self._promotions.pop(job, None)
            if promotion is not None and promotion.result is None:
                self._owed[job] = frozenset(map(self._desk.names.name, promotion.keys))
            done.append(JobResult(job, success=False))

    def _begin_proof(self, result: JobResult) -> None:
        promotion = self._promotions[result.job_id]
        promotion.result = result
        names = self._desk.names
        arrived = None if result.success else set(result.successful_keys or ())
        for key, row in promotion.keys.items():
            if arrived is not None and (name := names.name(key)) not in arrived:
                self._desk.verdicts.refused(key, self._bad_objects.pop(name, None))
                continue
            if key in promotion.opened:
                self._accept(promotion, key)
                continue
            promotion.waiting += 1
            proof = self._desk.threads.submit(self._prove, result.job_id, key, row)
            self._open_proofs.add(proof)
            proof.add_done_callback(self._open_proofs.discard)

    def _prove(self, job_id: int, key: OffloadKey, row: int) -> None:
        refusal: Refusal | None
        try:
            refusal = self._open(key, row)
        except BaseException as exc:  # a proof that cannot run is a refusal, never a hung promotion
            refusal = Refusal.of(RefusalKind.COPY_FAULT, "proof", "an answer", type(exc).__name__)
        try:
            if refusal is not None:
                self._quarantine(key, refusal)
        finally:
            self._proofs.put((job_id, key, refusal))

    def _open(self, key: OffloadKey, row: int) -> Refusal | None:
        region = self._desk.station.region
        if region is None:
            return Refusal.of(RefusalKind.FENCE, "region", "open", "closed")
        return self._openings.open(key, region.row(row))

    def _quarantine(self, key: OffloadKey, refusal: Refusal) -> None:
        store = self._store
        if store is not None and store.quarantine(self._desk.names.name(key), refusal):
            self._desk.counters.add(QUARANTINED, 1, (self.label,))

    def _collect_proofs(self) -> None:
        while True:
            try:
                job_id, key, refusal = self._proofs.get_nowait()
            except queue.Empty:
                return
            promotion = self._promotions.get(job_id)
            if promotion is None:
                self._collect_late(job_id)
                continue
            promotion.waiting -= 1
            if refusal is None:
                self._accept(promotion, key)
            else:
                self._refuse(key, refusal)

    def _accept(self, promotion: Promotion, key: OffloadKey) -> None:
        promotion.proven.append(key)
        self._desk.rows.note_proven((key,))

    def _collect_late(self, job: int) -> None:
        """A proof that a reset did not wait for: its rows may be used again after the last."""
        promotion = self._abandoned[job]
        promotion.waiting -= 1
        if promotion.waiting == 0:
            del self._abandoned[job]
            self._desk.rows.give_back(promotion.keys.values())

    def _refuse(self, key: OffloadKey, refusal: Refusal) -> None:
        self._desk.verdicts.refused(key, refusal)
        self._refused[self._desk.names.name(key)] = None
        if len(self._refused) > _REFUSED_LIMIT:
            self._refused.popitem(last=False)
        self._desk.counters.refused(refusal, self.label)
        self._desk.journal.note(refusal, key, self.label)

    def _note_object(self, name: OffloadKey, refusal: Refusal, quarantined: bool) -> None:
        # Called in the tier's own lookup thread.
        if self._desk.verdicts.active and len(self._bad_objects) < _REFUSED_LIMIT:
            self._bad_objects[name] = refusal
        self._desk.counters.refused(refusal, self.label)
        self._desk.journal.note_name(refusal, name, self.label)
        if quarantined:
            self._desk.counters.add(QUARANTINED, 1, (self.label,))

# SPDX-License-Identifier: Apache-2.0
"""`kvsafe-lmcache`: a server that LMCache's peers use, as a secondary tier of vLLM.

Keys come as vLLM's own, since LMCache's names are made from a request's tokens. Threads move
chunks; a call that never returns costs its deadline and its thread, and never touches a row that
belongs to somebody else by then. What a peer sends wrong is a numbered refusal (13xx): counted,
never offered again to the request that met it, and written anew when that chunk is stored next.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
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

from kvsafe.engine.config.lmcache import LmcacheOptions, complete_lmcache
from kvsafe.engine.config.problems import ConfigError, Refused, under
from kvsafe.engine.config.tiers import check_kvsafe_lmcache
from kvsafe.engine.journal import logger
from kvsafe.engine.lmcache.form import (
    check_engine_fits,
    connect,
    model_name,
    naming,
    page_note,
    peer_form,
)
from kvsafe.engine.lmcache.names import ChunkNames, NameBook
from kvsafe.engine.lmcache.objects import OwnKeys, PeerObjects
from kvsafe.engine.lmcache.rows import UNATTESTED, Place, RowMover
from kvsafe.engine.lmcache.tally import PeerTally, peer_metric_definitions
from kvsafe.engine.rows.epochs import PRIVATE_EPOCH
from kvsafe.engine.tiers.jobs import OpenJob, OpenJobs
from kvsafe.engine.tiers.proving import ProofDesk
from kvsafe.lmcache.hashes import hash_chain
from kvsafe.seal.refusal import Refusal
from kvsafe.tiers import LOAD, LOOK, STORE, Answer, LookupDesk, Outcome, Pool, Ticket

TIER_TYPE = "kvsafe-lmcache"


@dataclass(slots=True, kw_only=True)
class _Job(OpenJob):
    """A transfer under way, with the names of its keys at the server."""

    names: list[ChunkNames | None]


class KVSafeLmcacheTier(SecondaryTierManager):
    """vLLM's view of a server that LMCache's peers use. `join` must come before first use."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.options = chosen = _completed(options)
        station = getattr(offloading_spec, "station", None)
        if station is None:
            raise ValueError(f"{TIER_TYPE} takes sealed rows: use it under KVSafeConnector")
        if options.get("locality") is not None:
            self.locality = Locality(options["locality"])
        check_engine_fits(chosen, offloading_spec)
        note = page_note(station)
        chain = hash_chain(chosen.hash_algo, chosen.none_hash_seed)
        form = peer_form(chosen, note, station)
        store, links = connect(chosen)
        self._store = store
        self._mover = RowMover(store, station, form, peers=chosen.trust == "peer")
        removes = chosen.scheme == "resp" and station.config.quarantine != "keep"
        self.objects = PeerObjects(self._mover, remove=removes)
        self._book = NameBook(
            naming(chosen, offloading_spec, note, chain),
            chain,
            chosen.chunk_tokens,
            ours=lambda key: key,
            on_refusal=lambda refusal: None,
        )
        self._row_bytes = int(self.block_size_bytes)
        self._rows = memoryview(primary_kv_view).cast("B")
        self._desk = LookupDesk()
        self._tally = PeerTally(tier_type, chosen.trust, links)
        teams = [(LOAD, STORE) if at % 2 == 0 else (STORE, LOAD) for at in range(chosen.threads)]
        self._pool = Pool(
            [(LOOK,), *teams], chosen.deadline_s, chosen.threads, time.monotonic, TIER_TYPE
        )
        self._jobs: OpenJobs[_Job] = OpenJobs(self._row_bytes)
        self._proof: ProofDesk | None = None
        self.label = tier_type
        _announce(chosen, model_name(chosen, offloading_spec), note.rule, form.layout.dims)

    def join(self, desk: ProofDesk, index: int) -> ProofDesk:
        """Take part in the engine's proofs; returns the desk for the proving tier around this."""
        self._proof = desk
        self.label = f"{index + 1}:{self.tier_type}"
        self._book.ours = desk.names.name
        self._book.on_refusal = partial(self._refuse, None)
        return replace(desk, names=OwnKeys(desk.names))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """No wishes."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what the request asked for."""
        self._desk.forget(req_context.req_id)
        self._book.forget(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT, MISS, or RETRY while the answer is on its way (never longer than deadlines)."""
        names = self._names(key, req_context)
        if names is None:
            return LookupResult.MISS
        found = self._desk.ask(names.label, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def _names(self, key: OffloadKey, context: ReqContext) -> ChunkNames | None:
        """The names of a chunk, or None if it must neither be asked for nor stored.

        So it is after a reset that may have come with new weights: LMCache's names do not say
        whose weights computed a chunk, so ours would be read as the old ones, and theirs as new.
        """
        desk = self._proof
        if desk is None or desk.epochs.epoch & PRIVATE_EPOCH:
            return None
        return self._book.names(key, context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send this step's lookups off and take in what is answered."""
        for batch in self._desk.batches():
            self._pool.submit(LOOK, tuple(batch), partial(self._look, batch))
        self._collect()

    def _look(self, labels: list[bytes], ticket: Ticket) -> list[bool]:
        return self._mover.look([ChunkNames.of(label) for label in labels])

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store rows; each one succeeds or fails by itself."""
        self._submit(job_metadata, STORE)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load rows; each one succeeds or fails by itself."""
        self._submit(job_metadata, LOAD)

    def _submit(self, job: TransferJob, lane: int) -> None:
        keys, context = list(job.keys), job.req_context
        names = [self._names(key, context) for key in keys]
        if lane == STORE and self.options.offload_prompt_only:
            names = [
                name if self._book.is_prompt(key, context) else None
                for key, name in zip(keys, names, strict=True)
            ]
        self._jobs.begin(_Job(number=job.job_id, keys=keys, load=lane == LOAD, names=names))
        epoch = self._proof.epochs.epoch if self._proof is not None else 0
        for at, (key, name, row) in enumerate(zip(keys, names, job.chunk_ids, strict=True)):
            if name is None:
                # Not for this server: nothing to do, and nothing that failed.
                self._note(job.job_id, at, Outcome(Answer.MISSING if lane == LOAD else Answer.DONE))
            elif lane == LOAD:
                self.objects.place(key, name)
                work = partial(self._load_one, Place(int(row), bytes(key), epoch), name)
                self._pool.submit(LOAD, (job.job_id, at), work)
            else:
                again = name.label in self.objects.bad
                work = partial(self._store_one, int(row), name, again)
                self._pool.submit(STORE, (job.job_id, at), work)
        if not keys:
            self._jobs.end(job.job_id)

    def _row(self, row: int) -> memoryview:
        return self._rows[row * self._row_bytes : (row + 1) * self._row_bytes]

    def _store_one(self, row: int, names: ChunkNames, again: bool, ticket: Ticket) -> Outcome:
        with self._row(row) as view:
            return self._mover.put(view, names, again=again, wanted=lambda: ticket.wanted)

    def _load_one(self, place: Place, names: ChunkNames, ticket: Ticket) -> Outcome:
        return self._mover.get(self._row, place, names, ticket.claim)

    def _collect(self) -> None:
        for tag, result in self._pool.poll():
            if not isinstance(tag, tuple):
                continue
            if tag and isinstance(tag[0], bytes):
                found = result if isinstance(result, list) else [False] * len(tag)
                self._desk.answer(tag, found)
            elif isinstance(result, Outcome):
                job_id, at = tag
                self._note(job_id, at, result)

    def _note(self, job_id: int, at: int, outcome: Outcome) -> None:
        job = self._jobs[job_id]
        last = self._jobs.note(job_id, 1, [at] if outcome.good else [])
        names = job.names[at]
        if names is not None:
            self._settle(job, job.keys[at], names, outcome)
        if last:
            self._jobs.end(job_id)

    def _settle(self, job: _Job, key: OffloadKey, names: ChunkNames, outcome: Outcome) -> None:
        """What one transfer says about later ones."""
        self._tally.count("load" if job.load else "store", outcome.answer.value)
        if job.load and outcome.good and outcome.why == UNATTESTED:
            self._tally.unattested()
        if isinstance(outcome.verdict, Refusal):
            self.objects.spoil(names)
            # Only a load breaks what a lookup has promised.
            self._refuse(key if job.load else None, outcome.verdict)
        if job.load and not outcome.good:
            # Else the same request would come for it again and again.
            self._desk.settle([names.label], False)
        elif not job.load and outcome.good:
            self.objects.bad.pop(names.label, None)
            self._desk.settle([names.label], True)

    def _refuse(self, key: OffloadKey | None, refusal: Refusal) -> None:
        desk = self._proof
        if desk is None:
            return
        if key is not None:
            desk.verdicts.refused(key, refusal)
        desk.counters.refused(refusal, self.label)
        desk.journal.note(refusal, key or b"", self.label)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What has ended since the last call."""
        self._collect()
        return self._jobs.ended()

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping: deadlines are looked at in its steps."""
        return len(self._jobs) > 0

    def drain_jobs(self) -> None:
        """Wait until every job has ended: by its work or by its deadline."""
        self._jobs.drain(self._collect)

    def shutdown(self) -> None:
        """End threads and connections. A thread that is stuck in a call is left behind."""
        if not self._pool.stop(self.options.deadline_s):
            logger.warning("kvsafe: tier %s: a call is stuck, left behind", self.tier_type)
        self._store.close()
        try:
            self._rows.release()
        except BufferError:
            logger.warning("kvsafe: tier %s: a stuck call still uses a row", self.tier_type)

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Metrics of this tier."""
        return peer_metric_definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Counts since the last call, and the present gauges."""
        return self._tally.stats(self._pool.counts.stuck)


def _completed(options: dict[str, Any]) -> LmcacheOptions:
    given: dict[object, object] = {"type": TIER_TYPE}
    given.update(options)
    try:
        return complete_lmcache(check_kvsafe_lmcache(given))
    except Refused as refused:
        raise ConfigError(f"{TIER_TYPE}:", under(TIER_TYPE, refused.problems)) from None


def _announce(options: LmcacheOptions, name: str, rule: str, dims: tuple[int, ...]) -> None:
    logger.info(
        "kvsafe: tier %s: %s://%s:%d, trust %s, model %s, hash %s, pages %s, chunks %s",
        TIER_TYPE,
        options.scheme,
        options.host,
        options.port,
        options.trust,
        name,
        options.hash_algo,
        rule,
        dims,
    )
    if options.trust == "peer":
        logger.warning(
            "kvsafe: trust is peer: chunks of LMCache's peers are used although nothing proves "
            "which weights computed them, and what is computed on top of them is sealed as ours"
        )

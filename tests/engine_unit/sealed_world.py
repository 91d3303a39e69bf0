# SPDX-License-Identifier: Apache-2.0
"""A scheduler side without an engine: vLLM's real managers and tiers over sealed rows.

The test plays the worker (it writes and tags rows) and, with `HandTier`, the tier as well: a
transfer ends when the test says so, and how the test says.
"""

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from blake3 import blake3
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvsafe.engine.counters import Counters
from kvsafe.engine.journal import RefusalJournal
from kvsafe.engine.manager import IssuedStore, KVSafeManager
from kvsafe.engine.requests.verdicts import Verdicts
from kvsafe.engine.rows.epochs import EpochKeeper
from kvsafe.engine.rows.transfer import SealedRowsSpec
from kvsafe.engine.rows.watched import WatchedPrimaryTier, primary_tier
from kvsafe.engine.tiers.names import ForeignNames, ObjectNames
from kvsafe.engine.tiers.objects import FsObjects, adopt_objects
from kvsafe.engine.tiers.proving import ProofDesk, ProvingTier
from kvsafe.seal.header import Header, bitmap
from kvsafe.seal.refusal import Refusal
from tests.support.stations import bare_station

PAYLOAD = 4096
WAIT_S = 20.0
_FINAL = (LookupResult.HIT, LookupResult.MISS)


def key_of(number: int, group: int = 0) -> OffloadKey:
    """The offload key of an invented chunk."""
    return make_offload_key(blake3(b"key %d" % number).digest(), group)


def content_of(key: bytes) -> bytes:
    """The payload that belongs to a key."""
    return blake3(b"content " + key).digest(PAYLOAD)


class HandFuture(Future[Any]):
    """A future that runs what is waiting when someone insists on its answer."""

    def __init__(self, owner: "HandExecutor") -> None:
        super().__init__()
        self._owner = owner

    def result(self, timeout: float | None = None) -> Any:
        """The answer, after everything that was submitted has run."""
        self._owner.run()
        return super().result(timeout)


class HandExecutor(Executor):
    """Threads by hand: what is submitted runs when the test says so, in the test's thread."""

    def __init__(self) -> None:
        self.waiting: list[tuple[HandFuture, Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Take a task."""
        future = HandFuture(self)
        self.waiting.append((future, partial(fn, *args, **kwargs)))
        return future

    def run(self, count: int | None = None) -> None:
        """Run the oldest `count` tasks, all by default."""
        todo = self.waiting[:count]
        del self.waiting[: len(todo)]
        for future, task in todo:
            try:
                future.set_result(task())
            except Exception as exc:
                future.set_exception(exc)


class HandTier(SecondaryTierManager):
    """A tier by hand: objects in a dict; jobs end by `complete`, `fail` or `complete_some`."""

    def __init__(self, rows: memoryview) -> None:
        super().__init__(SimpleNamespace(), rows, "hand")
        self.rows = rows
        self.objects: dict[bytes, bytes] = {}
        self.stores: list[TransferJob] = []
        self.loads: list[TransferJob] = []
        self.results: list[JobResult] = []
        self.asked: list[bytes] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Present or not; always at once."""
        self.asked.append(key)
        return LookupResult.HIT if key in self.objects else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Take a job; nothing is copied yet."""
        self.stores.append(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Take a job; nothing is copied yet."""
        self.loads.append(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What the test has ended."""
        results, self.results = self.results, []
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """No wishes."""
        return RequestOffloadingContext()

    def has_pending_work(self) -> bool:
        """Whether jobs wait for the test."""
        return bool(self.stores or self.loads)

    def drain_jobs(self) -> None:
        """End everything, as a tier has to."""
        while self.stores:
            self.complete_store()
        while self.loads:
            self.complete_load()

    def complete_store(self, success: bool = True) -> None:
        """End the oldest store."""
        job = self.stores.pop(0)
        if success:
            for key, row in zip(job.keys, job.chunk_ids, strict=True):
                self.objects[key] = bytes(self._row(int(row)))
        self.results.append(JobResult(job.job_id, success))

    def complete_load(self, count: int | None = None, success: bool | None = None) -> None:
        """End the oldest load: the first `count` objects arrive, all of them by default."""
        job = self.loads.pop(0)
        keys = list(job.keys)
        arrived = keys[: len(keys) if count is None else count]
        for key, row in zip(arrived, job.chunk_ids, strict=False):
            self._row(int(row))[:] = self.objects.get(key, bytes(self.block_size_bytes))
        whole = len(arrived) == len(keys) if success is None else success
        partial = None if whole else tuple(arrived) or None
        self.results.append(JobResult(job.job_id, whole, partial))

    def _row(self, row: int) -> memoryview:
        return self.rows[row : row + 1].cast("B")


class World:
    """One scheduler process with `rows` rows, one worker, and the tiers that were asked for."""

    def __init__(
        self,
        folder: Path,
        *,
        rows: int = 4,
        policy: str = "lru",
        tiers: Sequence[str] = (),
        fail: bool = False,
        events: bool = False,
        foreign: tuple[ForeignNames, ...] = (),
        threads: HandExecutor | None = None,
        **options: Any,
    ) -> None:
        self.folder = folder
        # Resets that keep names and epochs in line with the file, so that old objects are met.
        options.setdefault("weights_survive_reset", True)
        # Under the monitor, so that every test of a manager is one of the monitor too.
        monitor = options.setdefault("monitor", "enforce")
        self.station = bare_station(folder, slice_bytes=PAYLOAD, rows=rows, **options)
        self.region = self.station.open_region(rows)
        setting = self.station.seal_setting
        self.names = ObjectNames(
            self.station.suite, self.station.keyring, setting.identity_digest, foreign
        )
        self.epochs = EpochKeeper(
            self.station.epoch_file,
            self._announce,
            weights_survive_reset=self.station.config.weights_survive_reset,
        )
        self.counters = Counters("blake3-keyed", ())
        self.verdicts = Verdicts(active=fail)
        self.primary = primary_tier(
            monitor,
            self.counters,
            self.region,
            self.epochs,
            cache_policy=policy,
            cache_policy_module_path=None,
            enable_events=events,
        )
        # What runs proofs; the manager and the desk ask for real threads by type.
        self.threads = cast(Any, threads or ThreadPoolExecutor(2))
        self.journal = RefusalJournal(lambda key: key)
        self.desk = ProofDesk(
            self.station,
            self.epochs,
            self.counters,
            self.journal,
            self.names,
            self.verdicts,
            self.threads,
            self.primary,
        )
        self.tiers = [self._tier(index, kind) for index, kind in enumerate(tiers)]
        self.manager = KVSafeManager(
            self.primary,
            list(self.tiers),
            self.station,
            self.epochs,
            self.counters,
            self.journal,
            self.verdicts,
            self.threads,
        )
        self.worker = self.station.slice_sealer(0)

    def _announce(self, epoch: int) -> None:
        self.region.announce_epoch(epoch)
        self.names.follow(epoch)

    def _tier(self, index: int, kind: str) -> ProvingTier:
        rows = self.primary.get_kv_memoryview()
        if kind == "hand":
            return ProvingTier(HandTier(rows), index, self.desk, None)
        root = self.folder / "store"
        options = {"type": "fs", "root_dir": str(root), "n_read_threads": 2, "n_write_threads": 2}
        inner = SecondaryTierFactory.create_secondary_tier(options, rows, _spec())
        store = adopt_objects(inner, str(root), self.station.config.quarantine)
        return ProvingTier(inner, index, self.desk, store)

    @property
    def tier(self) -> ProvingTier:
        """The first tier."""
        return self.tiers[0]

    @property
    def hand(self) -> HandTier:
        """The first tier, by hand."""
        inner = self.tier.inner
        assert isinstance(inner, HandTier)
        return inner

    @property
    def objects(self) -> FsObjects:
        """The files of the first tier."""
        store = self.tier._store
        assert isinstance(store, FsObjects)
        return store

    def file(self, key: OffloadKey) -> Path:
        """Where the file tier keeps the chunk of this key."""
        return Path(self.objects.path(OffloadKey(self.names.name(key))))

    # The engine's part

    def request(self, req_id: str | None = None) -> ReqContext:
        """A new request."""
        context = ReqContext(req_id=req_id or uuid.uuid4().hex)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """The end of one engine step."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def lookup(self, key: OffloadKey, context: ReqContext | None = None) -> LookupResult:
        """One lookup, for a new request if none is given."""
        return self.manager.lookup(key, context or self.request())

    def ask(self, key: OffloadKey, context: ReqContext | None = None) -> LookupResult:
        """Look up step by step until the answer is final.

        A request that was made here ends with it: vLLM's tiers keep an answer for as long as a
        request that asked lives.
        """
        own = self.request() if context is None else None
        deadline = time.monotonic() + WAIT_S
        while (answer := self.lookup(key, context or own)) not in _FINAL:
            if time.monotonic() > deadline:
                raise TimeoutError("no final answer")
            self.step()
            time.sleep(0.002)
        if own is not None:
            self.manager.on_request_finished(own)
        return answer

    def prepare(self, keys: Sequence[OffloadKey], context: ReqContext) -> SealedRowsSpec | None:
        """Allocate rows for a store and issue it, as the connector does; None if full."""
        output = self.manager.prepare_store(keys, context)
        if output is None:
            return None
        spec = output.store_spec
        assert isinstance(spec, SealedRowsSpec)
        for key, generation in zip(output.keys_to_store, spec.generations, strict=True):
            issued = IssuedStore(generation, spec.epoch, bitmap(1, [0]))
            self.manager.issue_store(key, issued)
        return spec

    def work(self, spec: SealedRowsSpec, skip: Collection[bytes] = ()) -> None:
        """The worker's part of a store: content and tag, except for the keys to skip."""
        layout = self.station.seal_setting.layout
        for key, row, generation in zip(spec.keys, spec.chunk_ids, spec.generations, strict=True):
            if key in skip:
                continue
            view = self.region.row(int(row))
            view[layout.header_bytes : layout.header_bytes + PAYLOAD] = content_of(key)
            self.worker.seal_slice(view, key, spec.epoch, generation)

    def store(self, *keys: OffloadKey, context: ReqContext | None = None) -> ReqContext:
        """Store chunks from allocation to readiness."""
        context = context or self.request()
        spec = self.prepare(keys, context)
        assert spec is not None
        self.work(spec)
        self.manager.complete_store([OffloadKey(key) for key in spec.keys], context)
        self.manager.settle()
        return context

    def flush(self) -> None:
        """End steps until no tier has work left."""
        deadline = time.monotonic() + WAIT_S
        while self.manager.has_pending_work():
            if time.monotonic() > deadline:
                raise TimeoutError("a tier never became idle")
            self.step()
            time.sleep(0.002)

    def forget_rows(self) -> None:
        """Lose the host tier but not the epoch, as a restart does."""
        self.flush()
        self.primary.reset_cache()

    # What is true

    def refusals(self) -> dict[str, int]:
        """How often each refusal number was counted since the start."""
        found: dict[str, int] = {}
        for (name, labels), amount in self.counters._counts.items():
            if name == "kvsafe:refusals":
                found[labels[0]] = found.get(labels[0], 0) + amount
        return found

    def chunks(self) -> dict[OffloadKey, Any]:
        """Every chunk that the policy holds, ready or not."""
        policy = self.primary._policy
        held = getattr(policy, "chunks", None)
        return dict(held) if held is not None else {**policy.t1, **policy.t2}

    def recount(self) -> None:
        """Raises `AssertionError` unless vLLM's counters and ours are what a recount finds."""
        primary, chunks = self.primary, self.chunks()
        counts = [chunk.ref_cnt for chunk in chunks.values()]
        assert primary._num_evictable_cache_chunks == sum(count == 0 for count in counts)
        assert primary._num_write_pending_chunks == sum(count == -1 for count in counts)
        rows = [int(chunk.chunk_id) for chunk in chunks.values()]
        free = list(primary._free_list)
        fresh = range(primary._num_allocated_chunks, primary._num_chunks)
        held = [row for row in primary._held_back if row not in rows]
        assert sorted([*rows, *free, *fresh, *held]) == list(range(primary._num_chunks))
        pending = {key for key, chunk in chunks.items() if chunk.ref_cnt == -1}
        assert set(primary._pending_since) == pending
        assert primary._overdue <= pending
        assert all(chunks[key].ref_cnt > 0 for key in primary._withdrawn)
        assert self.diverged() == []
        evictable = getattr(primary._policy, "_evictable", None)
        if evictable is not None:
            # What a request awaits is out of the policy's sight until the step ends.
            hidden = primary.shield._hidden
            assert not evictable & hidden
            idle = {key for key, chunk in chunks.items() if chunk.ref_cnt == 0}
            assert evictable | hidden == idle

    def offered(self) -> list[OffloadKey]:
        """Chunks that a lookup would promise now."""
        context = ReqContext(req_id="onlooker")
        return [
            key for key in self.chunks() if self.primary.lookup(key, context) is LookupResult.HIT
        ]

    def prove_offers(self) -> None:
        """Raises `AssertionError` unless every offered chunk opens and has its own content."""
        layout = self.station.seal_setting.layout
        for key in self.offered():
            row = self.primary.row_of(key)
            assert row is not None
            view = self.region.row(row)
            answer = self.station.open_row(view, key, self.epochs.epoch)
            assert isinstance(answer, Header), answer
            body = bytes(view[layout.header_bytes : layout.header_bytes + PAYLOAD])
            assert body == content_of(key)

    def judge(self, key: OffloadKey, row: int) -> Header | Refusal:
        """Open a row as a worker would."""
        return self.station.open_row(self.region.row(row), key, self.epochs.epoch)

    def diverged(self) -> list[str]:
        """What the monitor has found and not yet told."""
        primary = self.primary
        if not isinstance(primary, WatchedPrimaryTier):
            return []
        return [*map(str, primary.watch.monitor.found), *primary.watch._told]

    def close(self) -> None:
        """End threads and let go of the memory."""
        if isinstance(self.threads, ThreadPoolExecutor):
            self.threads.shutdown()
        for tier in self.tiers:
            tier.shutdown()
        with contextlib.suppress(Exception):
            self.primary.shutdown()


@contextlib.contextmanager
def running(world: World, *, sound: bool = True) -> Iterator[World]:
    """The world, closed at the end; its monitor must have nothing to say about a `sound` one."""
    try:
        yield world
        assert not sound or world.diverged() == []
    finally:
        world.close()


def _spec() -> Any:
    group = SimpleNamespace(tokens_per_block=16, layer_names=("model.layers.0",))
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False
    )
    config = SimpleNamespace(
        groups=(group,),
        parallel=parallel,
        model=SimpleNamespace(name="some/model", dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=16),
        canonical_layout=False,
        replicated_layout=False,
        kv_cache_layout=None,
    )
    return SimpleNamespace(
        config=config,
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
    )

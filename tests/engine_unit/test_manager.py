# SPDX-License-Identifier: Apache-2.0
"""The manager over vLLM's own: what is offered is sealed, whole, present and of this epoch.

vLLM's counters are counted again after every step, with both of its policies.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

from kvsafe.engine.manager import IssuedStore, KVSafeManager
from kvsafe.engine.rows.loads import OpenLoads
from kvsafe.engine.rows.primary import SealedPrimaryTier
from kvsafe.engine.rows.transfer import ChunkFailure, SealedRowsSpec
from kvsafe.engine.tiers.proving import ProvingTier
from kvsafe.seal.epoch import EpochError, EpochFile
from kvsafe.seal.header import Header, bitmap
from kvsafe.seal.layout import LayoutError
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.engine_unit.sealed_world import HandExecutor, World, key_of, running

A, B, C, D, E = (key_of(number) for number in range(1, 6))
HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
REFUSAL = Refusal.of(RefusalKind.PAYLOAD_TAG, "payload", "x", "y")


@pytest.fixture(params=["lru", "arc"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(tmp_path: Path, policy: str) -> Iterator[World]:
    with running(World(tmp_path, policy=policy)) as made:
        yield made


def kinds(world: World) -> list[int]:
    return sorted(int(number) for number in world.refusals())


# --- stores --------------------------------------------------------------------------------------


def test_a_chunk_is_ready_when_it_is_sealed_and_not_before(tmp_path: Path, policy: str) -> None:
    threads = HandExecutor()
    with running(World(tmp_path, policy=policy, threads=threads)) as world:
        context = world.request()
        spec = world.prepare([A], context)
        assert spec is not None
        assert world.lookup(A) is PENDING
        world.work(spec)
        assert world.lookup(A) is PENDING
        world.manager.complete_store([A], context)
        world.step()
        assert world.lookup(A) is PENDING
        assert world.manager.has_pending_work()
        row = world.primary.row_of(A)
        assert row is not None and isinstance(world.judge(A, row), Refusal)
        world.recount()
        threads.run()
        world.flush()
        assert world.lookup(A) is HIT
        assert isinstance(world.judge(A, row), Header)
        world.recount()
        world.prove_offers()


def test_a_request_may_end_while_its_chunks_are_being_sealed(tmp_path: Path) -> None:
    threads = HandExecutor()
    with running(World(tmp_path, threads=threads)) as world:
        context = world.request()
        spec = world.prepare([A, B], context)
        assert spec is not None
        world.work(spec)
        world.manager.complete_store([A, B], context)
        world.manager.on_request_finished(context)
        threads.run()
        world.flush()
        assert world.offered() == [A, B]
        assert world.manager._req_state == {}


def test_what_one_writer_left_out_fails_alone(world: World) -> None:
    context = world.request()
    spec = world.prepare([A, B, C], context)
    assert spec is not None
    world.work(spec, skip=[B])
    world.manager.complete_store([A, B, C], context)
    world.manager.settle()
    assert world.offered() == [A, C]
    assert kinds(world) == [RefusalKind.WRITER_GENERATION]
    assert world.counters.totals["kvsafe:stores_failed"] == 1
    world.recount()
    world.prove_offers()
    world.store(B)
    assert set(world.offered()) == {A, B, C}


def test_a_store_that_failed_leaves_nothing(world: World) -> None:
    context = world.request()
    spec = world.prepare([A, B], context)
    assert spec is not None
    world.work(spec)
    world.manager.complete_store([A, B], context, success=False)
    assert world.offered() == [] and world.chunks() == {}
    assert world.manager._issued == {}
    world.recount()
    world.store(A, context=context)
    assert world.offered() == [A]


def test_a_store_of_another_generation_is_fenced(world: World) -> None:
    context = world.request()
    spec = world.prepare([A, B], context)
    assert spec is not None
    world.work(spec)
    late = IssuedStore(spec.generations[0] - 1, spec.epoch, bitmap(1, [0]))
    world.manager.issue_store(A, late)
    world.manager.complete_store([A, B], context)
    world.manager.settle()
    assert world.offered() == [B]
    assert kinds(world) == [RefusalKind.FENCE]
    world.recount()


def test_a_worker_of_another_generation_is_fenced(world: World) -> None:
    context = world.request()
    spec = world.prepare([A], context)
    assert spec is not None
    spec.generations = [spec.generations[0] + 1]
    world.work(spec)
    world.manager.complete_store([A], context)
    world.manager.settle()
    assert world.offered() == []
    assert kinds(world) == [RefusalKind.WRITER_GENERATION]


def test_a_record_that_a_tier_brought_never_passes_for_a_writers(tmp_path: Path) -> None:
    # Found by the long life below: counted from 1 for each row, generations came again.
    with running(World(tmp_path, rows=2)) as world:
        for number in range(10):
            key = key_of(number)
            context = world.store(key)
            row = world.primary.row_of(key)
            assert row is not None
            brought = bytes(world.region.row(row))
            world.primary.withdraw([key])
            for other in range(4):
                spec = world.prepare([key], context)
                assert spec is not None
                world.region.row(int(spec.chunk_ids[0]))[:] = brought
                world.manager.complete_store([key], context)
                world.manager.settle()
                assert world.offered() == [], (number, other)


def test_a_store_that_was_never_issued_or_was_withheld_is_not_sealed(world: World) -> None:
    context = world.request()
    spec = world.prepare([A, B, C], context)
    assert spec is not None
    world.work(spec)
    world.manager._issued.pop(A)
    withheld = Refusal.of(RefusalKind.COPY_PLAN, "blocks", "one", "another")
    world.manager.issue_store(B, withheld)
    world.manager.complete_store([A, B, C], context)
    world.manager.settle()
    assert world.offered() == [C]
    assert kinds(world) == [RefusalKind.FENCE, RefusalKind.COPY_PLAN]
    world.recount()


def test_a_row_says_what_was_not_written(tmp_path: Path) -> None:
    with running(World(tmp_path, slots=2)) as world:
        context = world.request()
        spec = world.prepare([A], context)
        assert spec is not None
        world.work(spec)
        issued = IssuedStore(spec.generations[0], spec.epoch, bitmap(2, [0]))
        world.manager.issue_store(A, issued)
        world.manager.complete_store([A], context)
        world.manager.settle()
        row = world.primary.row_of(A)
        assert row is not None
        opener, view = world.station.opener(), world.region.row(row)
        assert isinstance(opener.open(view, A, world.epochs.epoch, [0]), Header)
        refused = opener.open(view, A, world.epochs.epoch, [0, 1])
        assert isinstance(refused, Refusal) and refused.kind is RefusalKind.COVERAGE


def test_a_full_tier_stores_nothing_and_loses_nothing(world: World) -> None:
    context = world.store(A, B, C, D)
    world.manager.prepare_load([A, B, C, D], context)
    assert world.prepare([E], world.request()) is None
    world.recount()
    world.manager.complete_load([A, B, C, D], context)
    world.store(E)
    assert len(world.offered()) == 4 and E in world.offered()
    world.recount()
    world.prove_offers()


def test_documents_without_room_stop_the_start(tmp_path: Path) -> None:
    with running(World(tmp_path)) as world:
        world.station._geometry = bytes(4096)
        with pytest.raises(LayoutError, match="geometry document"):
            type(world.manager)(
                world.primary,
                [],
                world.station,
                world.epochs,
                world.counters,
                world.journal,
                world.verdicts,
                world.threads,
            )


# --- loads ---------------------------------------------------------------------------------------


def test_a_load_names_key_generation_and_epoch_of_every_row(world: World) -> None:
    context = world.store(A, B)
    spec = world.manager.prepare_load([B, A], context)
    assert isinstance(spec, SealedRowsSpec)
    assert spec.keys == [B, A] and spec.withheld is None
    assert spec.generations == [world.primary.generation_of(B), world.primary.generation_of(A)]
    assert list(spec.chunk_ids) == [world.primary.row_of(B), world.primary.row_of(A)]
    assert spec.epoch == world.epochs.epoch
    world.recount()
    world.manager.complete_load([A, B], context)
    world.recount()


def test_a_chunk_that_is_refused_while_it_is_read_leaves_with_its_last_reader(
    world: World,
) -> None:
    context, other = world.store(A, B), world.request()
    world.manager.prepare_load([A], context)
    world.manager.prepare_load([A], other)
    world.manager.fail_chunks([ChunkFailure(1, True, A, REFUSAL)])
    assert world.lookup(A) is MISS
    assert world.offered() == [B]
    world.recount()
    world.manager.complete_load([A], context)
    assert world.lookup(A) is MISS and A in world.chunks()
    world.recount()
    world.manager.complete_load([A], other)
    assert A not in world.chunks()
    world.recount()
    world.store(A)
    assert world.lookup(A) is HIT
    world.prove_offers()


def test_an_idle_chunk_that_is_refused_leaves_at_once(world: World) -> None:
    world.store(A, B)
    failures = [ChunkFailure(1, True, A, REFUSAL), ChunkFailure(1, True, E, REFUSAL)]
    world.manager.fail_chunks(failures)
    assert world.offered() == [B]
    assert world.refusals() == {"1001": 2}
    world.recount()


def test_a_store_failure_takes_no_chunk_away(world: World) -> None:
    world.store(A)
    world.manager.fail_chunks([ChunkFailure(1, False, A, REFUSAL)])
    assert world.offered() == [A]


def test_a_failed_store_is_counted_once(world: World) -> None:
    context = world.request()
    spec = world.prepare((A, B), context)
    assert spec is not None
    world.work(spec)
    failures = [ChunkFailure(1, False, A, REFUSAL)]
    world.manager.note_failed_stores(failures)
    world.manager.fail_chunks(failures)
    world.manager.complete_store([OffloadKey(key) for key in spec.keys], context)
    world.manager.settle()
    assert world.offered() == [B]
    assert world.refusals() == {"1001": 1}
    world.recount()
    # Control: the next failure of the same chunk is counted again.
    world.manager.fail_chunks(failures)
    assert world.refusals() == {"1001": 2}


def test_a_removed_chunk_is_told_to_whoever_listens(tmp_path: Path, policy: str) -> None:
    with running(World(tmp_path, policy=policy, events=True)) as world:
        world.store(A, B)
        told = [(list(event.keys), event.removed) for event in world.manager.take_events()]
        assert told == [([A, B], False)]
        world.manager.fail_chunks([ChunkFailure(1, True, A, REFUSAL)])
        told = [(list(event.keys), event.removed) for event in world.manager.take_events()]
        assert told == [([A], True)]


def test_a_chunk_that_is_gone_since_its_lookup_fails_the_load(world: World) -> None:
    context = world.store(A, B)
    assert world.lookup(A, context) is HIT
    world.primary.withdraw([A])
    spec = world.manager.prepare_load([A, B], context)
    assert isinstance(spec, SealedRowsSpec)
    assert spec.withheld is not None and spec.withheld.kind is RefusalKind.TIER_READ
    assert spec.blamed == [bytes(A)] and spec.keys == [B]
    world.recount()
    world.manager.complete_load([A, B], context)
    world.recount()
    assert world.manager._loads.lost == {}
    assert world.lookup(A) is MISS and world.lookup(B) is HIT


def test_a_load_of_nothing_but_lost_chunks_fails_too(world: World) -> None:
    context = world.request()
    spec = world.manager.prepare_load([A, B], context)
    assert isinstance(spec, SealedRowsSpec)
    assert spec.withheld is not None and spec.keys == []
    world.manager.complete_load([A, B], context)
    world.recount()


def test_two_loads_of_one_chunk_that_one_of_them_lost_stay_balanced(world: World) -> None:
    first, second = world.request(), world.request()
    world.manager.prepare_load([A], first)
    world.store(A)
    spec = world.manager.prepare_load([A], second)
    assert isinstance(spec, SealedRowsSpec) and spec.withheld is None
    world.manager.complete_load([A], second)
    world.manager.complete_load([A], first)
    world.recount()
    assert world.chunks()[A].ref_cnt == 0


# --- deadlines, epochs, resets -------------------------------------------------------------------


def test_a_write_over_its_deadline_is_a_miss_for_whoever_waits(world: World) -> None:
    context = world.request()
    spec = world.prepare([A], context)
    assert spec is not None
    assert world.lookup(A) is PENDING
    world.primary._pending_since[A] -= world.station.config.load_deadline_s + 1
    assert world.lookup(A) is MISS and world.lookup(A) is MISS
    assert world.refusals() == {str(RefusalKind.DEADLINE.value): 1}
    world.recount()
    world.work(spec)
    world.manager.complete_store([A], context)
    world.manager.settle()
    assert world.lookup(A) is HIT
    world.recount()


def test_nothing_is_offered_stored_or_sealed_while_the_epoch_is_uncertain(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store(A)
    context = world.request()
    spec = world.prepare([B], context)
    assert spec is not None
    world.work(spec)

    def fail(reason: str) -> int:
        raise EpochError(Path("epoch.json"), "cannot be written", "Do something.")

    with monkeypatch.context() as patch:
        patch.setattr(world.station.epoch_file, "raise_epoch", fail)
        assert world.epochs.raise_epoch("test") is False
    assert world.lookup(A) is MISS
    assert world.manager.prepare_store([C], world.request()) is None
    world.manager.complete_store([B], context)
    world.manager.settle()
    assert B not in world.chunks()
    assert kinds(world) == [RefusalKind.FENCE]
    world.recount()
    assert world.epochs.raise_epoch("again") is True
    world.manager.reset_cache()
    world.store(A)
    assert world.lookup(A) is HIT


def test_a_raise_by_another_process_revokes_what_lies_here(world: World) -> None:
    context = world.store(A, B)
    world.manager.prepare_load([B], context)
    pending = world.request()
    spec = world.prepare([C], pending)
    assert spec is not None
    world.work(spec)
    station = world.station
    secret = station.keyring.state_secret
    other = EpochFile(
        world.folder / "state" / "epoch.json", lambda data: station.suite.tag(secret, data)
    )
    epoch = other.raise_epoch("another process")
    world.epochs._next_poll = 0.0
    world.step()
    assert world.epochs.epoch == world.region.epoch == epoch
    for key in (A, B):
        assert world.lookup(key) is MISS
    assert A not in world.chunks() and B in world.chunks()
    world.recount()
    spec = world.manager.prepare_load([B], world.request())
    assert isinstance(spec, SealedRowsSpec) and spec.withheld is not None
    world.manager.complete_load([B], context)
    assert B not in world.chunks()
    world.manager.complete_store([C], pending)
    world.manager.settle()
    assert world.offered() == []
    assert kinds(world) == [RefusalKind.FENCE]
    world.store(A, B, C)
    assert set(world.offered()) == {A, B, C}
    world.recount()
    world.prove_offers()


def test_a_reset_revokes_everything_and_generations_go_on(world: World) -> None:
    world.store(A, B)
    row, generation = world.primary.row_of(A), world.primary.generation_of(A)
    assert row is not None and generation is not None
    old = bytes(world.region.row(row))
    assert world.epochs.raise_epoch("reset")
    world.manager.reset_cache()
    assert world.offered() == []
    world.recount()
    world.store(A)
    assert world.primary.row_of(A) == row
    assert world.primary.generation_of(A) not in (None, generation)
    world.region.row(row)[:] = old
    answer = world.judge(A, row)
    assert isinstance(answer, Refusal) and answer.kind is RefusalKind.EPOCH_REVOKED


def test_a_reset_waits_for_what_is_being_sealed(tmp_path: Path) -> None:
    threads = HandExecutor()
    with running(World(tmp_path, threads=threads)) as world:
        context = world.request()
        spec = world.prepare([A], context)
        assert spec is not None
        world.work(spec)
        world.manager.complete_store([A], context)
        assert threads.waiting
        assert world.epochs.raise_epoch("reset")
        world.manager.reset_cache()
        assert threads.waiting == []
        assert world.offered() == [] and world.chunks() == {}
        assert kinds(world) == [RefusalKind.FENCE]
        world.recount()


# --- a long random life --------------------------------------------------------------------------

KEYS = [key_of(number) for number in range(9)]


class Life:
    """Requests that store and load at random over a tier whose objects rot at random."""

    def __init__(self, world: World, threads: HandExecutor, seed: int) -> None:
        self.world, self.threads = world, threads
        self.rng = random.Random(seed)
        self.contexts: list[ReqContext] = [world.request()]
        self.stores: list[tuple[ReqContext, SealedRowsSpec]] = []
        self.loads: list[tuple[ReqContext, list[OffloadKey]]] = []
        self.hits = 0

    def live(self, steps: int) -> None:
        """Do things, and count again after each."""
        acts = [
            *[self.look] * 6,
            *[self.store] * 3,
            *[self.end_store] * 3,
            *[self.load] * 3,
            *[self.end_load] * 3,
            *[self.serve] * 4,
            *[self.step] * 4,
            self.begin,
            self.end,
            self.rot,
        ]
        for number in range(steps):
            act = self.reset if number % 90 == 89 else self.rng.choice(acts)
            act()
            self.world.recount()
            self.world.prove_offers()

    def some(self, most: int) -> list[OffloadKey]:
        return self.rng.sample(KEYS, self.rng.randint(1, most))

    def begin(self) -> None:
        self.contexts.append(self.world.request())

    def end(self) -> None:
        busy = [context for context, _ in self.loads]
        idle = [context for context in self.contexts if context not in busy]
        if len(self.contexts) > 1 and idle:
            context = self.rng.choice(idle)
            self.contexts.remove(context)
            self.world.manager.on_request_finished(context)

    def look(self) -> None:
        answer = self.world.lookup(self.rng.choice(KEYS), self.rng.choice(self.contexts))
        self.hits += answer is HIT

    def store(self) -> None:
        context = self.rng.choice(self.contexts)
        spec = self.world.prepare(self.some(3), context)
        if spec is not None and spec.keys:
            self.stores.append((context, spec))

    def end_store(self) -> None:
        if not self.stores:
            return
        context, spec = self.stores.pop(self.rng.randrange(len(self.stores)))
        keys = [OffloadKey(key) for key in spec.keys]
        skip = self.rng.sample(keys, 1) if self.rng.random() < 0.2 else []
        self.world.work(spec, skip)
        success = self.rng.random() < 0.85
        self.world.manager.complete_store(keys, context, success=success)

    def load(self) -> None:
        context = self.rng.choice(self.contexts)
        keys = self.some(2)
        if self.rng.random() < 0.9:
            keys = [key for key in keys if self.world.lookup(key, context) is HIT]
        if keys:
            self.world.manager.prepare_load(keys, context)
            self.loads.append((context, keys))

    def end_load(self) -> None:
        if not self.loads:
            return
        context, keys = self.loads.pop(self.rng.randrange(len(self.loads)))
        if self.rng.random() < 0.2:
            self.world.manager.fail_chunks([ChunkFailure(1, True, keys[0], REFUSAL)])
        self.world.manager.complete_load(keys, context)

    def serve(self) -> None:
        hand = self.world.hand
        if hand.stores and self.rng.random() < 0.6:
            hand.complete_store(self.rng.random() < 0.9)
        elif hand.loads:
            count = len(list(hand.loads[0].keys))
            hand.complete_load(self.rng.choice([count, count, count, 0, count // 2]))

    def step(self) -> None:
        self.threads.run(self.rng.choice([None, 1, 2]))
        self.world.step()

    def rot(self) -> None:
        objects = self.world.hand.objects
        # In the order of keys: that of names depends on this run's secret.
        present = [name for key in KEYS if (name := self.world.names.name(key)) in objects]
        if len(present) < 2:
            return
        left, right = self.rng.sample(present, 2)
        if self.rng.random() < 0.5:
            objects[left], objects[right] = objects[right], objects[left]
        else:
            at = self.rng.randrange(len(objects[left]))
            rotten = bytearray(objects[left])
            rotten[at] ^= 1
            objects[left] = bytes(rotten)

    def reset(self) -> None:
        assert self.world.epochs.raise_epoch("reset")
        self.world.manager.reset_cache()
        # As vLLM's scheduler does: completions of jobs from before are not handed on.
        self.stores.clear()
        self.loads.clear()


@pytest.mark.parametrize("seed", range(12))
def test_a_long_random_life_never_offers_what_is_not_proven(
    tmp_path: Path, policy: str, seed: int
) -> None:
    threads = HandExecutor()
    with running(World(tmp_path, policy=policy, rows=6, tiers=["hand"], threads=threads)) as world:
        life = Life(world, threads, seed)
        life.live(300)
        assert life.hits > 0
        assert world.refusals()


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "promotions are not proven": (ProvingTier, "_open", lambda *_: None),
    "generations are not compared": (
        KVSafeManager,
        "_seal_one",
        lambda self, key: None,
    ),
    "a discarded chunk is counted as evictable for ever": (
        SealedPrimaryTier,
        "_remove_idle",
        lambda self, key, chunk: self._policy.remove(key),
    ),
    "a withdrawn chunk is still offered and never leaves": (
        SealedPrimaryTier,
        "complete_load",
        CPUPrimaryTierOffloadingManager.complete_load,
    ),
    "a lost chunk is unpinned": (OpenLoads, "_was_lost", lambda *_: False),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_does_not_survive_a_long_life(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, faulty = FAULTS[name]
    monkeypatch.setattr(owner, method, faulty)
    seen = 0
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        threads = HandExecutor()
        world = World(folder, rows=6, tiers=["hand"], threads=threads)
        with running(world, sound=False):
            try:
                Life(world, threads, seed).live(300)
            except (AssertionError, KeyError):
                seen += 1
                monkeypatch.undo()
                world.threads.run()
        if seen:
            break
    assert seen, "no life has seen it"

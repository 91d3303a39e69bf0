# SPDX-License-Identifier: Apache-2.0
"""Field cases F12 and F18 to F24, on vLLM's real scheduler, managers and policies.

Each fault that users reported, as a trial; beside it what must work, so that a cache that never
hits passes none of these. F18 to F20 run the real scheduler with our connector on simulated
memory (`fuzz.world`): its oracle checks every loaded block, every answer, and that nothing is
left at rest. Real engines do the same cases in `tests/engine/test_requests.py`.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult

from fuzz.world.outcome import Outcome
from fuzz.world.plan import Event, Plan, Setting
from fuzz.world.world import run_plan
from kvsafe.engine.requests.parking import Parking
from kvsafe.engine.scheduler import KVSafeConnectorScheduler
from kvsafe.engine.tiers.proving import ProvingTier
from kvsafe.seal.refusal import RefusalKind
from tests.engine_unit.sealed_world import HandExecutor, HandTier, World, key_of, running
from tests.engine_unit.stock_world import StockWorld

A, B, C, D, E, F = (key_of(number) for number in range(1, 7))
HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
LATE = {str(RefusalKind.DEADLINE.value): 1}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=["lru", "arc"])
def policy(request: pytest.FixtureRequest) -> str:
    """vLLM's two replacement policies."""
    return str(request.param)


@pytest.fixture
def hand(tmp_path: Path, policy: str) -> Iterator[World]:
    """A world of four rows with a tier by hand."""
    threads = HandExecutor()
    with running(World(tmp_path, policy=policy, tiers=["hand"], threads=threads)) as world:
        yield world


def advance(world: World) -> None:
    """A few steps, with every proof that waits."""
    for _ in range(3):
        world.threads.run()
        world.step()


def pass_deadlines(world: World) -> None:
    """Everything that is under way has taken longer than it may."""
    watch = world.tier._watch
    watch._running = {
        job: replace(seen, since=seen.since - seen.limit_s - 1)
        for job, seen in watch._running.items()
    }
    for key in world.primary._pending_since:
        world.primary._pending_since[key] -= world.station.config.load_deadline_s + 1


# --- F12: a write that never completes ------------------------------------------------------------


def test_f12_whoever_waits_for_a_store_that_never_ends_gets_a_miss(hand: World) -> None:
    writer, waiter = hand.request(), hand.request()
    spec = hand.prepare([A], writer)
    assert spec is not None
    for _ in range(5):
        assert hand.lookup(A, waiter) is PENDING
        hand.step()
    assert hand.refusals() == {}
    pass_deadlines(hand)
    assert hand.lookup(A, waiter) is MISS and hand.lookup(A) is MISS
    assert hand.refusals() == LATE
    # Only the row itself stays taken, as its worker may still write: the others serve.
    hand.store(B, C, D)
    assert hand.lookup(D) is HIT
    hand.work(spec)
    hand.manager.complete_store([A], writer)
    hand.manager.settle()
    assert hand.lookup(A) is HIT
    hand.recount()
    hand.prove_offers()


def test_f12_a_cascade_that_never_ends_lets_go_of_its_pins(hand: World) -> None:
    hand.store(A, B)
    assert [hand.chunks()[key].ref_cnt for key in (A, B)] == [1, 1]
    hand.step()
    hand.step()
    assert [hand.chunks()[key].ref_cnt for key in (A, B)] == [1, 1] and hand.refusals() == {}
    pass_deadlines(hand)
    hand.step()
    assert [hand.chunks()[key].ref_cnt for key in (A, B)] == [0, 0]
    assert hand.refusals() == LATE and not hand.manager._jobs
    # The tier reports after all: nothing is unpinned a second time.
    hand.hand.complete_store()
    advance(hand)
    assert [hand.chunks()[key].ref_cnt for key in (A, B)] == [0, 0]
    hand.store(C, D, E, F)
    hand.recount()
    hand.prove_offers()


def test_f12_a_promotion_that_never_ends_is_a_miss_and_frees_its_waiters(hand: World) -> None:
    hand.store(A)
    hand.hand.complete_store()
    advance(hand)
    hand.primary.reset_cache()
    waiters = [hand.request() for _ in range(3)]
    assert [hand.lookup(A, waiter) for waiter in waiters] == [PENDING] * 3
    hand.step()
    pass_deadlines(hand)
    assert [hand.lookup(A, waiter) for waiter in waiters] == [MISS] * 3
    advance(hand)
    assert hand.chunks() == {} and not hand.manager._jobs
    assert sum(hand.refusals().values()) >= 1 and set(hand.refusals()) == set(LATE)
    assert len(hand.primary._held_back) == 1
    for waiter in waiters:
        hand.manager.on_request_finished(waiter)
    hand.hand.complete_load()
    advance(hand)
    assert not hand.primary._held_back
    # Control: in time it is a hit for all of them.
    waiters = [hand.request() for _ in range(3)]
    assert [hand.lookup(A, waiter) for waiter in waiters] == [PENDING] * 3
    hand.step()
    hand.hand.complete_load()
    advance(hand)
    assert [hand.lookup(A, waiter) for waiter in waiters] == [HIT] * 3
    hand.recount()


# --- F18, F19, F20: aborts and preemptions, on the real scheduler -------------------------------

ROOMY = Setting(rows=8, blocks=24)


def play(setting: Setting, *events: Event | Sequence[Event], flavour: str = "kvsafe") -> Outcome:
    """Run a script; what is still under way at its end comes to rest and is judged."""
    flat: list[Event] = []
    for event in events:
        flat.extend([event] if isinstance(event, Event) else event)
    return run_plan(Plan(flavour, setting, tuple(flat)))


def arrive(tokens: int, family: int = 1, answer: int = 3) -> Event:
    """A request; those of one family begin with the same tokens. `tokens` counts from 2."""
    return Event("arrive", tokens, 2 * family - 1, answer - 1)


def steps(count: int = 1) -> list[Event]:
    """Engine steps in which no transfer ends by itself."""
    return [Event("step")] * count


COPY, ABORT = Event("copy", 5), Event("abort")
# A prompt that is in host memory and no longer in the accelerator.
OFFLOADED = [arrive(20), Event("idle", 19)]


@pytest.mark.parametrize("others", [0, 2])
def test_f18_a_request_that_was_never_scheduled_may_be_aborted(others: int) -> None:
    # More requests than seats, so that the last one is not looked at before its end.
    setting = replace(ROOMY, seats=2, rows=16)
    waiting = [arrive(20, family=2)] * others
    run = play(setting, OFFLOADED, waiting, steps(others), arrive(20), Event("abort", others))
    assert run.clean, run.finding
    assert run.counts["did_abort"] == 1 and run.counts["load"] == 0
    # What it would have taken is still there for the next one.
    control = play(
        setting, OFFLOADED, waiting, steps(others), arrive(20), Event("abort", others), arrive(20)
    )
    assert control.clean and control.counts["load"] == 1


@pytest.mark.parametrize("flavour", ["lru", "arc"])
def test_f18_any_order_of_arrivals_aborts_preemptions_and_ends(flavour: str) -> None:
    total: Counter[str] = Counter()
    names = ["arrive"] * 5 + ["step"] * 12 + ["copy", "copy_one", "proofs", "tier_ok"] * 3
    names += ["abort"] * 2 + ["abort_late", "reset_running", "idle"]
    for seed in range(12):
        rng = random.Random(seed)
        setting = Setting(
            rows=3 + seed % 5,
            blocks=12 + seed % 9,
            policy=flavour,
            pipelined=seed % 3 == 0,
            lagging=seed % 4 == 1,
            tiers=((), (False,), (True,))[seed % 3],
        )
        script = [Event(rng.choice(names), *(rng.randrange(256) for _ in "abc")) for _ in "x" * 90]
        run = play(setting, script)
        assert run.clean, (seed, run.finding)
        total += run.counts
    # A world in which nothing happens proves nothing.
    assert min(total[name] for name in ("did_abort", "did_abort_late", "preempted", "load")) > 4


MOMENTS: dict[str, tuple[Setting, list[Event]]] = {
    "before the worker has it": (replace(ROOMY, lagging=True), [*steps(), ABORT]),
    "in flight": (ROOMY, [*steps(), ABORT]),
    "between two copies": (ROOMY, [*steps(), Event("copy", 0), ABORT]),
    "done and not reported": (ROOMY, [*steps(), COPY, ABORT]),
    "as its report comes in": (
        replace(ROOMY, pipelined=True), [*steps(), COPY, Event("abort_late"), *steps()],
    ),
}  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
def test_f19_an_abort_during_a_load_gives_every_block_back(moment: str) -> None:
    setting, events = MOMENTS[moment]
    # Then others that need all the blocks: a copy that lands late would land in theirs.
    after = [arrive(40, family=2, answer=5), arrive(30, family=3), *steps(2), COPY, *steps(3)]
    run = play(setting, OFFLOADED, arrive(20), events, after)
    assert run.clean, run.finding
    # One of the others may load the same chunks again.
    assert run.counts["load"] in (1, 2)
    assert run.counts["did_abort"] + run.counts["did_abort_late"] == 1
    # Control: without the abort the same load serves its request.
    kept = [event for event in events if not event.name.startswith("abort")]
    control = play(setting, OFFLOADED, arrive(20), kept, after)
    assert control.clean and control.counts["load"] == 1
    assert control.counts["landed_blocks"] == control.counts["load_blocks"] > 0


@pytest.mark.parametrize("lagging", [False, True])
def test_f20_a_preempted_request_may_come_back_while_its_store_is_in_flight(lagging: bool) -> None:
    setting = replace(ROOMY, lagging=lagging)
    preempt = [Event("reset_running"), *steps(3)]
    # Nothing that was stored has been copied when the request is preempted and admitted again.
    run = play(setting, arrive(26, answer=8), steps(3), preempt, preempt, COPY, steps(2))
    assert run.clean, run.finding
    assert run.counts["preempted"] >= 1
    control = play(setting, arrive(26, answer=8), steps(3))
    assert control.clean and control.counts["preempted"] == 0


def test_f20_too_few_blocks_for_the_requests_that_run() -> None:
    setting = Setting(rows=6, blocks=13, seats=3, budget=16)
    many = [arrive(16 + number, family=1, answer=9) for number in range(3)]
    run = play(setting, many, steps(40))
    assert run.clean, run.finding
    assert run.counts["preempted"] > 0
    assert play(replace(setting, blocks=60), many, steps(40)).counts["preempted"] == 0


# Its prefill is stored and done, then a reset sends it back, and it is admitted at once.
PROMPTS_ONLY = replace(ROOMY, whole=False)
BACK_WITH_A_LOAD = [
    *OFFLOADED, arrive(28, answer=9), Event("go", 3), Event("go"), Event("reset_running"),
    *steps(3),
]  # fmt: skip


def test_f20_a_reload_of_a_preempted_request_is_not_taken_for_a_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = play(PROMPTS_ONLY, BACK_WITH_A_LOAD)
    assert run.clean, run.finding
    assert run.counts["preempted"] == 1 and run.counts["load"] == 2
    # Control: without the guard the same course is vLLM's assertion (finding N).
    spared = contextlib.nullcontext()
    monkeypatch.setattr(KVSafeConnectorScheduler, "_reloading_requests_spared", lambda *_: spared)
    fallen = play(PROMPTS_ONLY, BACK_WITH_A_LOAD)
    assert fallen.finding is not None and fallen.finding.kind == "died"
    assert "is_store" in fallen.finding.detail


# --- F21: a key whose write is in flight ----------------------------------------------------------


@pytest.mark.parametrize("success", [True, False])
def test_f21_a_key_offered_while_it_is_written_is_cascaded_once_it_is_there(
    hand: World, success: bool
) -> None:
    ended: list[str] = []
    tier: Any = hand.hand
    tier.on_request_finished = lambda context: ended.append(context.req_id)
    writer = hand.request()
    tier.on_new_request = lambda _: RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)
    whole = hand.request("whole")
    spec = hand.prepare([A], writer)
    assert spec is not None
    output = hand.manager.prepare_store([A], whole)
    assert output is not None and list(output.keys_to_store) == []
    hand.manager.on_request_finished(whole)
    hand.step()
    assert tier.stores == [] and ended == []
    if success:
        hand.work(spec)
    hand.manager.complete_store([A], writer, success=success)
    hand.manager.settle()
    advance(hand)
    offered = [job.req_context.req_id for job in tier.stores]
    assert offered == ([writer.req_id, "whole"] if success else [])
    # Either way the request that only waited for this has ended, once.
    assert ended == ["whole"]
    while tier.stores:
        tier.complete_store()
    advance(hand)
    assert (hand.names.name(A) in tier.objects) is success
    assert not hand.manager._jobs
    hand.recount()


def test_f21_a_key_that_is_there_is_cascaded_at_once(hand: World) -> None:
    """The control: what is parked is parked because of its write, not because it is known."""
    hand.store(A)
    hand.hand.complete_store()
    advance(hand)
    tier: Any = hand.hand
    tier.on_new_request = lambda _: RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)
    hand.manager.prepare_store([A], hand.request())
    assert len(tier.stores) == 1
    tier.complete_store()


@pytest.mark.parametrize("guard", [True, False])
def test_f21_a_key_waits_for_one_write_and_not_for_every_later_one(
    hand: World, guard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding P: the write fails and another begins before the step ends, again and again."""
    if not guard:
        monkeypatch.setattr(Parking, "waiting", lambda self, request, keys: list(keys))
    ended: list[str] = []
    tier: Any = hand.hand
    tier.on_request_finished = lambda context: ended.append(context.req_id)
    writer = hand.request()
    tier.on_new_request = lambda _: RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)
    assert hand.prepare([A], writer) is not None
    waiting = hand.request("waiting")
    assert hand.manager.prepare_store([A], waiting) is not None
    hand.manager.on_request_finished(waiting)
    for _ in range(20):
        hand.manager.complete_store([A], writer, success=False)
        hand.manager.on_request_finished(writer)
        writer = hand.request()
        assert hand.prepare([A], writer) is not None
        hand.step()
    assert ("waiting" in ended) is guard
    assert len(hand.manager._parking) == (0 if guard else 1)
    hand.recount()


# --- F22: eviction and its own input --------------------------------------------------------------


def test_f22_a_store_evicts_nothing_of_its_own_input(hand: World) -> None:
    for key in (A, B, C, D):
        hand.store(key)
        hand.hand.complete_store()
    advance(hand)
    # A and B are the oldest: without protection they are what goes.
    output = hand.manager.prepare_store([A, B, E, F], hand.request())
    assert output is not None
    assert set(output.keys_to_store) == {E, F} and set(output.evicted_keys) == {C, D}
    assert set(hand.chunks()) == {A, B, E, F}
    hand.recount()


def test_f22_without_them_in_its_input_the_oldest_go(hand: World) -> None:
    for key in (A, B, C, D):
        hand.store(key)
        hand.hand.complete_store()
    advance(hand)
    output = hand.manager.prepare_store([E, F], hand.request())
    assert output is not None and set(output.evicted_keys) == {A, B}


def test_f22_a_store_that_finds_no_room_changes_nothing(hand: World) -> None:
    for key in (A, B, C, D):
        hand.store(key)
        hand.hand.complete_store()
    advance(hand)
    before = {key: (chunk.chunk_id, chunk.ref_cnt) for key, chunk in hand.chunks().items()}
    assert hand.manager.prepare_store([A, B, C, E, F], hand.request()) is None
    after = {key: (chunk.chunk_id, chunk.ref_cnt) for key, chunk in hand.chunks().items()}
    assert after == before
    hand.recount()


# --- F23: promotions and stores -------------------------------------------------------------------


def _fill_tier(world: Any, tier: HandTier, prefixes: Sequence[Sequence[OffloadKey]]) -> None:
    names = world.names.name if isinstance(world, World) else lambda key: key
    for prefix in prefixes:
        for key in prefix:
            tier.objects[names(key)] = bytes(tier.block_size_bytes)


PREFIXES = [[key_of(100 * who + place) for place in range(3)] for who in range(1, 6)]


class Rush:
    """Five requests whose disjoint prefixes are larger than the rows wait at the same time."""

    def __init__(self, world: Any, tier: HandTier) -> None:
        self.world, self.tier = world, tier
        _fill_tier(world, tier, PREFIXES)
        self.waiting = [(world.request(), prefix) for prefix in PREFIXES]

    def look(self) -> None:
        """The scheduler's lookups of one step: every waiting request, from its first key on."""
        for context, prefix in self.waiting:
            with self._lookups_of(context):
                for key in prefix:
                    if self.world.lookup(key, context) is MISS:
                        break

    @contextlib.contextmanager
    def _lookups_of(self, context: ReqContext) -> Iterator[None]:
        waits = getattr(self.world.manager, "waits", None)
        if waits is not None:
            waits.begin(context.req_id)
        yield
        if waits is not None:
            waits.end(context.req_id)

    def stores_within(self, most: int) -> int | None:
        """In which step a running request's store gets room; None if in none of them."""
        running_request = self.world.request()
        for step in range(most):
            self.look()
            output = self.world.manager.prepare_store([A], running_request)
            if output is not None:
                return step
            self.world.step()
            if self.tier.loads:
                # One load ends per step, so that rows become free one after the other.
                job = self.tier.loads.pop(0)
                self.tier.results.append(JobResult(job.job_id, False))
        return None


def test_f23_a_running_store_gets_room_although_promotions_want_it_all(
    tmp_path: Path, policy: str
) -> None:
    threads = HandExecutor()
    with running(World(tmp_path, policy=policy, tiers=["hand"], threads=threads)) as world:
        rush = Rush(world, world.hand)
        found = rush.stores_within(60)
        assert found is not None and 0 < found < 20
        world.recount()
    # Control: with nobody waiting it has room at once.
    with running(World(tmp_path, policy=policy, tiers=["hand"], threads=threads)) as world:
        alone = Rush(world, world.hand)
        alone.waiting.clear()
        assert alone.stores_within(1) == 0


def test_f23_what_was_promoted_for_one_request_is_not_evicted_for_another(
    tmp_path: Path, policy: str
) -> None:
    threads = HandExecutor()
    with running(World(tmp_path, rows=3, policy=policy, tiers=["hand"], threads=threads)) as world:
        for key in (A, B, C, D, E):
            world.store(key)
            world.hand.complete_store()
            advance(world)
        world.primary.reset_cache()
        first, second = world.request(), world.request()
        waits = world.manager.waits

        def look(context: ReqContext, keys: Sequence[OffloadKey]) -> list[LookupResult]:
            waits.begin(context.req_id)
            answers = [world.lookup(key, context) for key in keys]
            waits.end(context.req_id)
            return answers

        assert look(first, (A, B)) == [PENDING, PENDING]
        world.step()
        world.hand.complete_load()
        advance(world)
        assert look(first, (A, B)) == [HIT, HIT]
        # The second one's prefix has room for one chunk, and not for what the first awaits.
        assert look(second, (C, D, E)) == [PENDING, MISS, MISS]
        world.step()
        world.hand.complete_load()
        advance(world)
        assert look(first, (A, B)) == [HIT, HIT]
        spec = world.manager.prepare_load([A, B], first)
        waits.loads(first.req_id)
        assert getattr(spec, "withheld", None) is None
        world.manager.complete_load([A, B], first)
        waits.forget(first.req_id)
        world.manager.on_request_finished(first)
        # Control: once it has been read it makes room.
        assert look(second, (D, E)) == [PENDING, PENDING]
        assert not {A, B} & set(world.chunks())
        world.step()
        world.hand.complete_load()
        advance(world)
        world.recount()


def test_f23_vllm_alone_evicts_what_nobody_has_read() -> None:
    """The other control; it turns red when vLLM protects unread promotions itself."""
    world = StockWorld(rows=2)
    tier: HandTier = world.inners[0]
    _fill_tier(world, tier, [[A, B, C, D]])
    first, second = world.request(), world.request()
    assert [world.lookup(key, first) for key in (A, B)] == [PENDING, PENDING]
    world.step()
    tier.complete_load()
    world.step()
    assert [world.lookup(key, first) for key in (A, B)] == [HIT, HIT]
    assert world.lookup(C, second) is PENDING
    assert MISS in [world.primary.lookup(key, first) for key in (A, B)]


# --- F24: ARC and one request's repeated touches --------------------------------------------------


@pytest.fixture
def arc(tmp_path: Path) -> Iterator[World]:
    """A world with ARC and no tiers."""
    with running(World(tmp_path, policy="arc", rows=6)) as world:
        yield world


def lines(world: World) -> tuple[set[OffloadKey], set[OffloadKey]]:
    """ARC's T1 and T2."""
    policy: Any = world.primary._policy
    return set(policy.t1), set(policy.t2)


def test_f24_one_request_is_not_frequency(arc: World) -> None:
    context = arc.store(A, B)
    for step in range(20):
        # What a step asks of the manager for a request that runs, or is looked at once more.
        assert arc.manager.prepare_store([A, B], context) is not None
        assert arc.lookup(A, context) is HIT
        if step % 5 == 0:
            arc.manager.prepare_load([A, B], context)
            arc.manager.complete_load([A, B], context)
        assert lines(arc) == ({A, B}, set())
        arc.step()
    arc.manager.on_request_finished(context)
    assert lines(arc) == ({A, B}, set())
    arc.recount()


def test_f24_a_second_request_is(arc: World) -> None:
    context = arc.store(A, B)
    arc.manager.on_request_finished(context)
    other = arc.request()
    assert arc.lookup(A, other) is HIT
    arc.manager.prepare_load([A], other)
    arc.manager.complete_load([A], other)
    arc.manager.on_request_finished(other)
    assert lines(arc) == ({B}, {A})
    arc.recount()


def test_f24_a_cascade_is_no_second_use(tmp_path: Path) -> None:
    threads = HandExecutor()
    with running(World(tmp_path, policy="arc", tiers=["hand"], threads=threads)) as world:
        context = world.store(A, B)
        world.hand.complete_store()
        advance(world)
        world.manager.on_request_finished(context)
        assert lines(world) == ({A, B}, set())
        assert isinstance(world.tier, ProvingTier)

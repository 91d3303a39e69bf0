# SPDX-License-Identifier: Apache-2.0
"""A secondary tier that somebody else wrote may answer anything: the engine goes on.

Each act is done to vLLM's own manager first, where it must raise: that is the control which
shows that the act is real, and it turns red when vLLM starts to guard against it itself. Then
the same act, on the same real classes with the proving tier around the tier.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvsafe.engine.counters import TIER_FAULTS, Counters
from kvsafe.engine.tiers.door import MOST_AT_ONCE, TierDoor, clean_event, clean_result
from kvsafe.engine.tiers.proving import ProvingTier
from kvsafe.seal.refusal import RefusalKind
from tests.engine_unit.sealed_world import (
    WAIT_S,
    HandExecutor,
    HandTier,
    World,
    _spec,
    key_of,
    running,
)
from tests.engine_unit.stock_world import StockWorld

A, B, C, D, E = (key_of(number) for number in range(1, 6))
HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
AnyWorld = World | StockWorld
Act = Callable[[AnyWorld, Any], None]


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[World]:
    """Two tiers by hand; A and B are in host memory and on their way to both."""
    threads = HandExecutor()
    with running(World(tmp_path, tiers=["hand", "hand"], threads=threads)) as world:
        world.store(A, B)
        yield world


def stock() -> StockWorld:
    """The same, of vLLM's own."""
    world = StockWorld(tiers=2)
    world.store(A, B)
    return world


def inner(world: AnyWorld, index: int = 0) -> Any:
    """The tier by hand."""
    return world.inners[index] if isinstance(world, StockWorld) else world.tiers[index].inner


def name_of(world: AnyWorld, key: OffloadKey) -> OffloadKey:
    """What the tier knows a key by."""
    return key if isinstance(world, StockWorld) else OffloadKey(world.names.name(key))


def advance(world: AnyWorld) -> None:
    """A few steps, with every proof that waits."""
    for _ in range(3):
        if isinstance(world, World):
            world.threads.run()
        world.step()


def still_works(world: World) -> None:
    """Stores, cascades and the books are as in a world where nothing happened."""
    advance(world)
    context = world.store(E)
    assert world.lookup(E, context) is HIT
    world.manager.on_request_finished(context)
    world.manager.get_stats()
    list(world.manager.take_events())
    world.recount()
    world.prove_offers()


def promote(world: AnyWorld, *keys: OffloadKey) -> None:
    """Have the first tier load these keys; the job waits for the test."""
    for index in range(2):
        tier = inner(world, index)
        while tier.stores:
            tier.complete_store()
    world.step()
    world.step()
    world.primary.reset_cache()
    context = world.request()
    for key in keys:
        assert world.lookup(key, context) is PENDING
    world.step()
    assert inner(world).loads


def is_used(world: World) -> bool:
    """Whether the first tier is asked at all."""
    return not world.tier._dead


# --- reports -------------------------------------------------------------------------------------


def _unknown_job(world: AnyWorld, tier: Any) -> None:
    tier.results.append(JobResult(999, True))


def _twice(world: AnyWorld, tier: Any) -> None:
    tier.complete_store()
    tier.results *= 2


def _job_of_another_tier(world: AnyWorld, tier: Any) -> None:
    tier.results.append(JobResult(inner(world, 1).stores[0].job_id, True))


def _job_after_failure(world: AnyWorld, tier: Any) -> None:
    tier.complete_store(success=False)
    advance(world)
    tier.results.append(JobResult(0, True))


def _answers(call: str, *values: Any) -> Act:
    def act(world: AnyWorld, tier: Any) -> None:
        left = list(values)
        setattr(tier, call, lambda *_: left.pop(0) if len(left) > 1 else left[0])

    return act


def _raises(call: str) -> Act:
    def act(world: AnyWorld, tier: Any) -> None:
        def broken(*_: Any) -> Any:
            raise RuntimeError("a fault of the tier")

        setattr(tier, call, broken)

    return act


def _use(world: AnyWorld) -> None:
    """Every call that the engine makes of a tier, once."""
    advance(world)
    context = world.request()
    world.manager.touch([A], context)
    world.lookup(D, context)
    world.store(C, context=context)
    world.step()
    world.manager.has_pending_work()
    world.manager.get_stats()
    for event in world.manager.take_events():
        assert event.medium.value
    world.manager.on_request_finished(context)
    advance(world)


def _stopped_midway(world: AnyWorld, tier: Any) -> None:
    def some() -> Iterator[JobResult]:
        yield JobResult(tier.stores.pop(0).job_id, True)
        raise RuntimeError("a fault of the tier")

    tier.get_finished_jobs = some


REPORTS: dict[str, Act] = {
    "an unknown job": _unknown_job,
    "a job twice": _twice,
    "a job of another tier": _job_of_another_tier,
    "a job that failed before": _job_after_failure,
    "no report": lambda _, tier: tier.results.append(None),
    "anything": lambda _, tier: tier.results.append(object()),
    "a job without a number": lambda _, tier: tier.results.append(JobResult([1], True)),
    "a time that is no time": lambda _, tier: tier.results.append(
        JobResult(tier.stores.pop(0).job_id, True, None, "soon")
    ),
    "nothing to iterate": _answers("get_finished_jobs", None),
    "an exception": _raises("get_finished_jobs"),
    "an exception after a report": _stopped_midway,
}
CALLS = (
    "lookup", "submit_store", "touch", "on_new_request", "on_request_finished",
    "on_schedule_end", "take_events", "get_stats", "serve_external_requests",
)  # fmt: skip
OTHERS: dict[str, Act] = {
    **{f"{call} raises": _raises(call) for call in CALLS},
    "no policy for a request": _answers("on_new_request", None),
    "events that are none": _answers("take_events", [object()]),
    "an event of nowhere": _answers("take_events", [OffloadingEvent([A], "moon", False)]),
    "statistics that are none": _answers("get_stats", object()),
    "a statistic of no type": lambda _, tier: setattr(
        tier,
        "get_stats",
        lambda: OffloadingConnectorStats(data={"types": {}, "data": {"x": {(): 1}}}),
    ),
}


@pytest.mark.parametrize("name", [*REPORTS, *OTHERS])
def test_what_a_tier_does_ends_no_engine(ours: World, name: str) -> None:
    act = REPORTS.get(name) or OTHERS[name]
    control = stock()
    with pytest.raises((AssertionError, RuntimeError, TypeError, AttributeError, KeyError)):
        act(control, inner(control))
        _use(control)
    tier = inner(ours)
    act(ours, tier)
    _use(ours)
    assert ours.tier._door.faults or name == "a time that is no time"
    for call in [call for call in vars(tier) if callable(getattr(tier, call))]:
        delattr(tier, call)
    still_works(ours)
    assert not inner(ours, 1) or ours.tiers[1]._door.faults == {}


def test_an_honest_tier_has_no_faults(ours: World) -> None:
    _use(ours)
    promote(ours, A)
    inner(ours).complete_load()
    advance(ours)
    assert ours.lookup(A) is HIT
    still_works(ours)
    assert [tier._door.faults for tier in ours.tiers] == [{}, {}]
    control = stock()
    _use(control)


def test_a_report_of_another_tiers_job_ends_only_its_own(ours: World) -> None:
    job = inner(ours, 1).stores[0].job_id
    inner(ours).results.append(JobResult(job, True))
    advance(ours)
    assert job in ours.manager._jobs and ours.chunks()[A].ref_cnt == 2
    # The tier that has the job reports it, and that counts.
    inner(ours, 1).complete_store()
    inner(ours).complete_store()
    advance(ours)
    assert not ours.manager._jobs and ours.chunks()[A].ref_cnt == 0


def test_reports_without_end_are_cut(ours: World) -> None:
    def endless() -> Iterator[None]:
        while True:
            yield None

    inner(ours).get_finished_jobs = endless
    advance(ours)
    assert ours.tier._door.faults["get_finished_jobs"] > MOST_AT_ONCE
    del inner(ours).get_finished_jobs
    still_works(ours)


# --- promotions ----------------------------------------------------------------------------------


def test_keys_that_nobody_asked_for_are_not_taken(ours: World) -> None:
    control = stock()
    for world in (control, ours):
        promote(world, A, B)
        tier = inner(world)
        job = tier.loads.pop(0)
        tier._row(int(job.chunk_ids[0]))[:] = tier.objects[name_of(world, A)]
        told = (name_of(world, A), name_of(world, D), b"x")
        tier.results.append(JobResult(job.job_id, False, told))
    with pytest.raises(AssertionError, match="unknown successful keys"):
        advance(control)
    advance(ours)
    assert ours.lookup(A) is HIT and D not in ours.chunks()
    assert B not in ours.chunks()
    still_works(ours)


def test_a_load_that_could_not_be_given_is_failed_and_its_row_kept(ours: World) -> None:
    control = stock()
    for world in (control, ours):
        for index in range(2):
            while inner(world, index).stores:
                inner(world, index).complete_store()
        advance(world)
        world.primary.reset_cache()
        _raises("submit_load")(world, inner(world))
        assert world.lookup(A, world.request()) is PENDING
    with pytest.raises(RuntimeError):
        control.step()
    row = ours.primary.row_of(A)
    assert row is not None
    advance(ours)
    assert ours.refusals() == {str(RefusalKind.TIER_READ.value): 1}
    assert ours.chunks() == {} and not ours.manager._jobs
    assert ours.primary._held_back == {row}
    # The tier is asked nothing more until it has reported that load; the other one goes on.
    inner(ours).asked.clear()
    assert ours.lookup(A) is PENDING and inner(ours).asked == []
    ours.step()
    assert inner(ours, 1).loads
    inner(ours, 1).complete_load()
    advance(ours)
    assert ours.lookup(A) is HIT
    del inner(ours).submit_load
    first = next(iter(ours.tier._watch._given_up))
    inner(ours).results.append(JobResult(first, False))
    advance(ours)
    assert not ours.primary._held_back and is_used(ours)
    still_works(ours)


def test_what_a_lookup_may_not_answer_is_a_miss(ours: World) -> None:
    context = ours.request()
    for answer in (None, True, 1, "HIT", object()):
        inner(ours).lookup = lambda *_, answer=answer: answer
        assert ours.lookup(D, context) is MISS
    assert ours.tier._door.faults["lookup"] == 5
    del inner(ours).lookup
    inner(ours).objects[name_of(ours, D)] = b""
    assert ours.lookup(D, context) is PENDING
    ours.step()
    inner(ours).complete_load(count=0)
    still_works(ours)


# --- coming to rest ------------------------------------------------------------------------------


def test_a_tier_that_only_says_that_it_rests_breaks_no_reset(ours: World) -> None:
    control = stock()
    for world in (control, ours):
        promote(world, A)
        inner(world).drain_jobs = lambda: None
    with pytest.raises(AssertionError):
        control.manager.reset_cache()
    row = ours.primary.row_of(A)
    assert ours.epochs.raise_epoch("reset")
    ours.manager.reset_cache()
    assert ours.chunks() == {} and not ours.manager._jobs
    assert ours.primary._held_back == {row} and not is_used(ours)
    ours.recount()
    # It was still at it, and ends only now.
    inner(ours).complete_load()
    advance(ours)
    assert not ours.primary._held_back and is_used(ours)
    assert ours.offered() == []
    del inner(ours).drain_jobs
    still_works(ours)


def test_a_drain_that_raises_breaks_no_reset(ours: World) -> None:
    control = stock()
    for world in (control, ours):
        _raises("drain_jobs")(world, inner(world))
    with pytest.raises(RuntimeError):
        control.manager.reset_cache()
    assert ours.epochs.raise_epoch("reset")
    ours.manager.reset_cache()
    assert not ours.manager._jobs
    del inner(ours).drain_jobs
    inner(ours).complete_store()
    still_works(ours)


def test_a_proof_that_hangs_breaks_no_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsafe.engine.tiers.proving._DRAIN_S", 0.1)
    free, real = threading.Event(), ProvingTier._open
    threads: Any = ThreadPoolExecutor(1)

    def stuck(tier: ProvingTier, key: OffloadKey, row: int) -> Any:
        free.wait(WAIT_S)
        return real(tier, key, row)

    with running(World(tmp_path, tiers=["hand", "hand"], threads=threads)) as ours:
        ours.store(A, B)
        promote(ours, A)
        row = ours.primary.row_of(A)
        monkeypatch.setattr(ProvingTier, "_open", stuck)
        inner(ours).complete_load()
        ours.step()
        assert ours.epochs.raise_epoch("reset")
        ours.manager.reset_cache()
        assert not ours.manager._jobs and ours.chunks() == {}
        assert ours.primary._held_back == {row}
        assert ours.refusals() == {str(RefusalKind.DEADLINE.value): 1}
        free.set()
        threads.shutdown(wait=True)
        ours.step()
        assert not ours.primary._held_back and ours.offered() == []
        assert ours.tier._abandoned == {} and ours.refusals() == {"1104": 1}
        ours.recount()


# --- vLLM's own file tier ------------------------------------------------------------------------


@pytest.mark.parametrize("remembered", [True, False])
def test_a_read_that_fails_after_it_was_given_up_confuses_no_lookup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remembered: bool
) -> None:
    """`mark_miss` while a lookup is out: `assert state.phase is IN_FLIGHT` in `drain_results`.

    The control is our own tier without its memory of what was given up.
    """
    if not remembered:
        monkeypatch.setattr(ProvingTier, "_is_owed", lambda *_: False)
    with running(World(tmp_path, tiers=["fs"])) as world:
        world.store(A, B)
        world.forget_rows()
        files: Any = world.tier.inner
        held: list[Any] = []
        enqueue = files._pool.enqueue_load
        monkeypatch.setattr(files._pool, "enqueue_load", lambda *job: held.append(job))
        context = world.request()
        while not held:
            assert world.lookup(A, context) in (LookupResult.RETRY, PENDING)
            world.step()
            time.sleep(0.002)
        world.manager.on_request_finished(context)
        _pass_deadline(world)
        world.step()
        assert world.chunks() == {} and not world.manager._jobs
        # Another request asks for the chunk while the read is still out; then the read fails.
        world.file(A).unlink()
        other = world.request()
        asked = LookupResult.RETRY if not remembered else MISS
        assert world.lookup(A, other) is asked
        world.step()
        _until(lambda: remembered or not files._lookup_manager._pending_results.empty())
        enqueue(*held.pop())
        files._pool.wait_idle()
        world.lookup(A, other)
        world.step()
        assert dict(world.tier._door.faults) == ({} if remembered else {"lookup": 1})
        monkeypatch.undo()
        assert world.ask(A) is MISS and world.ask(B) is HIT
        assert not world.primary._held_back
        world.recount()


def test_what_confuses_a_lookup_all_the_same_stays_behind_the_door(tmp_path: Path) -> None:
    """`assert state.phase is PENDING` in `flush`."""
    with running(World(tmp_path, tiers=["fs"])) as world:
        files: Any = world.tier.inner
        lookups = files._lookup_manager
        for key in (A, B):
            assert files.lookup(key, ReqContext(req_id="somebody")) is LookupResult.RETRY
            lookups.mark_miss([key])
            if key is A:
                with pytest.raises(AssertionError):
                    lookups.flush()
        world.step()
        assert dict(world.tier._door.faults) == {"on_schedule_end": 1}
        world.store(C)
        assert world.lookup(C) is HIT


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _pass_deadline(world: World) -> None:
    watch = world.tier._watch
    watch._running = {
        job: replace(seen, since=seen.since - seen.limit_s - 1)
        for job, seen in watch._running.items()
    }


# --- statistics, events, pressure ----------------------------------------------------------------


class CountingTier(HandTier):
    """A tier with one metric of its own."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """One counter with one label."""
        return {"mine": OffloadingCounterMetadata("Mine.", labelnames=("kind",))}


def test_only_statistics_with_a_definition_pass(ours: World) -> None:
    rows = ours.primary.get_kv_memoryview()
    tier = CountingTier(rows)
    raw = OffloadingConnectorStats()
    raw.increase_counter("mine", 2, ("good",))
    raw.increase_counter("mine", -1, ("negative",))
    raw.increase_counter("mine", float("nan"), ("none",))
    raw.increase_counter("mine", 1, ("too", "many"))
    raw.set_gauge("theirs", 1)
    raw.observe_histogram("theirs as well", 1)
    tier.get_stats = lambda: raw
    counters = Counters("blake3-keyed", ())
    door = TierDoor(tier, "1:counting", counters)
    kept = door.stats()
    assert kept is not None
    assert kept.data["data"] == {"mine": {("good",): 2}}
    assert door.faults["get_stats"] == counters.totals[TIER_FAULTS] == 5
    control = OffloadingConnectorStats().aggregate(raw)
    assert "theirs" in control.data["data"]
    aggregated = OffloadingConnectorStats().aggregate(kept)
    assert aggregated.data["data"] == kept.data["data"]


def test_a_usable_event_and_report_pass_unchanged() -> None:
    event = OffloadingEvent([A, B], Medium.STORAGE, True)
    assert clean_event(event) == event
    report = JobResult(3, False, (A,), 0.5, 100)
    assert clean_result(report) == report
    assert clean_result(JobResult(3, "yes")) == JobResult(3, False)


class Detector(BackpressureDetector):
    """A detector of somebody else, with vLLM's default policy, which asks for vLLM's own."""

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """Broken."""
        raise RuntimeError

    def is_under_pressure(self) -> bool:
        """Broken."""
        raise RuntimeError

    def reset(self) -> None:
        """Broken."""
        raise RuntimeError

    @property
    def stats(self) -> dict[str, float]:
        """No number."""
        broken: Any = {"store_latency_ema": "high"}
        return cast(dict[str, float], broken)


def test_a_detector_that_breaks_means_no_pressure(tmp_path: Path) -> None:
    class Pressed(HandTier):
        def __init__(self, rows: memoryview) -> None:
            super().__init__(rows)
            self._bp_detector = Detector()

    control = StockWorld(make=Pressed)
    with pytest.raises(AssertionError, match="requires an EMABackpressureDetector"):
        control.store(A)
    with running(World(tmp_path, tiers=["hand"], threads=HandExecutor())) as world:
        tier = Pressed(world.primary.get_kv_memoryview())
        world.manager.secondary_tiers[0] = proving = ProvingTier(tier, 0, world.desk, None)
        world.manager._tier_index[proving] = 0
        world.manager._tier_parents[proving] = world.manager._tier_parents.pop(world.tiers[0])
        world.tiers[0] = proving
        world.store(A)
        assert len(tier.stores) == 1
        tier.complete_store()
        still_works(world)
        assert proving._door.faults.keys() == {"should_store", "update", "is_under_pressure"}
        assert proving.bp_detector.stats == {}
        while tier.stores:
            tier.complete_store()
        world.manager.reset_cache()


# --- a tier that calls back ----------------------------------------------------------------------


def test_a_tier_that_calls_back_can_end_only_its_own_requests(ours: World) -> None:
    live = ours.request("live")
    said: list[str] = []

    def serve(parent: Any) -> None:
        foreign = ReqContext(req_id="live")
        _try(said, lambda: parent.on_request_finished(foreign))
        parent.on_new_request(foreign)
        _try(said, lambda: parent.on_new_request(foreign))
        _try(said, lambda: parent.create_store_job([A, D], foreign))
        assert parent.lookup(A, foreign) is HIT
        job = parent.create_store_job([A, A], foreign)
        said.append(f"job {len(list(job.keys))}")
        inner(ours).stores.append(job)
        parent.on_request_finished(foreign)
        _try(said, lambda: parent.lookup(D, foreign))
        said.append("done")
        inner(ours).lent = parent

    inner(ours).serve_external_requests = serve
    before = ours.chunks()[A].ref_cnt
    ours.step()
    assert said == ["LookupError"] * 3 + ["job 1", "LookupError", "done"]
    assert ours.chunks()[A].ref_cnt == before + 1
    del inner(ours).serve_external_requests
    with pytest.raises(LookupError):
        inner(ours).lent.lookup(A, live)
    # The engine's own request of that name lives on; the job that was lent ends like any other.
    ours.store(C, context=live)
    ours.manager.on_request_finished(live)
    while inner(ours).stores:
        inner(ours).complete_store()
    advance(ours)
    assert ours.chunks()[A].ref_cnt == before - 1
    assert ours.tier._door.faults == {}


def _try(said: list[str], action: Callable[[], Any]) -> None:
    try:
        action()
        said.append("taken")
    except LookupError as exc:
        said.append(type(exc).__name__)


def test_a_job_that_a_tier_took_and_never_reports_is_unpinned(ours: World) -> None:
    def serve(parent: Any) -> None:
        foreign = ReqContext(req_id="elsewhere")
        parent.on_new_request(foreign)
        parent.create_store_job([A], foreign)

    while inner(ours).stores:
        inner(ours).complete_store()
    inner(ours, 1).complete_store()
    advance(ours)
    assert ours.chunks()[A].ref_cnt == 0
    inner(ours).serve_external_requests = serve
    ours.step()
    del inner(ours).serve_external_requests
    assert ours.chunks()[A].ref_cnt == 1
    _pass_deadline(ours)
    ours.step()
    assert ours.chunks()[A].ref_cnt == 0
    assert ours.refusals() == {str(RefusalKind.DEADLINE.value): 1}


def test_a_tier_that_vllm_makes_by_name_is_wrapped_the_same(tmp_path: Path) -> None:
    """The example tier of vLLM, as the factory makes it: the door takes it as it is."""
    with running(World(tmp_path, tiers=["hand"])) as world:
        rows = world.primary.get_kv_memoryview()
        spec = SimpleNamespace(**vars(_spec()), secondary_tier_configs=[])
        made = SecondaryTierFactory.create_secondary_tier({"type": "example"}, rows, spec)
        tier = ProvingTier(made, 1, world.desk, None)
        context = world.request()
        assert tier.on_new_request(context).policy is not None
        assert tier.lookup(A, context) is MISS
        assert tier.get_stats() is None and list(tier.take_events()) == []
        assert list(tier.get_finished_jobs()) == [] and tier._door.faults == {}
        tier.shutdown()

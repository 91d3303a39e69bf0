# SPDX-License-Identifier: Apache-2.0
"""The copier over the CPU engine: bytes, refusals, faults, order and shutdown."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsafe.device import (
    Copier,
    CopierError,
    CopyFault,
    CopyOutcome,
    CopyPlan,
    CopyTask,
    CpuEngine,
    DeviceTensor,
    Geometry,
    GeometryError,
    HostPool,
    RowPlan,
    RowWindow,
    SliceProof,
    SourceNotLoaded,
    cpu_copier,
)
from kvsafe.device.cpu import PIECE_BYTES
from kvsafe.device.work import TaskDone

from .proofs import Gate, ScriptedProof, raising
from .stream_double import StepPool
from .worlds import (
    LOAD,
    STORE,
    Oracle,
    device_bytes,
    fill,
    fill_world,
    plans,
    simple_geometry,
    slice_bytes_of,
    window_for,
    worlds,
)


def stepped(geometry: Geometry, window: RowWindow, verify: SliceProof | None) -> Copier:
    """Everything in the test's thread."""
    return Copier(geometry, window, CpuEngine(geometry, window, verify, pool=StepPool()))


def collect(copier: Copier, *jobs: int) -> dict[int, CopyOutcome]:
    assert copier.wait(set(jobs), 20)
    return {outcome.job: outcome for outcome in copier.poll()}


def row(number: int, *blocks: int) -> RowPlan:
    return RowPlan(number, 0, tuple(enumerate(blocks)))


class World:
    def __init__(self, rows: int = 4, threads: int = 2, verify: bool = True) -> None:
        self.geometry = simple_geometry(blocks=16)
        self.window = window_for(self.geometry, rows)
        fill_world(self.geometry, self.window)
        self.proof = ScriptedProof()
        self.copier = cpu_copier(
            self.geometry, self.window, self.proof if verify else None, threads
        )

    def submit(self, job: int, way: Any, *rows: RowPlan) -> None:
        self.copier.submit(CopyPlan(job, way, rows))

    def results(self, *jobs: int) -> dict[int, CopyOutcome]:
        return collect(self.copier, *jobs)


@pytest.fixture
def world() -> Any:
    made = World()
    yield made
    made.copier.shutdown(20)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_copies_equal_the_oracle(data: st.DataObject) -> None:
    geometry, window = data.draw(worlds())
    fill_world(geometry, window, data.draw(st.integers(0, 99)))
    proof = ScriptedProof() if data.draw(st.booleans()) else None
    copier = stepped(geometry, window, proof)
    oracle = Oracle(geometry, window)
    for way in data.draw(st.lists(st.sampled_from([LOAD, STORE]), min_size=1, max_size=4)):
        plan = data.draw(plans(geometry, window.num_rows, way))
        copier.submit(plan)
        oracle.apply(plan)
        (outcome,) = copier.poll()
        assert outcome.ok
        assert outcome.bytes > 0
        assert oracle.agrees()


@given(st.data())
@settings(deadline=None)
def test_store_then_load_brings_the_bytes_back(data: st.DataObject) -> None:
    geometry, window = data.draw(worlds())
    fill_world(geometry, window)
    copier = stepped(geometry, window, None)
    plan = data.draw(plans(geometry, window.num_rows, STORE))
    oracle = Oracle(geometry, window)
    copier.submit(plan)
    oracle.apply(plan)
    for index, tensor in enumerate(geometry.tensors):
        fill(tensor.view, 500 + index)
    oracle.device = device_bytes(geometry)
    back = CopyPlan(plan.job, LOAD, plan.rows)
    copier.submit(back)
    oracle.apply(back)
    assert [outcome.ok for outcome in copier.poll()] == [True, True]
    assert oracle.agrees()


def test_long_spans_are_copied_whole() -> None:
    page = PIECE_BYTES + 4097
    geometry = simple_geometry(blocks=4, page=page, tensors=1, span=2)
    window = window_for(geometry, 1)
    fill_world(geometry, window)
    copier = stepped(geometry, window, None)
    copier.submit(CopyPlan(1, STORE, (row(0, 1, 2),)))
    start = window.slice_start(0)
    stored = window.base[start : start + window.slice_bytes]
    assert torch.equal(stored, geometry.tensors[0].view[1:3].reshape(-1))


def test_no_bytes_of_an_earlier_chunk_survive_in_a_row(world: World) -> None:
    world.submit(1, STORE, RowPlan(0, 0, ((1, 3),)))
    assert world.results(1)[1].ok
    found = slice_bytes_of(world.window, 0)
    page = 16
    expected: list[int] = []
    for tensor in world.geometry.tensors:
        expected += [0] * page + tensor.view[3].tolist()
    assert found == expected


def test_proof_steps_surround_the_copy(world: World) -> None:
    seen: list[list[int]] = []
    world.proof.answers["after_store", 0] = lambda: seen.append(slice_bytes_of(world.window, 0))
    world.submit(1, STORE, row(0, 1, 2))
    assert world.results(1)[1].ok
    assert seen == [slice_bytes_of(world.window, 0)], "the bytes were final when proven"
    world.submit(2, LOAD, row(0, 4, 5))
    assert world.results(2)[2].ok
    assert world.proof.log == [("fence", 0), ("after_store", 0), ("before_load", 0)]


@pytest.mark.parametrize("refusal", ["no", 0, "", False])
def test_refused_load_copies_nothing_and_names_its_row(world: World, refusal: object) -> None:
    world.proof.answers["before_load", 1] = refusal
    oracle = Oracle(world.geometry, world.window)
    world.submit(1, LOAD, row(0, 1, 2), row(1, 3, 4))
    outcome = world.results(1)[1]
    oracle.apply(CopyPlan(1, LOAD, (row(0, 1, 2),)))
    assert not outcome.ok
    assert outcome.failures == ((row(1, 3, 4), refusal),)
    assert outcome.bytes == 64
    assert oracle.agrees()


def test_fenced_store_writes_nothing(world: World) -> None:
    world.proof.answers["fence", 0] = "other generation"
    oracle = Oracle(world.geometry, world.window)
    world.submit(1, STORE, row(0, 1, 2))
    assert world.results(1)[1].failures == ((row(0, 1, 2), "other generation"),)
    assert oracle.agrees()
    assert world.proof.log == [("fence", 0)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize(
    ("step", "way"), [("before_load", LOAD), ("fence", STORE), ("after_store", STORE)]
)
def test_exception_in_a_proof_is_a_value(
    world: World, step: str, way: Any, error: type[BaseException]
) -> None:
    world.proof.answers[step, 0] = raising(error)
    for job in range(1, 6):  # more than there are threads: none of them died
        world.submit(job, way, row(0, 1, 2))
        outcome = world.results(job)[job]
        assert outcome.failures == ((row(0, 1, 2), CopyFault(step, error.__name__)),)
        assert "secret" not in repr(outcome)
    world.submit(9, way, row(1, 1, 2))
    assert world.results(9)[9].ok


def test_exception_in_a_copy_is_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuEngine, "copy_in", lambda self, row: 1 // 0)
    world = World()
    world.submit(1, LOAD, row(0, 1))
    assert world.results(1)[1].failures == ((row(0, 1), CopyFault("copy", "ZeroDivisionError")),)
    world.submit(2, STORE, row(0, 1))
    assert world.results(2)[2].ok
    world.copier.shutdown(20)


def test_bad_plan_is_a_failed_outcome_and_copies_nothing(world: World) -> None:
    oracle = Oracle(world.geometry, world.window)
    world.submit(1, LOAD, row(0, 1), row(1, 0))
    (outcome,) = world.copier.poll()
    assert not outcome.ok
    assert outcome.plan_fault is not None
    assert outcome.plan_fault.field == "block"
    assert [failed for failed, _ in outcome.failures] == [row(0, 1), row(1, 0)]
    assert oracle.agrees()
    assert world.proof.log == []
    world.submit(1, LOAD, row(0, 1), row(1, 2))
    assert world.results(1)[1].ok


def test_empty_plan_is_a_failed_outcome(world: World) -> None:
    world.submit(1, LOAD)
    (outcome,) = world.copier.poll()
    assert (outcome.ok, outcome.failures) == (False, ())
    assert outcome.plan_fault is not None


def test_plan_that_is_no_plan_is_a_failed_outcome(world: World) -> None:
    world.submit(1, LOAD, None)  # type: ignore[arg-type]
    (outcome,) = world.copier.poll()
    assert [value for _, value in outcome.failures] == [CopyFault("check", "AttributeError")]


def test_job_id_in_use_and_late_submit_raise(world: World) -> None:
    gate = Gate()
    world.proof.answers["before_load", 0] = gate
    world.submit(1, LOAD, row(0, 1))
    with pytest.raises(CopierError, match="already running"):
        world.submit(1, LOAD, row(1, 2))
    gate.opened.set()
    world.results(1)
    world.submit(1, LOAD, row(1, 2))
    assert world.copier.shutdown(20)
    with pytest.raises(CopierError, match="shut down"):
        world.submit(2, LOAD, row(0, 1))


def test_wait_knows_its_deadline(world: World) -> None:
    gate = Gate()
    world.proof.answers["before_load", 0] = gate
    world.submit(1, LOAD, row(0, 1))
    world.submit(2, LOAD, row(1, 2))
    assert world.copier.wait({2, 77}, 20)
    assert not world.copier.wait({1, 2}, 0.01)
    assert not world.copier.wait({1}, 0)
    assert not world.copier.wait({1}, float("nan"))
    assert [outcome.job for outcome in world.copier.poll()] == [2]
    gate.opened.set()
    assert world.copier.wait({1}, 20)


def test_outcome_comes_only_when_all_rows_are_over(world: World) -> None:
    gate = Gate()
    world.proof.answers["before_load", 0] = gate
    world.proof.answers["before_load", 1] = "no"
    world.submit(1, LOAD, row(0, 1), row(1, 2))
    world.submit(2, LOAD, row(2, 3))
    assert world.copier.wait({2}, 20)
    assert [outcome.job for outcome in world.copier.poll()] == [2]
    gate.opened.set()
    assert world.results(1)[1].failures == ((row(1, 2), "no"),)


def test_tasks_of_one_row_run_in_submission_order(world: World) -> None:
    gate = Gate()
    world.proof.answers["fence", 0] = gate
    world.submit(1, STORE, row(0, 1, 2))
    assert gate.reached.wait(20)
    world.submit(2, LOAD, row(0, 3, 4))
    world.submit(3, STORE, row(0, 5, 6))
    world.submit(4, LOAD, row(1, 7, 8))
    assert world.copier.wait({4}, 20), "another row is not held up"
    assert world.proof.log == [("fence", 0), ("before_load", 1)]
    world.proof.answers.clear()
    gate.opened.set()
    world.results(1, 2, 3)
    steps = [step for step, number in world.proof.log if number == 0]
    assert steps == ["fence", "after_store", "before_load", "fence", "after_store"]
    view = world.geometry.tensors[0].view
    assert torch.equal(view[3], view[1]), "the load saw the first store's bytes"
    assert slice_bytes_of(world.window, 0)[:16] == view[5].tolist()


def test_f09_store_does_not_read_a_block_that_is_being_loaded(world: World) -> None:
    gate = Gate()
    world.proof.answers["before_load", 0] = gate
    world.submit(1, LOAD, row(0, 3, 4))
    assert gate.reached.wait(20)
    world.submit(2, STORE, row(1, 4, 5))
    world.submit(3, STORE, row(2, 6, 7))
    assert world.copier.wait({3}, 20), "a store from other blocks is not held up"
    assert ("fence", 1) not in world.proof.log
    gate.opened.set()
    outcomes = world.results(1, 2)
    assert outcomes[1].ok
    assert outcomes[2].ok
    assert slice_bytes_of(world.window, 1)[:16] == slice_bytes_of(world.window, 0)[16:32]


def test_f09_block_of_a_failed_load_is_never_stored(world: World) -> None:
    gate = Gate("corrupt")
    world.proof.answers["before_load", 0] = gate
    oracle = Oracle(world.geometry, world.window)
    world.submit(1, LOAD, row(0, 3, 4))
    world.submit(2, STORE, row(1, 4, 5))
    gate.opened.set()
    assert world.copier.wait({1, 2}, 20)
    world.submit(3, STORE, row(2, 3))  # the failure is known here, not yet to the submitter
    assert world.copier.wait({3}, 20)
    outcomes = world.results()
    assert outcomes[1].failures == ((row(0, 3, 4), "corrupt"),)
    assert outcomes[2].failures == ((row(1, 4, 5), SourceNotLoaded(4)),)
    assert outcomes[3].failures == ((row(2, 3), SourceNotLoaded(3)),)
    assert oracle.agrees()
    world.submit(4, STORE, row(1, 4, 5))  # recomputed after the report: a source like any other
    assert world.results(4)[4].ok


def test_shutdown_ends_running_rows_and_fails_the_rest() -> None:
    world = World(threads=1)
    gate = Gate()
    world.proof.answers["before_load", 0] = gate
    world.submit(1, LOAD, row(0, 1))
    assert gate.reached.wait(20)
    world.submit(2, LOAD, row(0, 2))  # waits for its row
    world.submit(3, LOAD, row(1, 3))  # waits for the thread
    assert not world.copier.shutdown(0.01), "one row still runs"
    gate.opened.set()
    assert world.copier.shutdown(20)
    outcomes = world.results(1, 2, 3)
    assert outcomes[1].ok
    shutdown = CopyFault("start", "Shutdown")
    assert outcomes[2].failures == ((row(0, 2), shutdown),)
    assert outcomes[3].failures == ((row(1, 3), shutdown),)
    assert world.proof.log == [("before_load", 0)]


def test_long_chain_on_one_row_ends_at_shutdown() -> None:
    world = World(threads=1)
    gate = Gate()
    world.proof.answers["before_load", 0] = gate
    for job in range(3000):
        world.submit(job, LOAD, row(0, 1))
    world.copier.shutdown(0)
    gate.opened.set()
    assert len(world.results(*range(3000))) == 3000


def test_many_submitters_at_once() -> None:
    world = World(rows=8, threads=3)
    first = device_bytes(world.geometry)

    def store(number: int) -> None:
        for turn in range(20):
            world.submit(number * 100 + turn, STORE, row(number, 2 * number + 1))

    threads = [threading.Thread(target=store, args=(number,)) for number in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    outcomes = world.results(*(n * 100 + t for n in range(7) for t in range(20)))
    assert len(outcomes) == 140
    assert all(outcome.ok for outcome in outcomes.values())
    for number in range(7):
        assert slice_bytes_of(world.window, number)[:16] == first[0][2 * number + 1]
    assert world.copier.shutdown(20)


def test_unusable_geometry_or_window_never_makes_a_copier() -> None:
    geometry = simple_geometry()
    window = window_for(geometry)
    cpu_copier(geometry, window, None).shutdown(20)
    with pytest.raises(GeometryError):
        cpu_copier(Geometry(geometry.tensors, (), 2), window, None)
    with pytest.raises(GeometryError):
        cpu_copier(simple_geometry(span=3), window, None)


class HastyEngine(CpuEngine):
    """Finishes the first task, then says that it could not start."""

    def start(self, tasks: Sequence[CopyTask], done: TaskDone) -> None:
        done(tasks[0], None, 7)
        raise OSError


def test_engine_that_fails_half_way_ends_each_row_once() -> None:
    geometry = simple_geometry()
    window = window_for(geometry)
    copier = Copier(geometry, window, HastyEngine(geometry, window, None, pool=StepPool()))
    copier.submit(CopyPlan(1, LOAD, (row(0, 1), row(1, 2))))
    (outcome,) = copier.poll()
    assert outcome.failures == ((row(1, 2), CopyFault("start", "OSError")),)
    assert outcome.bytes == 7


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_pool_thread_outlives_its_actions(error: type[BaseException]) -> None:
    pool = HostPool(1, "test")
    ran = threading.Event()
    pool.submit(raising(error))  # type: ignore[arg-type]
    pool.submit(ran.set)
    assert ran.wait(20)
    assert pool.close(20)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(ran.set)


def test_cpu_engine_refuses_other_devices() -> None:
    geometry = simple_geometry()
    away = DeviceTensor(torch.zeros((8, 16), dtype=torch.int8, device="meta"), 16, ("a",))
    with pytest.raises(ValueError, match="cannot copy meta"):
        CpuEngine(Geometry((away,), geometry.groups, 2), window_for(geometry), None)


def test_pool_needs_a_thread() -> None:
    geometry = simple_geometry()
    with pytest.raises(ValueError, match="at least one"):
        cpu_copier(geometry, window_for(geometry), None, 0)

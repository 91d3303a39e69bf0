# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine over a stream double: order on the device, proofs, faults and shutdown.

Nothing on a stream runs before the test says so, and then the adversary lets copies go first.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsafe.device import (
    BatchCopy,
    Copier,
    CopyFault,
    CopyOutcome,
    CopyPlan,
    CudaEngine,
    HostPool,
    PinnedRows,
    RowPlan,
    SourceNotLoaded,
    cuda_copier,
)

from .proofs import ScriptedProof, raising
from .stream_double import StepPool, StreamDouble, batch_copy
from .worlds import (
    LOAD,
    STORE,
    Oracle,
    fill_world,
    plans,
    simple_geometry,
    slice_bytes_of,
    window_for,
    worlds,
)

BOTH_COPIES = [None, batch_copy]


def row(number: int, *blocks: int) -> RowPlan:
    return RowPlan(number, 0, tuple(enumerate(blocks)))


class UnorderedEngine(CudaEngine):
    """The canary: copies that wait for nothing."""

    def order_after_compute(self, stream: Any, ticket: object) -> None:
        return


class World:
    def __init__(
        self,
        engine: type[CudaEngine] = CudaEngine,
        batch: BatchCopy | None = None,
        at_once: bool = True,
        pinned: PinnedRows | None = None,
    ) -> None:
        self.geometry = simple_geometry(blocks=16)
        self.window = window_for(self.geometry)
        fill_world(self.geometry, self.window)
        self.proof = ScriptedProof()
        self.double = StreamDouble()
        self.pool = StepPool(at_once)
        self.engine = engine(
            self.geometry, self.window, self.proof, self.double, batch, self.pool, pinned
        )
        self.copier = Copier(self.geometry, self.window, self.engine)

    def submit(self, job: int, way: Any, *rows: RowPlan) -> None:
        self.copier.submit(CopyPlan(job, way, rows))

    def outcomes(self) -> dict[int, CopyOutcome]:
        return {outcome.job: outcome for outcome in self.copier.poll()}

    def write_block(self, block: int, value: int) -> None:
        """Model work, queued on the compute stream, that writes a whole block."""

        def kernel() -> None:
            for tensor in self.geometry.tensors:
                tensor.view[block] = value

        self.double.kernel(kernel)

    def block(self, block: int) -> list[int]:
        return [int(v) for v in self.geometry.tensors[0].view[block].tolist()]

    def run_adversary(self) -> None:
        self.double.rush_copies()
        self.double.drain()


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_copies_equal_the_oracle(data: st.DataObject) -> None:
    geometry, window = data.draw(worlds())
    fill_world(geometry, window)
    double = StreamDouble()
    batch = data.draw(st.sampled_from(BOTH_COPIES))
    engine = CudaEngine(geometry, window, None, double, batch, StepPool())
    copier = Copier(geometry, window, engine)
    oracle = Oracle(geometry, window)
    for job, way in enumerate(data.draw(st.lists(st.sampled_from([LOAD, STORE]), max_size=4))):
        plan = data.draw(plans(geometry, window.num_rows, way))
        copier.submit(CopyPlan(job, way, plan.rows))
        double.drain()
        (outcome,) = copier.poll()
        assert outcome.ok
        oracle.apply(plan)
        assert oracle.agrees()


@pytest.mark.parametrize("batch", BOTH_COPIES)
def test_f08_store_waits_for_the_slow_writer(batch: BatchCopy | None) -> None:
    world = World(batch=batch)
    world.write_block(3, 77)
    world.submit(1, STORE, row(0, 3))
    world.double.rush_copies()
    assert world.outcomes() == {}
    world.double.drain()
    assert world.outcomes()[1].ok
    assert slice_bytes_of(world.window, 0)[:16] == [77] * 16


@pytest.mark.parametrize("batch", BOTH_COPIES)
def test_f08_canary_without_the_wait_stores_wrong_bytes(batch: BatchCopy | None) -> None:
    world = World(UnorderedEngine, batch)
    stale = world.block(3)
    world.write_block(3, 77)
    world.submit(1, STORE, row(0, 3))
    world.run_adversary()
    assert world.outcomes()[1].ok, "nobody noticed"
    assert slice_bytes_of(world.window, 0)[:16] == stale


def test_store_waits_for_the_stream_as_it_was_at_submit() -> None:
    world = World(at_once=False)
    world.write_block(3, 77)
    world.submit(1, STORE, row(0, 3))
    world.write_block(5, 1)  # queued after the submit: the store must not wait for it
    world.pool.run()
    for _ in range(2):
        world.double.step(world.double.compute)
    world.double.rush_copies()
    world.copier.poll()
    world.pool.run()
    assert world.outcomes()[1].ok
    assert slice_bytes_of(world.window, 0)[:16] == [77] * 16
    assert len(world.double.compute.queue) == 1


def zero_then_load(world: World) -> list[int]:
    """Zeroing of block 3 is queued by the model, then row 0 is loaded into it."""
    world.write_block(3, 0)
    world.submit(1, LOAD, row(0, 3))
    world.run_adversary()
    assert world.outcomes()[1].ok
    return world.block(3)


def test_load_lands_after_pending_zeroing() -> None:
    world = World()
    assert zero_then_load(world) == slice_bytes_of(world.window, 0)[:16]


def test_canary_load_without_the_wait_is_zeroed_afterwards() -> None:
    assert zero_then_load(World(UnorderedEngine)) == [0] * 16


def test_load_proof_runs_before_anything_is_queued() -> None:
    world = World(at_once=False)
    world.submit(1, LOAD, row(0, 3))
    assert not world.double.copies[1].queue
    assert world.proof.log == []
    world.pool.run()
    assert world.proof.log == [("before_load", 0)]
    assert [op.kind for op in world.double.copies[1].queue] == ["wait", "work", "mark"]


def test_loads_of_one_direction_end_in_order() -> None:
    world = World()
    world.submit(1, LOAD, row(0, 3))
    world.submit(2, LOAD, row(1, 4))
    while not world.outcomes().get(1):
        assert world.double.step(world.double.compute) or world.double.step(world.double.copies[1])
    world.double.drain()
    assert list(world.outcomes()) == [2]


def test_store_is_proven_after_its_copy_and_only_then_reported() -> None:
    world = World(at_once=False)
    seen: list[list[int]] = []
    world.proof.answers["after_store", 0] = lambda: seen.append(slice_bytes_of(world.window, 0))
    world.submit(1, STORE, RowPlan(0, 0, ((1, 3),)))
    world.pool.run()
    assert world.proof.log == [("fence", 0)]
    world.double.drain()
    assert world.outcomes() == {}
    assert world.proof.log == [("fence", 0)], "the proof belongs to a host thread"
    world.pool.run()
    assert world.outcomes()[1].ok
    assert seen == [([0] * 16 + world.block(3)) * 1 + ([0] * 16 + _second(world, 3))]


def _second(world: World, block: int) -> list[int]:
    return [int(v) for v in world.geometry.tensors[1].view[block].tolist()]


def test_f09_store_does_not_read_a_block_that_is_being_loaded() -> None:
    world = World()
    world.submit(1, LOAD, row(0, 3, 4))
    world.submit(2, STORE, row(1, 4, 5))
    assert not world.double.copies[0].queue, "nothing of the store is queued"
    world.double.drain(world.double.copies[0])
    world.double.drain()
    assert world.outcomes()[1].ok
    world.double.drain()
    assert world.outcomes()[2].ok
    assert slice_bytes_of(world.window, 1)[:16] == slice_bytes_of(world.window, 0)[16:32]


def test_f09_load_does_not_overwrite_a_block_that_is_being_stored() -> None:
    world = World()
    before = world.block(4)
    world.submit(1, STORE, row(0, 4))
    world.submit(2, LOAD, row(1, 4))
    world.double.drain(world.double.compute, world.double.copies[1])
    assert world.block(4) == before
    world.double.drain()
    world.outcomes()
    world.double.drain()
    assert world.outcomes()[2].ok
    assert slice_bytes_of(world.window, 0)[:16] == before
    assert world.block(4) == slice_bytes_of(world.window, 1)[:16]


def test_f09_failed_load_no_later_copy() -> None:
    world = World(at_once=False)
    world.proof.answers["before_load", 0] = "corrupt"
    oracle = Oracle(world.geometry, world.window)
    world.submit(1, LOAD, row(0, 3, 4))
    world.submit(2, STORE, row(1, 4, 5))
    world.pool.run()
    world.submit(3, STORE, row(2, 3))
    world.pool.run()
    world.double.drain()
    outcomes = world.outcomes()
    assert outcomes[1].failures == ((row(0, 3, 4), "corrupt"),)
    assert outcomes[2].failures == ((row(1, 4, 5), SourceNotLoaded(4)),)
    assert outcomes[3].failures == ((row(2, 3), SourceNotLoaded(3)),)
    assert ("stream-1", "work") not in world.double.log
    assert oracle.agrees()


def test_refused_rows_do_not_stop_the_others_of_a_store() -> None:
    world = World()
    world.proof.answers["fence", 1] = "fenced"
    world.proof.answers["after_store", 2] = "full"
    world.submit(1, STORE, row(0, 1), row(1, 2), row(2, 3))
    world.double.drain()
    outcome = world.outcomes()[1]
    assert outcome.failures == ((row(1, 2), "fenced"), (row(2, 3), "full"))
    assert outcome.bytes == 32
    assert slice_bytes_of(world.window, 0)[:16] == world.block(1)


@pytest.mark.parametrize(
    ("step", "way"), [("before_load", LOAD), ("fence", STORE), ("after_store", STORE)]
)
def test_exception_in_a_proof_is_a_value(step: str, way: Any) -> None:
    world = World()
    world.proof.answers[step, 0] = raising(SystemExit)
    world.submit(1, way, row(0, 1))
    world.double.drain()
    assert world.outcomes()[1].failures == ((row(0, 1), CopyFault(step, "SystemExit")),)
    world.submit(2, way, row(1, 1))
    world.double.drain()
    assert world.outcomes()[2].ok


def test_failed_launch_is_reported_only_behind_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(world.double, "launch", lambda stream, work: 1 // 0)
    world.submit(1, LOAD, row(0, 3))
    assert world.outcomes() == {}, "part of its copies may still be on their way"
    world.double.drain()
    fault = CopyFault("copy", "ZeroDivisionError")
    assert world.outcomes()[1].failures == ((row(0, 3), fault),)


def test_broken_device_fails_jobs_and_raises_nothing() -> None:
    world = World()
    world.submit(1, LOAD, row(0, 3))
    world.double.broken_query = True
    assert world.outcomes()[1].failures == ((row(0, 3), CopyFault("event", "RuntimeError")),)
    world.submit(2, STORE, row(0, 4))
    assert world.outcomes()[2].failures == ((row(0, 4), CopyFault("event", "RuntimeError")),)


@pytest.mark.parametrize(("call", "step"), [("record", "admit"), ("wait_event", "copy")])
def test_runtime_errors_at_each_call_fail_the_job(
    call: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    monkeypatch.setattr(world.double, call, lambda *args: 1 // 0)
    world.submit(1, STORE, row(0, 3))
    world.double.drain()
    fault = CopyFault(step, "ZeroDivisionError")
    assert world.outcomes()[1].failures == ((row(0, 3), fault),)


def test_wait_ends_at_its_deadline_when_the_device_does_not() -> None:
    world = World()
    world.submit(1, LOAD, row(0, 3))
    assert not world.copier.wait({1}, 0.01)
    world.double.drain()
    assert world.copier.wait({1}, 20)
    assert world.outcomes()[1].ok


class Registrar:
    def __init__(self) -> None:
        self.released: list[int] = []

    def register(self, address: int, length: int) -> int:
        return 0

    def unregister(self, address: int) -> int:
        self.released.append(address)
        return 0


def test_shutdown_with_a_copy_in_flight_keeps_the_memory_pinned() -> None:
    registrar = Registrar()
    world = World(pinned=PinnedRows(registrar, [4096]))
    world.submit(1, STORE, row(0, 3))
    world.submit(2, LOAD, row(0, 5))
    assert not world.copier.shutdown(0.01)
    assert registrar.released == [], "the device may still write there"
    assert world.outcomes() == {}
    world.double.drain()
    assert world.copier.shutdown(20)
    assert registrar.released == [4096]
    outcomes = world.outcomes()
    assert outcomes[1].ok
    assert outcomes[2].failures == ((row(0, 5), CopyFault("start", "Shutdown")),)


def test_shutdown_drops_what_the_device_has_not_seen() -> None:
    world = World(at_once=False)
    world.submit(1, LOAD, row(0, 3))
    world.submit(2, STORE, row(1, 4))
    oracle = Oracle(world.geometry, world.window)
    world.copier.shutdown(0)
    world.pool.run()
    world.double.drain()
    assert world.copier.shutdown(20)
    assert [outcome.ok for outcome in world.outcomes().values()] == [False, False]
    assert world.proof.log == []
    assert oracle.agrees()


def test_with_real_host_threads() -> None:
    world = World()
    world.engine._pool = HostPool(2, "test-proof")
    for job in range(12):
        world.submit(job, STORE if job % 2 else LOAD, row(job % 4, 1 + job))
    seen: dict[int, CopyOutcome] = {}
    while len(seen) < 12:
        world.double.drain()
        world.copier.wait(set(range(12)), 0.001)
        seen |= world.outcomes()
    assert all(outcome.ok for outcome in seen.values())
    assert world.copier.shutdown(20)


def test_cuda_copier_refuses_cpu_tensors() -> None:
    geometry = simple_geometry()
    with pytest.raises(ValueError, match="cannot copy cpu"):
        cuda_copier(geometry, window_for(geometry), None)


def test_double_runs_nothing_by_itself() -> None:
    double = StreamDouble()
    target = torch.zeros(1)
    event = double.new_event()
    assert double.query(event), "an event that was never recorded counts as fired"
    double.kernel(lambda: target.fill_(1))
    double.record(event, double.compute)
    copies = double.new_stream()
    double.wait_event(copies, event)
    double.launch(copies, lambda: target.mul_(5))
    double.rush_copies()
    assert (target.item(), double.query(event)) == (0, False)
    double.drain()
    assert (target.item(), double.query(event)) == (5, True)

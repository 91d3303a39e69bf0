# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine on a real device."""

from collections.abc import Iterator

import pytest
import torch

from kvsafe.device import (
    Copier,
    CopyPlan,
    CudaEngine,
    DeviceTensor,
    Geometry,
    GroupRef,
    HostPool,
    RowPlan,
    RowWindow,
    TorchStreams,
    cuda_copier,
    find_registrar,
    pin_rows,
)

from .proofs import ScriptedProof
from .worlds import LOAD, STORE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE, BLOCKS, SPAN, ROWS, HEADER = 64 * 1024, 64, 4, 8, 4096


def make_geometry() -> Geometry:
    with torch.inference_mode():  # as engines make their KV tensors
        tensors = tuple(
            DeviceTensor(
                torch.randint(-128, 128, (BLOCKS, PAGE), dtype=torch.int8, device="cuda"),
                PAGE,
                (f"layer{index}",),
            )
            for index in range(3)
        )
    return Geometry(tensors, (tuple(GroupRef(index, PAGE) for index in range(3)),), SPAN)


def make_window(geometry: Geometry) -> RowWindow:
    stride = HEADER + geometry.slice_bytes
    base = torch.zeros(ROWS * stride, dtype=torch.int8)
    return RowWindow(base, 0, ROWS, stride, HEADER, geometry.slice_bytes)


class World:
    def __init__(self, pin: bool) -> None:
        self.geometry = make_geometry()
        self.window = make_window(self.geometry)
        self.proof = ScriptedProof()
        if pin:
            self.copier = cuda_copier(self.geometry, self.window, self.proof)
        else:
            runtime = TorchStreams(self.geometry.tensors[0].view.device)
            pool = HostPool(2, "kvsafe-proof")
            engine = CudaEngine(self.geometry, self.window, self.proof, runtime, pool=pool)
            self.copier = Copier(self.geometry, self.window, engine)

    def run(self, job: int, way: object, row: RowPlan) -> None:
        self.copier.submit(CopyPlan(job, way, (row,)))  # type: ignore[arg-type]
        assert self.copier.wait({job}, 60)
        assert [outcome.ok for outcome in self.copier.poll()] == [True]

    def stored(self, row: int) -> torch.Tensor:
        start = self.window.slice_start(row)
        return self.window.base[start : start + self.window.slice_bytes]

    def expected(self, blocks: list[int]) -> torch.Tensor:
        parts = [tensor.view[blocks].cpu().reshape(-1) for tensor in self.geometry.tensors]
        return torch.cat(parts)


@pytest.fixture(params=[True, False], ids=["pinned", "pageable"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    assert made.copier.shutdown(60)


def full_row(number: int, first: int) -> RowPlan:
    return RowPlan(number, 0, tuple((slot, first + slot) for slot in range(SPAN)))


def test_round_trip(world: World) -> None:
    blocks = [5, 6, 7, 8]
    before = world.expected(blocks)
    world.run(1, STORE, full_row(2, 5))
    assert torch.equal(world.stored(2), before)
    world.run(2, LOAD, full_row(2, 20))
    torch.cuda.synchronize()
    assert torch.equal(world.expected([20, 21, 22, 23]), before)


def test_part_of_a_chunk_leaves_zeros(world: World) -> None:
    world.window.base.fill_(9)
    world.run(1, STORE, RowPlan(0, 0, ((1, 30),)))
    slots = world.stored(0).reshape(3, SPAN, PAGE)
    assert int(slots[:, [0, 2, 3]].abs().max()) == 0
    assert torch.equal(slots[:, 1].reshape(-1), world.expected([30]))


def test_f08_store_waits_for_a_slow_writer(world: World) -> None:
    torch.cuda._sleep(200_000_000)
    with torch.inference_mode():
        for tensor in world.geometry.tensors:
            tensor.view[5:9] = 77
    world.run(1, STORE, full_row(0, 5))
    assert torch.equal(world.stored(0), torch.full_like(world.stored(0), 77))


def test_load_lands_after_pending_zeroing(world: World) -> None:
    world.window.base.fill_(33)
    torch.cuda._sleep(200_000_000)
    with torch.inference_mode():
        for tensor in world.geometry.tensors:
            tensor.view[5:9] = 0
    world.run(1, LOAD, full_row(0, 5))
    torch.cuda.synchronize()
    assert int((world.expected([5, 6, 7, 8]) != 33).sum()) == 0


def test_refused_load_copies_nothing(world: World) -> None:
    before = world.expected([5, 6, 7, 8])
    world.proof.answers["before_load", 0] = "no"
    world.copier.submit(CopyPlan(1, LOAD, (full_row(0, 5),)))
    assert world.copier.wait({1}, 60)
    assert not world.copier.poll()[0].ok
    torch.cuda.synchronize()
    assert torch.equal(world.expected([5, 6, 7, 8]), before)


def test_registration_makes_the_memory_pinned_and_gives_it_back() -> None:
    window = make_window(make_geometry())
    pinned = pin_rows(find_registrar(), window)
    assert pinned is not None
    assert window.base.is_pinned()
    pinned.release()
    assert not window.base.is_pinned()

# SPDX-License-Identifier: Apache-2.0
"""What an engine tells by itself, without the copier that would cover it up."""

from __future__ import annotations

from typing import Any

import pytest

from kvsafe.device import CopyFault, CopyTask, CpuEngine, CudaEngine, Direction, RowPlan

from .proofs import ScriptedProof
from .stream_double import StepPool, StreamDouble
from .worlds import LOAD, STORE, fill_world, simple_geometry, window_for

ROW = RowPlan(0, 0, ((0, 1), (1, 2)))


class Told:
    """An engine, and everything that it reports."""

    def __init__(self, kind: str) -> None:
        geometry = simple_geometry()
        window = window_for(geometry)
        fill_world(geometry, window)
        self.proof, self.pool, self.double = ScriptedProof(), StepPool(), StreamDouble()
        self.engine: Any = (
            CpuEngine(geometry, window, self.proof, pool=self.pool)
            if kind == "cpu"
            else CudaEngine(geometry, window, self.proof, self.double, pool=self.pool)
        )
        self.told: list[tuple[object, int]] = []

    def run(self, way: Direction) -> list[tuple[object, int]]:
        ticket = self.engine.admit(way)
        task = CopyTask(1, way, ROW, ticket)
        assert self.engine.start([task], self._done) is None
        self.double.drain()
        assert self.engine.advance() is None
        return self.told

    def _done(self, task: CopyTask, failure: object | None, moved: int) -> None:
        assert task.row is ROW
        self.told.append((failure, moved))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("way", [LOAD, STORE])
def test_bytes_are_told_for_what_was_copied_only(kind: str, way: Direction) -> None:
    # Two blocks in each of two tensors of pages of 16 bytes.
    assert Told(kind).run(way) == [(None, 64)]
    for step in ("before_load",) if way is LOAD else ("fence", "after_store"):
        refused = Told(kind)
        refused.proof.answers[step, 0] = "no"
        assert refused.run(way) == [("no", 0)]
    closed = Told(kind)
    assert closed.engine.close(0) is True
    assert closed.run(way) == [(CopyFault("start", "Shutdown"), 0)]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_engine_is_looked_at_often_enough(kind: str) -> None:
    assert 0 < Told(kind).engine.tick_s <= 0.05

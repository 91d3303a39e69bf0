# SPDX-License-Identifier: Apache-2.0
"""What `cuda_copier` puts together, with a stream double where the device runtime would be."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from kvsafe.device import CopyPlan, Geometry, GeometryError, RowPlan, cuda_copier
from kvsafe.device import cuda as module

from .proofs import ScriptedProof
from .stream_double import StreamDouble
from .worlds import STORE, fill_world, simple_geometry, slice_bytes_of, window_for


class Registrar:
    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def register(self, address: int, length: int) -> int:
        self.pinned[address] = length
        return 0

    def unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


class Built:
    """A copier over tensors that say they are on a CUDA device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.geometry = simple_geometry(blocks=8)
        self.geometry.__dict__["device_type"] = "cuda"
        self.window = window_for(self.geometry)
        fill_world(self.geometry, self.window)
        self.double, self.registrar, self.proof = StreamDouble(), Registrar(), ScriptedProof()
        self.devices: list[torch.device] = []

        def streams(device: torch.device) -> StreamDouble:
            self.devices.append(device)
            return self.double

        monkeypatch.setattr(module, "TorchStreams", streams)
        monkeypatch.setattr(module, "find_registrar", lambda: self.registrar)
        self.copier = cuda_copier(self.geometry, self.window, self.proof, **options)


def _threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("kvsafe-proof"))


@pytest.mark.parametrize(("options", "threads"), [({}, 2), ({"threads": 1}, 1)])
def test_rows_are_pinned_proven_copied_and_released(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, int], threads: int
) -> None:
    before = len(_threads())
    built = Built(monkeypatch, **options)
    assert len(_threads()) - before == threads
    assert built.devices == [built.geometry.tensors[0].view.device]
    window = built.window
    first = window.base.data_ptr() + window.rows_offset
    assert built.registrar.pinned == {first: window.num_rows * window.row_stride}
    built.copier.submit(CopyPlan(1, STORE, (RowPlan(0, 0, ((0, 3), (1, 4))),)))
    for _ in range(10_000):
        built.double.drain()
        if built.copier.wait({1}, 0.01):
            break
    [outcome] = built.copier.poll()
    assert outcome.ok
    assert built.proof.log == [("fence", 0), ("after_store", 0)]
    assert slice_bytes_of(window, 0)[:16] == built.geometry.tensors[0].view[3].tolist()
    assert built.copier.shutdown(20) is True
    assert built.registrar.pinned == {}
    assert len(_threads()) == before


def test_a_batch_copy_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    built = Built(monkeypatch, batch_copy=lambda source, target, size: sizes.extend(size.tolist()))
    built.copier.submit(CopyPlan(1, STORE, (RowPlan(0, 0, ((0, 3),)),)))
    for _ in range(10_000):
        built.double.drain()
        if built.copier.wait({1}, 0.01):
            break
    assert sizes == [16, 16]
    assert built.copier.shutdown(20) is True


def test_what_cannot_be_used_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _threads()
    registrar = Registrar()
    monkeypatch.setattr(module, "find_registrar", lambda: registrar)
    geometry = simple_geometry()
    for bad, window in (
        (Geometry(geometry.tensors, (), 2), window_for(geometry)),
        (simple_geometry(span=3), window_for(geometry)),
    ):
        bad.__dict__["device_type"] = "cuda"
        with pytest.raises(GeometryError):
            cuda_copier(bad, window, None)
    assert _threads() == before
    assert registrar.pinned == {}

# SPDX-License-Identifier: Apache-2.0
"""Copies for KV caches in host memory: numpy in a few threads of our own.

Not `torch.Tensor.copy_`: from a background thread it would start an OpenMP team beside the model.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvsafe.device.copier import Copier
from kvsafe.device.geometry import Geometry
from kvsafe.device.order import CopyTask
from kvsafe.device.plan import Direction, RowPlan, RowWindow
from kvsafe.device.pool import HostPool, WorkPool
from kvsafe.device.slicemap import SliceMap
from kvsafe.device.work import CopyFault, SliceProof, Step, TaskDone, first_refusal

Bytes = npt.NDArray[np.int8]

# Longer copies make the C library bypass the cache; the proof that follows a store, and the
# copy that follows a load's proof, would then find their bytes in memory again.
PIECE_BYTES = 256 * 1024


def move_bytes(target: Bytes, at: int, source: Bytes, start: int, length: int) -> None:
    """Copy `length` bytes between two flat arrays in pieces of at most PIECE_BYTES."""
    for offset in range(0, length, PIECE_BYTES):
        size = min(PIECE_BYTES, length - offset)
        to, frm = at + offset, start + offset
        target[to : to + size] = source[frm : frm + size]


class CpuEngine:
    """Runs each row in one thread: prove and copy, or fence, copy, zero the gaps and prove."""

    tick_s = 0.05

    def __init__(
        self,
        geometry: Geometry,
        window: RowWindow,
        verify: SliceProof | None,
        threads: int = 1,
        pool: WorkPool | None = None,
    ) -> None:
        """`pool` replaces the engine's own threads.  Raises ValueError for other devices."""
        if geometry.device_type != "cpu":
            raise ValueError(f"the cpu engine cannot copy {geometry.device_type} tensors")
        self._window = window
        self._map = SliceMap(geometry)
        self._host: Bytes = window.base.numpy()
        self._device: list[Bytes] = [tensor.flat().numpy() for tensor in geometry.tensors]
        self._pool = pool if pool is not None else HostPool(threads, "kvsafe-copy")
        self._closing = False
        self._steps = _steps(self, verify)

    def admit(self, direction: Direction) -> object:
        """Nothing to wait for: what the model wrote before submit is in memory."""
        return None

    def start(self, tasks: Sequence[CopyTask], done: TaskDone) -> None:
        """Queue each task for the pool."""
        for task in tasks:
            self._pool.submit(partial(self._run, task, done))

    def _run(self, task: CopyTask, done: TaskDone) -> None:
        if self._closing:
            done(task, CopyFault("start", "Shutdown"), 0)
            return
        failure = first_refusal(self._steps[task.direction], task.row)
        done(task, failure, 0 if failure is not None else self._map.size(task.row))

    def copy_in(self, row: RowPlan) -> None:
        """Row -> device."""
        start = self._window.slice_start(row.row)
        for offset, tensor, device_offset, length in self._map.spans(row):
            device = self._device[tensor]
            move_bytes(device, device_offset, self._host, start + offset, length)

    def copy_out(self, row: RowPlan) -> None:
        """Device -> row, zeros where the row has no bytes of its own."""
        start = self._window.slice_start(row.row)
        for offset, tensor, device_offset, length in self._map.spans(row):
            device = self._device[tensor]
            move_bytes(self._host, start + offset, device, device_offset, length)
        for offset, length in self._map.gaps(row):
            self._host[start + offset : start + offset + length] = 0

    def advance(self) -> None:
        """Nothing: the threads report by themselves."""

    def close(self, timeout_s: float) -> bool:
        """Let running rows end and drop the others."""
        self._closing = True
        return self._pool.close(timeout_s)


def _steps(engine: CpuEngine, verify: SliceProof | None) -> dict[Direction, list[Step]]:
    load: list[Step] = [("copy", engine.copy_in)]
    store: list[Step] = [("copy", engine.copy_out)]
    if verify is not None:
        load.insert(0, ("before_load", verify.before_load))
        store.insert(0, ("fence", verify.fence))
        store.append(("after_store", verify.after_store))
    return {Direction.LOAD: load, Direction.STORE: store}


def cpu_copier(
    geometry: Geometry, window: RowWindow, verify: SliceProof | None, threads: int = 1
) -> Copier:
    """A copier over host tensors; raises GeometryError when they cannot be used."""
    geometry.check()
    window.check(geometry)
    return Copier(geometry, window, CpuEngine(geometry, window, verify, threads))

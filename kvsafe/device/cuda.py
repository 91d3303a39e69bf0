# SPDX-License-Identifier: Apache-2.0
"""Copies for KV caches on CUDA and ROCm devices: own streams, polled events, proofs on the host."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvsafe.device.copier import Copier
from kvsafe.device.geometry import Geometry
from kvsafe.device.order import CopyTask
from kvsafe.device.pinning import PinnedRows, find_registrar, pin_rows
from kvsafe.device.plan import Direction, RowPlan, RowWindow
from kvsafe.device.pool import HostPool, WorkPool
from kvsafe.device.slicemap import SliceMap
from kvsafe.device.streams import Event, Stream, StreamRuntime, TorchStreams
from kvsafe.device.work import CopyFault, SliceProof, TaskDone, ask

_LOG = logging.getLogger(__name__)

BatchCopy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(source pointers, target pointers, sizes): CPU int64 tensors; copies on the current stream."""


@dataclass(slots=True)
class _Flight:
    """Copies queued together, and the event behind the last of them."""

    tasks: Sequence[CopyTask]
    done: TaskDone
    event: Event | None = None
    fault: CopyFault | None = None
    pointers: Sequence[torch.Tensor] = ()  # kept alive until the event


class CudaEngine:
    """One stream per direction; a proof runs in a host thread before a load, after a store.

    A store: fence (host) -> wait for the submit event -> copy -> event -> gaps, proof (host).
    A load: proof (host) -> wait for the submit event -> copy -> event.
    Transfers of one direction end in the order in which they were queued; the copier holds back
    whatever conflicts with a transfer of the other direction until that one has ended.
    """

    tick_s = 0.0005

    def __init__(
        self,
        geometry: Geometry,
        window: RowWindow,
        verify: SliceProof | None,
        runtime: StreamRuntime,
        batch_copy: BatchCopy | None = None,
        pool: WorkPool | None = None,
        pinned: PinnedRows | None = None,
    ) -> None:
        """`pinned` is released by `close`.  Without `pool` two host threads are started."""
        self._window = window
        self._verify = verify
        self._runtime = runtime
        self._batch_copy = batch_copy
        self._pinned = pinned
        self._map = SliceMap(geometry)
        self._host = window.base.numpy()
        self._tensors = [tensor.flat() for tensor in geometry.tensors]
        self._streams: dict[Direction, Stream] = {way: runtime.new_stream() for way in Direction}
        self._flights: dict[Direction, deque[_Flight]] = {way: deque() for way in Direction}
        self._pool = pool if pool is not None else HostPool(2, "kvsafe-proof")
        self._lock = threading.Lock()
        self._active = 0
        self._closing = False

    def admit(self, direction: Direction) -> object:
        """Mark what the model has queued up to this submit; the job's copies come after it."""
        event = self._runtime.new_event()
        self._runtime.record(event, self._runtime.compute_stream())
        return event

    def start(self, tasks: Sequence[CopyTask], done: TaskDone) -> None:
        """Stores of one job go as one batch; each load goes as soon as it is proven."""
        with self._lock:
            self._active += len(tasks)
        stores: dict[int, list[CopyTask]] = {}
        for task in tasks:
            if task.direction is Direction.LOAD:
                self._pool.submit(partial(self._begin, [task], done))
            else:
                stores.setdefault(task.job, []).append(task)
        for batch in stores.values():
            self._pool.submit(partial(self._begin, batch, done))

    def _begin(self, tasks: Sequence[CopyTask], done: TaskDone) -> None:
        """Host thread: ask the proof, then queue the copies of what may go."""
        go = []
        for task in tasks:
            refusal = self._refusal(task)
            if refusal is None:
                go.append(task)
            else:
                self._end(task, done, refusal)
        if go:
            self._enqueue(_Flight(go, done))

    def _refusal(self, task: CopyTask) -> object | None:
        if self._closing:
            return CopyFault("start", "Shutdown")
        if self._verify is None:
            return None
        if task.direction is Direction.LOAD:
            return ask("before_load", self._verify.before_load, task.row)
        return ask("fence", self._verify.fence, task.row)

    def _enqueue(self, flight: _Flight) -> None:
        # Under the lock: the order of flights is the order of their events on the stream.
        direction = flight.tasks[0].direction
        stream = self._streams[direction]
        with self._lock:
            try:
                self.order_after_compute(stream, flight.tasks[0].ticket)
                self._runtime.launch(stream, partial(self._copy, flight))
            except Exception as error:
                flight.fault = CopyFault("copy", type(error).__name__)
            self._mark_end(flight, stream)
            self._flights[direction].append(flight)

    def order_after_compute(self, stream: Stream, ticket: object) -> None:
        """The copies queued next wait for all that the model had queued when the job came."""
        self._runtime.wait_event(stream, ticket)

    def _mark_end(self, flight: _Flight, stream: Stream) -> None:
        # Also behind a launch that raised: part of its copies may be on their way, and nobody
        # may use the blocks or the row before they have landed.
        try:
            event = self._runtime.new_event()
            self._runtime.record(event, stream)
            flight.event = event
        except Exception as error:
            flight.fault = CopyFault("event", type(error).__name__)

    def _copy(self, flight: _Flight) -> None:
        direction = flight.tasks[0].direction
        rows = [task.row for task in flight.tasks]
        if self._batch_copy is None:
            self._copy_views(direction, rows)
        else:
            flight.pointers = source, target, sizes = self._pointers(direction, rows)
            self._batch_copy(source, target, sizes)

    def _pointers(
        self, direction: Direction, rows: Sequence[RowPlan]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        host: list[int] = []
        device: list[int] = []
        sizes: list[int] = []
        bases = [tensor.data_ptr() for tensor in self._tensors]
        for row in rows:
            start = self._window.base.data_ptr() + self._window.slice_start(row.row)
            for offset, tensor, device_offset, length in self._map.spans(row):
                host.append(start + offset)
                device.append(bases[tensor] + device_offset)
                sizes.append(length)
        source, target = (device, host) if direction is Direction.STORE else (host, device)
        return _int64(source), _int64(target), _int64(sizes)

    def _copy_views(self, direction: Direction, rows: Sequence[RowPlan]) -> None:
        """Plain torch copies, for builds without a batch copy."""
        for row in rows:
            start = self._window.slice_start(row.row)
            for offset, tensor, at, length in self._map.spans(row):
                host = self._window.base[start + offset : start + offset + length]
                device = self._tensors[tensor][at : at + length]
                if direction is Direction.STORE:
                    host.copy_(device, non_blocking=True)
                else:
                    device.copy_(host, non_blocking=True)

    def advance(self) -> None:
        """Take the flights whose event has fired; stores go on to their proof."""
        for flights in self._flights.values():
            while (flight := self._landed(flights)) is not None:
                self._land(flight)

    def _landed(self, flights: deque[_Flight]) -> _Flight | None:
        with self._lock:
            if not flights:
                return None
            flight = flights[0]
            try:
                if flight.event is not None and not self._runtime.query(flight.event):
                    return None
            except Exception as error:
                flight.fault = CopyFault("event", type(error).__name__)
            return flights.popleft()

    def _land(self, flight: _Flight) -> None:
        for task in flight.tasks:
            if flight.fault is not None or task.direction is Direction.LOAD:
                self._end(task, flight.done, flight.fault)
            else:
                self._pool.submit(partial(self._prove_store, task, flight.done))

    def _prove_store(self, task: CopyTask, done: TaskDone) -> None:
        """Host thread: the copied bytes are in the row; make the slice final and prove it."""
        failure = ask("zero", self._zero_gaps, task.row)
        if failure is None and self._verify is not None:
            failure = ask("after_store", self._verify.after_store, task.row)
        self._end(task, done, failure)

    def _zero_gaps(self, row: RowPlan) -> None:
        start = self._window.slice_start(row.row)
        for offset, length in self._map.gaps(row):
            self._host[start + offset : start + offset + length] = 0

    def _end(self, task: CopyTask, done: TaskDone, failure: object | None) -> None:
        moved = 0 if failure is not None else self._map.size(task.row)
        done(task, failure, moved)
        with self._lock:
            self._active -= 1

    def close(self, timeout_s: float) -> bool:
        """Let what was queued on the device land, drop the rest, unpin the rows.

        At the deadline nothing is unpinned: the device may still write there.
        """
        self._closing = True
        deadline = time.monotonic() + timeout_s
        while self._active > 0 and time.monotonic() < deadline:
            self.advance()
            time.sleep(self.tick_s)
        if self._active > 0:
            _LOG.warning("%d rows were still being copied at shutdown", self._active)
            return False
        ended = self._pool.close(max(0.0, deadline - time.monotonic()))
        if self._pinned is not None:
            self._pinned.release()
        return ended


def _int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def cuda_copier(
    geometry: Geometry,
    window: RowWindow,
    verify: SliceProof | None,
    batch_copy: BatchCopy | None = None,
    threads: int = 2,
) -> Copier:
    """A copier over CUDA tensors; raises GeometryError when they cannot be used.

    batch_copy: the engine's own batched copy, where it has one.  threads: for the proofs.
    """
    geometry.check()
    window.check(geometry)
    if geometry.device_type != "cuda":
        raise ValueError(f"the cuda engine cannot copy {geometry.device_type} tensors")
    runtime = TorchStreams(geometry.tensors[0].view.device)
    pinned = pin_rows(find_registrar(), window)
    pool = HostPool(threads, "kvsafe-proof")
    engine = CudaEngine(geometry, window, verify, runtime, batch_copy, pool, pinned)
    return Copier(geometry, window, engine)

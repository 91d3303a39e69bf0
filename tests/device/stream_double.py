# SPDX-License-Identifier: Apache-2.0
"""A device runtime whose queued work runs only when the test says so.

A stream is a first-in-first-out list of operations: work, the mark of an event, the wait for a
mark.  Work moves real bytes of CPU tensors at the moment it is run.  As on a real device, a wait
holds for the event's last record at the time of the call, and an unrecorded event counts as fired.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Mark:
    """One record of an event."""

    fired: bool = False


@dataclass(eq=False)
class DoubleEvent:
    mark: Mark | None = None


@dataclass(eq=False)
class Operation:
    """kind: `work`, `mark` or `wait`."""

    kind: str
    action: Callable[[], None] | None = None
    mark: Mark | None = None

    def ready(self) -> bool:
        return self.kind != "wait" or self.mark is None or self.mark.fired


@dataclass(eq=False)
class DoubleStream:
    name: str
    queue: deque[Operation] = field(default_factory=deque)


class StreamDouble:
    """StreamRuntime for tests; `log` names what was run, in order."""

    def __init__(self) -> None:
        self.compute = DoubleStream("compute")
        self.streams = [self.compute]
        self.log: list[tuple[str, str]] = []
        self.broken_query = False

    def compute_stream(self) -> DoubleStream:
        return self.compute

    def new_stream(self) -> DoubleStream:
        stream = DoubleStream(f"stream-{len(self.streams)}")
        self.streams.append(stream)
        return stream

    def new_event(self) -> DoubleEvent:
        return DoubleEvent()

    def record(self, event: DoubleEvent, stream: DoubleStream) -> None:
        event.mark = Mark()
        stream.queue.append(Operation("mark", mark=event.mark))

    def wait_event(self, stream: DoubleStream, event: DoubleEvent) -> None:
        stream.queue.append(Operation("wait", mark=event.mark))

    def query(self, event: DoubleEvent) -> bool:
        if self.broken_query:
            raise RuntimeError("device lost")
        return event.mark is None or event.mark.fired

    def launch(self, stream: DoubleStream, work: Callable[[], None]) -> None:
        stream.queue.append(Operation("work", action=work))

    def kernel(self, action: Callable[[], None]) -> None:
        """Queue model work on the compute stream."""
        self.launch(self.compute, action)

    def step(self, stream: DoubleStream) -> bool:
        """Run the head of a stream if it may run."""
        if not stream.queue or not stream.queue[0].ready():
            return False
        operation = stream.queue.popleft()
        if operation.action is not None:
            operation.action()
        if operation.kind == "mark" and operation.mark is not None:
            operation.mark.fired = True
        self.log.append((stream.name, operation.kind))
        return True

    def drain(self, *streams: DoubleStream) -> None:
        """Run these streams (all by default) as far as they may go."""
        chosen = streams or tuple(self.streams)
        moved = True
        while moved:
            moved = False
            for stream in chosen:
                moved |= self.step(stream)

    def rush_copies(self) -> None:
        """The adversary: copies run as far as they may before any model work does."""
        self.drain(*self.streams[1:])

    @property
    def copies(self) -> list[DoubleStream]:
        return self.streams[1:]


class StepPool:
    """WorkPool whose actions run in the test's thread: at once, or when `run` is called."""

    def __init__(self, at_once: bool = True) -> None:
        self.at_once = at_once
        self.queue: deque[Callable[[], None]] = deque()

    def submit(self, action: Callable[[], None]) -> None:
        self.queue.append(action)
        if self.at_once:
            self.run()

    def run(self, limit: int | None = None) -> None:
        while self.queue and limit != 0:
            self.queue.popleft()()
            limit = None if limit is None else limit - 1

    def close(self, timeout_s: float) -> bool:
        self.run()
        return True


def batch_copy(source: torch.Tensor, target: torch.Tensor, sizes: torch.Tensor) -> None:
    """What the engine's batched copy does, for CPU pointers."""
    rows = zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True)
    for start, at, size in rows:
        ctypes.memmove(at, start, size)

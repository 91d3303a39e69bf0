# SPDX-License-Identifier: Apache-2.0
"""The few stream and event calls that the CUDA engine makes, behind one protocol."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

# Streams and events are the runtime's own objects; the engine only hands them back to it.
Stream = Any
Event = Any

# torch leaves these two without types.
_NEW_STREAM: Callable[[torch.device], Stream] = torch.cuda.Stream
_NEW_EVENT: Callable[[], Event] = torch.cuda.Event


class StreamRuntime(Protocol):
    """What the CUDA engine asks of the device runtime; none of it blocks."""

    def compute_stream(self) -> Stream:
        """The stream on which the calling thread's model work is queued."""

    def new_stream(self) -> Stream:
        """A stream of our own."""

    def new_event(self) -> Event:
        """An event that was not recorded yet."""

    def record(self, event: Event, stream: Stream) -> None:
        """Mark the end of what is queued on `stream` now."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """What is queued on `stream` from now on waits for the event's last record."""

    def query(self, event: Event) -> bool:
        """Whether the event's last record was reached; may raise on a broken device."""

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Call `work` so that the copies it makes are queued on `stream`."""


class TorchStreams:
    """StreamRuntime over torch.cuda (CUDA and ROCm builds)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compute_stream(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> Stream:
        return _NEW_STREAM(self._device)

    def new_event(self) -> Event:
        return _NEW_EVENT()

    def record(self, event: Event, stream: Stream) -> None:
        event.record(stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def query(self, event: Event) -> bool:
        return bool(event.query())

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        # Device, stream and inference mode belong to the thread; engines make their KV tensors
        # in inference mode, and writing to such a tensor outside of it raises.
        with torch.cuda.device(self._device), torch.cuda.stream(stream), torch.inference_mode():
            work()

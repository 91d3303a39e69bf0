# SPDX-License-Identifier: Apache-2.0
"""A few named host threads that never die of what they run."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

_LOG = logging.getLogger(__name__)

Action = Callable[[], None]


class WorkPool(Protocol):
    """Runs actions somewhere, first in first out."""

    def submit(self, action: Action) -> None:
        """Run the action later; raises RuntimeError after `close`."""

    def close(self, timeout_s: float) -> bool:
        """Run what was submitted, then end; False at the deadline."""


class HostPool:
    """`threads` daemon threads called `name-0`, `name-1`, ..."""

    def __init__(self, threads: int, name: str) -> None:
        if threads <= 0:
            raise ValueError(f"a pool needs at least one thread, not {threads}")
        self._queue: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, action: Action) -> None:
        """Queue an action; raises RuntimeError after `close`, when nobody would run it."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._queue.put(action)

    def _serve(self) -> None:
        while True:
            action = self._queue.get()
            if action is None:
                return
            try:
                action()
            except BaseException as error:  # the next job still needs this thread
                _LOG.error("a copy action raised %s", type(error).__name__)

    def close(self, timeout_s: float) -> bool:
        """End the threads behind what is queued; False if one still runs at the deadline."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

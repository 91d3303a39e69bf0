# SPDX-License-Identifier: Apache-2.0
"""A bounded pool of connections to one peer, with backoff while it cannot be reached."""

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from kvsafe.lmcache.wire import Address, Deadline, Wire, WireError

_JITTER: Final = 0.25
_DICE: Final = random.SystemRandom()
"""Not the global generator: engines seed that one, and all would pause alike."""


@dataclass(frozen=True, slots=True)
class LinkSetting:
    """How a peer is reached. Times in seconds.

    Attributes:
        connections: most connections at one time.
        connect_s: longest wait for a new connection.
        deadline_s: longest wait for one call, connecting included.
        backoff_s, backoff_limit_s: pause after the first failure; it doubles up to the limit.
    """

    address: Address
    connections: int = 4
    connect_s: float = 2.0
    deadline_s: float = 10.0
    backoff_s: float = 0.1
    backoff_limit_s: float = 5.0


@dataclass(slots=True)
class LinkCounts:
    """What the pool has seen, for metrics."""

    connected: int = 0
    failed: int = 0
    dropped: int = 0


class Links:
    """Connections of one peer. Thread-safe.

    `greet` runs on every new connection before its first use (login, choice of a database) and
    raises `WireError` when the peer does not take it.
    """

    def __init__(
        self, setting: LinkSetting, greet: Callable[[Wire, Deadline], None] | None = None
    ) -> None:
        self.setting = setting
        self.counts = LinkCounts()
        self._greet = greet
        # Leaves to use a connection. A queue, since a semaphore costs more than a small reply.
        self._leaves: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(setting.connections):
            self._leaves.put(None)
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._failures = 0
        self._not_before = 0.0
        self._closed = False

    def borrow(self, deadline: Deadline) -> "Loan":
        """A connection for one exchange: `with links.borrow(deadline) as wire`.

        Entering raises `WireError` when there is none to be had. A `WireError` inside ends the
        connection, and so does any other error; without one it is given back.
        """
        return Loan(self, deadline)

    def take(self, deadline: Deadline) -> Wire:
        """A connection, until `done` is called for it. Raises `WireError`."""
        try:
            self._leaves.get(timeout=deadline.left())
        except queue.Empty:
            raise WireError("all connections are in use", late=True) from None
        try:
            return self._idle_wire() or self._new_wire(deadline)
        except BaseException:
            self._leaves.put(None)
            raise

    def done(self, wire: Wire, *, usable: bool) -> None:
        """Take a connection back, for the next one or, if it is not `usable`, to end it."""
        if usable:
            self._give_back(wire)
        else:
            self.counts.dropped += 1
            wire.close()
        self._leaves.put(None)

    def _idle_wire(self) -> Wire | None:
        while True:
            with self._lock:
                wire = self._idle.pop() if self._idle else None
            if wire is None or wire.quiet():
                return wire
            self.counts.dropped += 1
            wire.close()

    def _new_wire(self, deadline: Deadline) -> Wire:
        with self._lock:
            if self._closed:
                raise WireError("closed")
            if time.monotonic() < self._not_before:
                raise WireError("not asked: the peer could not be reached just now")
        try:
            wire = Wire.connect(self.setting.address, deadline.sooner(self.setting.connect_s))
            try:
                if self._greet is not None:
                    self._greet(wire, deadline)
            except BaseException:
                wire.close()
                raise
        except WireError:
            self._back_off()
            raise
        with self._lock:
            self._failures = 0
            self.counts.connected += 1
        return wire

    def _back_off(self) -> None:
        with self._lock:
            self.counts.failed += 1
            pause = self.setting.backoff_s * 2 ** min(self._failures, 32)
            pause = min(pause, self.setting.backoff_limit_s)
            self._failures += 1
            # Many engines must not come back in the same moment.
            self._not_before = time.monotonic() + pause * _DICE.uniform(1 - _JITTER, 1)

    def _give_back(self, wire: Wire) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(wire)
                return
        wire.close()

    def close(self) -> None:
        """End idle connections; those in use end when they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()


class Loan:
    """One use of a connection, from `with` to its end."""

    __slots__ = ("_deadline", "_links", "_wire")

    def __init__(self, links: Links, deadline: Deadline) -> None:
        self._links = links
        self._deadline = deadline

    def __enter__(self) -> Wire:
        self._wire = self._links.take(self._deadline)
        return self._wire

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._links.done(self._wire, usable=kind is None)

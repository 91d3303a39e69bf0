# SPDX-License-Identifier: Apache-2.0
"""A peer without a network: a client's sockets end in a server that is a function.

Nothing waits: the clock moves by what a client would have waited. So a silent server costs no
time, a slow machine changes no outcome, and the same bytes give the same end.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from fuzz.patching import Patch
from kvsafe.lmcache import links, wire

Serve = Callable[["FakeSocket", bytes], None]
MAX_CALLS = 4000
"""Calls on all sockets of one world: far more than any honest exchange needs."""


class Endless(RuntimeError):
    """A client that goes on and on."""


class Net:
    """All connections of one world, and its clock."""

    def __init__(self, serve: Serve, greet: Callable[[FakeSocket], None] | None = None) -> None:
        self.serve, self.greet = serve, greet
        self.now = 1000.0
        self.calls = 0
        self.sockets: list[FakeSocket] = []

    def connect(self, address: Any, timeout: float | None = None) -> FakeSocket:
        """A new connection."""
        self.count()
        made = FakeSocket(self)
        self.sockets.append(made)
        if self.greet is not None:
            self.greet(made)
        return made

    def count(self) -> None:
        """One more call. Raises `Endless` when there were too many."""
        self.calls += 1
        self.now += 1e-6
        if self.calls > MAX_CALLS:
            raise Endless(f"more than {MAX_CALLS} calls")

    def streams(self) -> Iterable[bytes]:
        """What the server has sent on each connection."""
        return (bytes(one.sent) for one in self.sockets)


class FakeSocket:
    """The client's end. The server puts pieces into `out`; None ends the connection."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self.out: list[bytes] = []
        self.ended = False
        self.closed = False
        self.sent = bytearray()

    def say(self, *pieces: bytes) -> None:
        """The server sends; every piece arrives by itself."""
        if not self.ended:
            self.out += [piece for piece in pieces if piece]
            for piece in pieces:
                self.sent += piece

    def end(self) -> None:
        """The server closes its side behind what it has sent."""
        self.ended = True

    def setsockopt(self, *_: object) -> None:
        """Nothing to set."""

    def setblocking(self, flag: bool) -> None:
        """Nothing here ever blocks."""

    def sendmsg(self, parts: list[memoryview]) -> int:
        """Give bytes to the server."""
        self._net.count()
        if self.closed:
            raise OSError("closed")
        data = b"".join(bytes(part) for part in parts)
        self._net.serve(self, data)
        return len(data)

    def recv_into(self, into: memoryview) -> int:
        """The next piece, or as much of it as there is room for."""
        self._net.count()
        if self.closed:
            raise OSError("closed")
        if not self.out:
            if self.ended:
                return 0
            raise BlockingIOError
        piece = self.out.pop(0)
        count = min(len(piece), len(into))
        into[:count] = piece[:count]
        if piece[count:]:
            self.out.insert(0, piece[count:])
        return count

    @property
    def readable(self) -> bool:
        """Whether a read would return at once."""
        return bool(self.out) or self.ended

    def wait(self, milliseconds: float) -> bool:
        """Whether a read would return at once; if not, the whole wait has passed."""
        if not self.readable:
            self._net.now += milliseconds / 1000
        return self.readable

    def close(self) -> None:
        """The client's end closes."""
        self.closed = True


class _Poll:
    def __init__(self) -> None:
        self._socket: FakeSocket | None = None

    def register(self, one: FakeSocket, events: int) -> None:
        self._socket = one

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        return [(0, 1)] if self._socket is not None and self._socket.wait(timeout) else []


@contextmanager
def network(net: Net) -> Any:
    """Inside the block kvsafe's LMCache clients live in `net`."""
    clock = SimpleNamespace(monotonic=lambda: net.now, time=time.time, sleep=time.sleep)
    sockets = SimpleNamespace(
        create_connection=net.connect,
        IPPROTO_TCP=socket.IPPROTO_TCP,
        TCP_NODELAY=socket.TCP_NODELAY,
        socket=socket.socket,
    )
    waiting = SimpleNamespace(poll=_Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    with Patch() as patch:
        patch.set(wire, "time", clock)
        patch.set(links, "time", clock)
        patch.set(wire, "socket", sockets)
        patch.set(wire, "select", waiting)
        yield

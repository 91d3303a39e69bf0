# SPDX-License-Identifier: Apache-2.0
"""A listening port with one thread per connection, and the few things a server may do on it.

What a server does is a list of acts, so that a lying server is data and can be played by one
loop. Everything ends when the listener is closed: no act outlives it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

__all__ = ["Act", "Close", "Drip", "Flood", "Hang", "Link", "Listener", "Reset", "Send"]

_CONNECTIONS = 256
_JOIN_S = 5.0
_CLOSE_WITH_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Send:
    """Send these bytes at once."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Drip:
    """Send these bytes one by one, with a pause after each."""

    data: bytes
    gap_s: float


@dataclass(frozen=True, slots=True)
class Flood:
    """Send these bytes again and again until the client goes or the listener closes."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Hang:
    """Neither read nor write until the listener closes."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection in order."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Close the connection with a TCP reset."""


Act = Send | Drip | Flood | Hang | Close | Reset


class Link:
    """One connection of a client."""

    def __init__(self, sock: socket.socket, stopping: threading.Event) -> None:
        self._sock = sock
        self._stopping = stopping

    def read(self, length: int) -> bytes | None:
        """Exactly `length` bytes, or None when the client is gone first."""
        parts = bytearray()
        while len(parts) < length:
            try:
                part = self._sock.recv(min(1 << 20, length - len(parts)))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

    def read_line(self, limit: int) -> bytes | None:
        """Bytes up to CR LF, both taken off; None at the end of the stream or past `limit`."""
        line = bytearray()
        while not line.endswith(b"\r\n"):
            byte = self.read(1)
            if byte is None or len(line) > limit:
                return None
            line += byte
        return bytes(line[:-2])

    def play(self, acts: Iterable[Act]) -> bool:
        """Do the acts in order; False when the connection is not to be used any more."""
        return all(self._do(act) for act in acts)

    def _do(self, act: Act) -> bool:
        try:
            match act:
                case Send(data):
                    self._sock.sendall(data)
                case Drip(data, gap_s):
                    return self._drip(data, gap_s)
                case Flood(data):
                    while not self._stopping.is_set():
                        self._sock.sendall(data)
                    return False
                case Hang():
                    self._stopping.wait()
                    return False
                case Close():
                    return False
                case Reset():
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_WITH_RESET)
                    return False
        except OSError:
            return False
        return True

    def _drip(self, data: bytes, gap_s: float) -> bool:
        for byte in data:
            self._sock.sendall(bytes((byte,)))
            if self._stopping.wait(gap_s):
                return False
        return True


class Listener:
    """Accepts connections on one port until closed; subclasses say what `serve` does.

    `port` 0 takes a free port; `address` has the one that was taken. Use it in a `with` block.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.connections = 0
        self._socket = socket.create_server((host, port), backlog=64)
        self.host, self.port = self._socket.getsockname()[:2]
        self._accepter = threading.Thread(target=self._accept, name="conformance", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the listening socket."""
        return self.host, self.port

    def serve(self, link: Link, number: int) -> None:
        """Talk with one client; `number` counts connections from 0."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin to accept."""
        self._accepter.start()

    def close(self) -> None:
        """Stop accepting, drop every connection, wait for the threads."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            threads = [*self._threads]
        for thread in (self._accepter, *threads):
            if thread.ident is not None:
                thread.join(_JOIN_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            with self._lock:
                if self._stopping.is_set() or len(self._open) >= _CONNECTIONS:
                    sock.close()
                    continue
                number, self.connections = self.connections, self.connections + 1
                self._open.add(sock)
                thread = threading.Thread(target=self._run, args=(sock, number), daemon=True)
                self._threads = [t for t in self._threads if t.is_alive()] + [thread]
                thread.start()

    def _run(self, sock: socket.socket, number: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self.serve(Link(sock, self._stopping), number)
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

# SPDX-License-Identifier: Apache-2.0
"""Small lm:// and RESP servers inside the test process: honest, or lying where a test says so."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvsafe.lmcache import Address
from kvsafe.lmcache.frames import FAIL, OK, REQUEST, Command, Reply, Request, decode_request
from kvsafe.seal.refusal import Refusal

SILENCE = b""
"""What a hook returns to send nothing at all."""


class Hangup(Exception):
    """A hook raises it to end the connection, after sending `first`."""

    def __init__(self, first: bytes = b"") -> None:
        super().__init__()
        self.first = first


class PeerServer:
    """Accepts connections on the loopback; `serve` is one connection's whole life."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.connections = 0
        self.open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                conn, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self.open.append(conn)
            threading.Thread(target=self._live, args=(conn,), daemon=True).start()

    def _live(self, conn: socket.socket) -> None:
        try:
            self.serve(conn)
        except Hangup as end:
            with contextlib.suppress(OSError):
                conn.sendall(end.first)
        except OSError:
            pass
        finally:
            with self._lock:
                self.open.remove(conn)
            with contextlib.suppress(OSError):
                conn.shutdown(socket.SHUT_RDWR)
            conn.close()

    def serve(self, conn: socket.socket) -> None:
        """One connection; returns when the client has gone."""
        raise NotImplementedError

    def drop_all(self) -> None:
        """End every connection that is open now."""
        with self._lock:
            for conn in self.open:
                with contextlib.suppress(OSError):
                    conn.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and end every connection."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_all()


def read_all(conn: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes; raises `Hangup` at the end of the connection."""
    data = bytearray()
    while len(data) < count:
        part = conn.recv(count - len(data))
        if not part:
            raise Hangup
        data += part
    return bytes(data)


@dataclass
class Value:
    """A stored value as it was announced."""

    reply: Reply
    data: bytes


LmHook = Callable[[Request, bytes], bytes]
"""Gets a request and the honest answer; returns what is sent instead."""


@dataclass
class LmServer(PeerServer):
    """A lm:// server. `hook`, when set, sees each request that has an answer."""

    hook: LmHook | None = None
    values: dict[str, Value] = field(default_factory=dict)
    asked: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def serve(self, conn: socket.socket) -> None:
        """Requests in order until the client has gone."""
        while True:
            request = decode_request(read_all(conn, REQUEST.size))
            if isinstance(request, Refusal):
                raise Hangup
            self.asked.append((request.command, request.key))
            if request.command == Command.PUT:
                data = read_all(conn, request.length)
                reply = Reply(OK, request.length, request.fmt, request.dtype, request.dims, 0)
                self.values[request.key] = Value(reply, data)
                continue
            honest = self._answer(request)
            conn.sendall(honest if self.hook is None else self.hook(request, honest))

    def _answer(self, request: Request) -> bytes:
        found = self.values.get(request.key)
        if request.command == Command.GET and found is not None:
            return found.reply.encode() + found.data
        good = found is not None or request.command == Command.HEALTH
        return Reply(OK if good else FAIL, 0, 1, 2, (0, 0, 0, 0), 0).encode()


RespHook = Callable[[list[bytes], bytes], bytes]


@dataclass
class RespServer(PeerServer):
    """A RESP server with the few commands that a chunk store needs."""

    hook: RespHook | None = None
    password: bytes | None = None
    values: dict[bytes, bytes] = field(default_factory=dict)
    asked: list[list[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def serve(self, conn: socket.socket) -> None:
        """Commands in order until the client has gone."""
        stream = conn.makefile("rb")
        known = self.password is None
        while True:
            parts = _read_command(stream)
            self.asked.append(parts)
            if parts[0] == b"AUTH":
                known = parts[-1] == self.password
                honest = b"+OK\r\n" if known else b"-WRONGPASS no\r\n"
            else:
                honest = self._answer(parts) if known else b"-NOAUTH first\r\n"
            conn.sendall(honest if self.hook is None else self.hook(parts, honest))

    def _answer(self, parts: list[bytes]) -> bytes:
        verb, *rest = parts
        if verb == b"SET":
            self.values[rest[0]] = rest[1]
        if verb in (b"SET", b"SELECT"):
            return b"+OK\r\n"
        if verb == b"PING":
            return b"+PONG\r\n"
        if verb == b"EXISTS":
            return b":%d\r\n" % (rest[0] in self.values)
        if verb == b"DEL":
            return b":%d\r\n" % (self.values.pop(rest[0], None) is not None)
        found = self.values.get(rest[0]) if verb == b"GET" else None
        return b"$-1\r\n" if found is None else b"$%d\r\n%s\r\n" % (len(found), found)


def _read_command(stream) -> list[bytes]:  # type: ignore[no-untyped-def]
    head = stream.readline()
    if not head:
        raise Hangup
    parts = []
    for _ in range(int(head[1:])):
        length = int(stream.readline()[1:])
        parts.append(stream.read(length))
        stream.read(2)
    return parts


@contextlib.contextmanager
def serving(server: PeerServer) -> Iterator[PeerServer]:
    """The server, closed at the end."""
    try:
        yield server
    finally:
        server.close()

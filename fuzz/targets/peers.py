# SPDX-License-Identifier: Apache-2.0
"""The lm:// client and the RESP client against a server that says anything at all."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from blake3 import blake3

from fuzz.peers import FakeSocket, Net, network
from fuzz.target import ByteSource, Target, demand
from kvsafe.lmcache.answers import Answer, ChunkShape, Fetch, Found, Lost, Offer
from kvsafe.lmcache.links import LinkSetting
from kvsafe.lmcache.lmclient import LmClient
from kvsafe.lmcache.respclient import RespClient, RespSetting
from kvsafe.lmcache.wire import Address
from kvsafe.seal.refusal import Refusal

_REQUEST = struct.Struct("<9i150s")
_REPLY = struct.Struct("<9i")
SHAPE = ChunkShape(1, 3, (2, 1, 4, 3), 48)
OTHER = ChunkShape(1, 3, (2, 2, 4, 3), 96)
KEYS = tuple(f"m@1@0@{number:x}@bfloat16" for number in range(1, 5))
_DEADLINE_S = 3.0
_GUARD = 16
_NUMBERS = (0, 1, -1, 200, 400, 404, 47, 48, 49, 96, 3, 6, (1 << 31) - 1, -(1 << 31), 2, 4)
_JUNK = (
    b"", b"\r\n", b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"$48\r\n", b"$0\r\n\r\n", b"-ERR x\r\n",
    b"*1\r\n", b"$99999999999\r\n", b"%1\r\n", b":" + b"9" * 600, b"$048\r\n",
    b"_\r\n", b":-1\r\n", b":2\r\n",
)  # fmt: skip


def value_of(key: str, length: int) -> bytes:
    """What an honest server holds under a key."""
    return blake3(key.encode()).digest(length)


class Moods:
    """What the server does to its next replies: mostly nothing."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self.honest = True

    def odd(self) -> bool:
        """Whether this reply is bent; from then on the server counts as hostile."""
        bent = self._source.left > 0 and self._source.below(3) == 2
        self.honest = self.honest and not bent
        return bent

    def cut(self, one: FakeSocket, data: bytes) -> None:
        """Send in pieces, as the bytes say; sometimes not all of it."""
        source = self._source
        while data and source.left and source.below(4) == 3:
            size = 1 + source.below(40)
            one.say(data[:size])
            data = data[size:]
        one.say(data)

    def bend(self, one: FakeSocket, data: bytes, number: Callable[[], bytes]) -> None:
        """Send something else than the honest reply."""
        source = self._source
        what = source.below(9)
        if what == 0:
            self.cut(one, data[: source.below(len(data) + 1)])
            one.end()
        elif what == 1:
            self.cut(one, data[: source.below(len(data) + 1)])
        elif what == 2:
            self.cut(one, data + source.some(9))
        elif what == 3:
            out = bytearray(data)
            at = source.below(len(out) or 1)
            out[at : at + 1] = source.some(3)
            self.cut(one, bytes(out))
        elif what == 4:
            self.cut(one, source.pick(_JUNK) + (data if source.flag() else b""))
        elif what == 5:
            self.cut(one, data + data)
        else:
            self.cut(one, number())


class LmServer:
    """An lm:// server that holds two of the four keys."""

    def __init__(self, source: ByteSource, moods: Moods) -> None:
        self._source, self._moods = source, moods
        self._rest: dict[int, bytes] = {}
        self.held = {key: (SHAPE, value_of(key, SHAPE.length)) for key in KEYS[:2]}

    def __call__(self, one: FakeSocket, data: bytes) -> None:
        """Take bytes of a client; answer every request that is whole."""
        data = self._rest.pop(id(one), b"") + data
        while len(data) >= _REQUEST.size:
            command, length, fmt, dtype, _, *dims, raw = _REQUEST.unpack(data[: _REQUEST.size])
            body = length if command == 1 else 0
            if len(data) < _REQUEST.size + body:
                break
            key = raw.decode("utf-8").strip(" ")
            value = data[_REQUEST.size : _REQUEST.size + body]
            data = data[_REQUEST.size + body :]
            if command == 1:
                d0, d1, d2, d3 = dims
                self.held[key] = ChunkShape(fmt, dtype, (d0, d1, d2, d3), length), value
                continue
            self._answer(one, command, key)
        self._rest[id(one)] = data

    def _answer(self, one: FakeSocket, command: int, key: str) -> None:
        held = self.held.get(key)
        if held is None:
            data = _REPLY.pack(400 if command != 5 else 200, *(0,) * 8)
        elif command == 2:
            shape, value = held
            data = _REPLY.pack(200, shape.length, shape.fmt, shape.dtype, *shape.dims, 0) + value
        else:
            data = _REPLY.pack(200, *(0,) * 8)
        if self._moods.odd():
            self._moods.bend(one, data, lambda: self._numbers(data))
        else:
            self._moods.cut(one, data)

    def _numbers(self, data: bytes) -> bytes:
        """The reply with one or two numbers changed."""
        head = list(_REPLY.unpack(data[: _REPLY.size]))
        for _ in range(1 + self._source.below(2)):
            head[self._source.below(9)] = self._source.pick(_NUMBERS)
        body = data[_REPLY.size :]
        return _REPLY.pack(*head) + body[: self._source.pick((len(body), 0, 47, 96))]


class RespServer:
    """A RESP server that holds two of the four keys."""

    def __init__(self, source: ByteSource, moods: Moods) -> None:
        self._source, self._moods = source, moods
        self._rest: dict[int, bytes] = {}
        self.held = {key.encode(): value_of(key, SHAPE.length) for key in KEYS[:2]}

    def __call__(self, one: FakeSocket, data: bytes) -> None:
        """Take bytes of a client; answer every command that is whole."""
        data = self._rest.pop(id(one), b"") + data
        while (taken := _command(data)) is not None:
            parts, data = taken
            self._answer(one, parts)
        self._rest[id(one)] = data

    def _answer(self, one: FakeSocket, parts: list[bytes]) -> None:
        verb, key = parts[0], parts[1] if len(parts) > 1 else b""
        held = self.held.get(key)
        if verb == b"SET":
            self.held[key] = parts[2]
            data = b"+OK\r\n"
        elif verb == b"GET":
            data = b"$-1\r\n" if held is None else b"$%d\r\n%s\r\n" % (len(held), held)
        elif verb == b"EXISTS":
            data = b":%d\r\n" % (held is not None)
        elif verb == b"DEL":
            data = b":%d\r\n" % (self.held.pop(key, None) is not None)
        else:
            data = b"+PONG\r\n" if verb == b"PING" else b"+OK\r\n"
        if self._moods.odd():
            self._moods.bend(one, data, lambda: self._lengths(data))
        else:
            self._moods.cut(one, data)

    def _lengths(self, data: bytes) -> bytes:
        """The reply with another number in its first line."""
        line, _, rest = data.partition(b"\r\n")
        number = self._source.pick(_NUMBERS)
        return line[:1] + b"%d" % number + b"\r\n" + rest


def _command(data: bytes) -> tuple[list[bytes], bytes] | None:
    """The first whole command and what is behind it."""
    head, found, rest = data.partition(b"\r\n")
    if not found:
        return None
    parts = []
    for _ in range(int(head[1:])):
        line, found, rest = rest.partition(b"\r\n")
        size = int(line[1:]) if found else 0
        if not found or len(rest) < size + 2:
            return None
        parts.append(rest[:size])
        rest = rest[size + 2 :]
    return parts, rest


class _Peer(Target):
    """A client and a server in one world without a network.

    Oracles: only answers, one for each question; a HIT is what the server sent, whole, under
    exactly the shape that was asked for, and anything else leaves zeros; not a byte beside the
    buffer is touched; an honest server is believed; every call ends in its time.
    """

    max_len = 300
    memory_mib = 64

    def once(self, data: bytes) -> None:
        source = ByteSource(data)
        moods = Moods(source)
        server = self._server(source, moods)
        greet = (lambda one: one.say(source.some(9))) if source.rarely() else None
        moods.honest = greet is None
        net = Net(server, greet)
        setting = LinkSetting(Address("127.0.0.1", 1), 2, 1.0, _DEADLINE_S, 0.001, 0.002)
        with network(net):
            client = self._client(setting)
            try:
                for _ in range(1 + source.below(4)):
                    began = net.now
                    self._use(source, client, net, server, moods)
                    demand(net.now - began <= _DEADLINE_S + 0.1, "a call over its time", "hang")
            finally:
                client.close()
        demand(all(one.closed for one in net.sockets), "a connection is left open", "memory")

    def _server(self, source: ByteSource, moods: Moods) -> Any:
        raise NotImplementedError

    def _client(self, setting: LinkSetting) -> Any:
        raise NotImplementedError

    def _sent(self, net: Net, shape: ChunkShape, value: bytes) -> bool:
        """Whether the server has sent this value, whole, as an answer of this shape."""
        raise NotImplementedError

    def _use(self, source: ByteSource, client: Any, net: Net, server: Any, moods: Moods) -> None:
        keys = [source.pick(KEYS) for _ in range(1 + source.below(5))]
        if source.rarely():
            keys[-1] = "k" * source.pick((150, 151, 1024, 1025))
        what = source.below(4)
        if what == 0:
            held = {key for key in keys if self._holds(server, key)}
            answers = client.look(keys)
            _all_answered(answers, keys)
            right = [Found.HIT if key in held else Found.ABSENT for key in keys]
            _believed(answers, right, keys, moods)
        elif what == 1:
            self._store(source, client, keys, moods)
        else:
            self._fetch(source, client, net, server, keys, moods)

    @staticmethod
    def _holds(server: Any, key: str) -> bool:
        return key in server.held or key.encode() in server.held

    def _store(self, source: ByteSource, client: Any, keys: Sequence[str], moods: Moods) -> None:
        rows = [memoryview(bytearray(value_of(key, SHAPE.length))) for key in keys]
        items = [Offer(key, SHAPE, row) for key, row in zip(keys, rows, strict=True)]
        answers = client.store(items)
        _all_answered(answers, keys)
        _believed(answers, [Found.STORED] * len(keys), keys, moods)

    def _fetch(
        self, source: ByteSource, client: Any, net: Net, server: Any, keys: Sequence[str],
        moods: Moods,
    ) -> None:  # fmt: skip
        shape = OTHER if source.below(8) == 7 else SHAPE
        held = {key for key in keys if self._holds(server, key)}
        buffers = [bytearray(b"\xaa" * (shape.length + 2 * _GUARD)) for _ in keys]
        items = [
            Fetch(key, shape, memoryview(room)[_GUARD : _GUARD + shape.length])
            for key, room in zip(keys, buffers, strict=True)
        ]
        answers = client.fetch(items)
        _all_answered(answers, keys)
        for room, answer in zip(buffers, answers, strict=True):
            value = bytes(room[_GUARD:-_GUARD])
            edges = bytes(room[:_GUARD] + room[-_GUARD:])
            demand(
                edges == b"\xaa" * 2 * _GUARD, "bytes beside the buffer were written", "accepted"
            )
            if answer is Found.HIT:
                demand(self._sent(net, shape, value), "a hit that no server sent", "accepted")
            else:
                demand(not any(value), "bytes of what was not taken stay behind", "accepted")
        if shape is SHAPE:
            right = [Found.HIT if key in held else Found.ABSENT for key in keys]
            _believed(answers, right, keys, moods)

    def seeds(self) -> list[bytes]:
        plain = bytes([0, 0, 0]) + bytes(40)
        return [
            plain,
            *(bytes([1, 2, n, 3, 2, 1, 0, 1, 2, n]) * 12 for n in range(9)),
            bytes(range(250)),
        ]


def _all_answered(answers: Sequence[Answer], keys: Sequence[str]) -> None:
    demand(len(answers) == len(keys), "another number of answers than of questions")
    for answer in answers:
        known = isinstance(answer, Found | Lost | Refusal)
        demand(known and len(str(answer)) < 2048, "no answer, or one without a bound", "memory")


def _believed(
    answers: Sequence[Answer], right: Sequence[Answer], keys: Sequence[str], moods: Moods
) -> None:
    """An honest server's answers are the answers."""
    if not moods.honest:
        return
    for answer, wanted, key in zip(answers, right, keys, strict=True):
        if key in KEYS:
            demand(answer is wanted, f"{answer} for an honest {wanted}")


class Lm(_Peer):
    """The lm:// client."""

    name = "lm"

    def _server(self, source: ByteSource, moods: Moods) -> Any:
        return LmServer(source, moods)

    def _client(self, setting: LinkSetting) -> Any:
        return LmClient(setting)

    def _sent(self, net: Net, shape: ChunkShape, value: bytes) -> bool:
        for stream in net.streams():
            at = stream.find(value)
            while at >= 0:
                if at >= _REPLY.size and _is_reply(stream[at - _REPLY.size : at], shape):
                    return True
                at = stream.find(value, at + 1)
        return False


def _is_reply(head: bytes, shape: ChunkShape) -> bool:
    code, length, fmt, dtype, d0, d1, d2, d3, _ = _REPLY.unpack(head)
    return (code, length, fmt, dtype, (d0, d1, d2, d3)) == (
        200, shape.length, shape.fmt, shape.dtype, shape.dims,
    )  # fmt: skip


class Resp(_Peer):
    """The RESP client."""

    name = "resp"

    def _server(self, source: ByteSource, moods: Moods) -> Any:
        return RespServer(source, moods)

    def _client(self, setting: LinkSetting) -> Any:
        return RespClient(RespSetting(setting))

    def _sent(self, net: Net, shape: ChunkShape, value: bytes) -> bool:
        whole = b"$%d\r\n%s\r\n" % (shape.length, value)
        return any(whole in stream for stream in net.streams())

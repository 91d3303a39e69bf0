# SPDX-License-Identifier: Apache-2.0
"""lm:// and RESP as tests of their clients need them: servers, clients, keys, values and lies."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from kvsafe.lmcache import (
    Address,
    Answer,
    ChunkShape,
    Dtype,
    Fetch,
    Fmt,
    LinkSetting,
    LmClient,
    Offer,
    RespClient,
    RespSetting,
    chunk_shape,
    lmclient,
    respclient,
)
from kvsafe.lmcache.frames import FAIL, OK, Command, Reply, Request
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.support.peers import LmHook, LmServer, RespHook, RespServer

PATIENT_S, SHORT_S = 20.0, 0.4

C = TypeVar("C", LmClient, RespClient)
ToGet = Callable[[bytes], bytes]
"""From the honest answer to a GET that finds its value to what is sent instead."""


def number_of(answer: Answer) -> int | None:
    """The number of a refusal."""
    return answer.number if isinstance(answer, Refusal) else None


class Scheme(ABC, Generic[C]):
    """One protocol.

    Attributes:
        shape: what every value here is.
        window: most GETs under way at one time.
        stray: a whole reply that says "here it is", sent behind another one.
        lies: replies to GET that do not match, and the refusals that they get.
        cuts: after how many bytes a reply to GET may end early.
    """

    shape: ClassVar[ChunkShape]
    window: ClassVar[int]
    stray: ClassVar[bytes]
    lies: ClassVar[dict[str, tuple[ToGet, RefusalKind]]]
    cuts: ClassVar[tuple[int, ...]]

    @abstractmethod
    def server(self) -> Any:
        """An honest server."""

    @abstractmethod
    def on_get(self, reply: ToGet, number: int | None = None) -> Any:
        """A hook for the server: `reply` in place of answers to GET, for one key or for all."""

    @abstractmethod
    def key(self, number: int) -> str:
        """A key text."""

    @abstractmethod
    def data(self, number: int) -> bytes:
        """The value that belongs to a key."""

    @abstractmethod
    def _client(self, link: LinkSetting, **options: Any) -> C: ...

    @contextlib.contextmanager
    def client_of(
        self, address: Address, deadline_s: float = PATIENT_S, connections: int = 2, **options: Any
    ) -> Iterator[C]:
        """A client, closed at the end."""
        link = LinkSetting(
            address, connections, deadline_s=deadline_s, backoff_s=0.01, backoff_limit_s=0.05
        )
        client = self._client(link, **options)
        try:
            yield client
        finally:
            client.close()

    def keys(self, numbers: range) -> list[str]:
        """Several key texts."""
        return [self.key(number) for number in numbers]

    def fetch(self, number: int) -> Fetch:
        """A request with a stained buffer: what is not overwritten shows."""
        stained = bytearray(b"\xee" * self.shape.length)
        return Fetch(self.key(number), self.shape, memoryview(stained))

    def offer(self, number: int) -> Offer:
        """A value to store."""
        return Offer(self.key(number), self.shape, memoryview(self.data(number)))


_LM_SHAPE = chunk_shape(Fmt.KV_2LTD, Dtype.BFLOAT16, (2, 1, 16, 32))
_LM_HEADER = Reply(OK, _LM_SHAPE.length, _LM_SHAPE.fmt, _LM_SHAPE.dtype, _LM_SHAPE.dims, 0)


def _header(**wrong: object) -> ToGet:
    """A header that differs from the honest one, and as much of the value as it says."""
    lie = _LM_HEADER._replace(**wrong)  # type: ignore[arg-type]
    return lambda honest: lie.encode() + honest[36 : 36 + max(0, lie.length)]


class _Lm(Scheme[LmClient]):
    shape = _LM_SHAPE
    window = lmclient.FETCH_WINDOW
    stray = Reply(OK, 0, 1, 2, (0, 0, 0, 0), 0).encode()
    lies: ClassVar[dict[str, tuple[ToGet, RefusalKind]]] = {
        "another code": (_header(code=7), RefusalKind.PEER_CODE),
        "shorter": (_header(length=shape.length - 64), RefusalKind.PEER_LENGTH),
        "longer": (_header(length=shape.length + 64), RefusalKind.PEER_LENGTH),
        "two gigabytes": (_header(length=2**31 - 1), RefusalKind.PEER_LENGTH),
        "negative": (_header(length=-5), RefusalKind.PEER_LENGTH),
        "absent with a value": (_header(code=FAIL), RefusalKind.PEER_LENGTH),
        "another format": (_header(fmt=Fmt.KV_T2D), RefusalKind.PEER_FORMAT),
        "another type": (_header(dtype=Dtype.FLOAT16), RefusalKind.PEER_DTYPE),
        "another shape of equal size": (_header(dims=(2, 16, 1, 32)), RefusalKind.PEER_SHAPE),
        "negative dimensions": (_header(dims=(-2, -1, 16, 32)), RefusalKind.PEER_SHAPE),
    }
    cuts = (1, 35, 36, 37, 36 + shape.length // 2, 35 + shape.length)

    def server(self) -> LmServer:
        return LmServer()

    def on_get(self, reply: ToGet, number: int | None = None) -> LmHook:
        def hook(request: Request, honest: bytes) -> bytes:
            wanted = request.command == Command.GET and (
                number is None or request.key == self.key(number)
            )
            return reply(honest) if wanted else honest

        return hook

    def key(self, number: int) -> str:
        return f"model@1@0@{number + 1:x}@bfloat16"

    def data(self, number: int) -> bytes:
        return bytes([number + 1]) * self.shape.length

    def _client(self, link: LinkSetting, **options: Any) -> LmClient:
        return LmClient(link, **options)


def _first_line(honest: bytes, line: bytes) -> bytes:
    return line + honest[honest.index(b"\r\n") :]


class _Resp(Scheme[RespClient]):
    shape = ChunkShape(0, 0, (0, 0, 0, 0), 5000)
    window = respclient.FETCH_WINDOW
    stray = b":1\r\n"
    lies: ClassVar[dict[str, tuple[ToGet, RefusalKind]]] = {
        "shorter": (lambda h: _first_line(h, b"$4999"), RefusalKind.PEER_LENGTH),
        "longer": (lambda h: _first_line(h, b"$5001"), RefusalKind.PEER_LENGTH),
        "half a gigabyte": (lambda h: b"$536870912\r\n", RefusalKind.PEER_LENGTH),
        "endless digits": (lambda h: b"$" + b"9" * 400 + b"\r\n", RefusalKind.PEER_LENGTH),
        "negative": (lambda h: b"$-2\r\n", RefusalKind.PEER_LENGTH),
        "no number": (lambda h: b"$5_000\r\n" + h[7:], RefusalKind.PEER_LENGTH),
        "spaces": (lambda h: b"$ 5000\r\n" + h[7:], RefusalKind.PEER_LENGTH),
        "an integer": (lambda h: b":1\r\n", RefusalKind.PEER_REPLY),
        "an array": (lambda h: b"*1000000\r\n", RefusalKind.PEER_REPLY),
        "a push": (lambda h: b">2\r\n", RefusalKind.PEER_REPLY),
        "an empty line": (lambda h: b"\r\n", RefusalKind.PEER_REPLY),
        "a line without end": (lambda h: b"$" + b"1" * 10000, RefusalKind.PEER_REPLY),
        "no end behind the value": (lambda h: h[:-2] + b"xx", RefusalKind.PEER_REPLY),
    }
    cuts = (1, 6, 8, 2000, 7 + 5000, 7 + 5001)

    def server(self) -> RespServer:
        return RespServer()

    def on_get(self, reply: ToGet, number: int | None = None) -> RespHook:
        def hook(parts: list[bytes], honest: bytes) -> bytes:
            wanted = parts[0] == b"GET" and (
                number is None or parts[1] == self.key(number).encode()
            )
            return reply(honest) if wanted else honest

        return hook

    def key(self, number: int) -> str:
        return f"model@01000100@0@{number:064x}"

    def data(self, number: int) -> bytes:
        # It holds line ends, which must not matter.
        return (b"%d\r\n$-1\r\n" % number + b"\r\n" * self.shape.length)[: self.shape.length]

    def _client(self, link: LinkSetting, **options: Any) -> RespClient:
        return RespClient(RespSetting(link, **options))


LM, RESP = _Lm(), _Resp()

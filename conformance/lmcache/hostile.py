# SPDX-License-Identifier: Apache-2.0
"""An lm:// server in a thread, honest or wrong in one chosen way.

    with HostileServer("short-length") as server:
        server.keep("model@1@0@1f@bfloat16", meta, data)
        client.get(server.host, server.port, ...)
        server.seen  # what it was asked

For tests, fuzz targets and the client suite. Every way to behave is a row of `TEMPERS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from conformance.lmcache.listener import Act, Hang, Link, Listener
from conformance.lmcache.tempers import TEMPERS, Entry, Exchange, Temper, honest
from conformance.lmcache.wire import REQUEST_BYTES, Command, Meta, Request

__all__ = ["TEMPERS", "Entry", "HostileServer", "Meta", "Request"]

_LARGEST = 256 << 20


class HostileServer(Listener):
    """An lm:// server with one temper; `keep` fills it, `seen` is what clients asked, in order.

    `temper` may be changed while it runs: the next question is answered by the new one.
    """

    def __init__(
        self, temper: str | Temper = "good", host: str = "127.0.0.1", port: int = 0
    ) -> None:
        super().__init__(host, port)
        self.temper = temper if isinstance(temper, Temper) else TEMPERS[temper]
        self.seen: list[Request] = []
        self.entries: dict[str, Entry] = {}
        self._older: dict[str, Entry] = {}

    def keep(self, key: str, meta: Meta, data: bytes) -> None:
        """Store one chunk as if it had been put."""
        with self._lock:
            if key in self.entries:
                self._older[key] = self.entries[key]
            self.entries[key] = Entry(meta, data)

    def play(self, name: str) -> None:
        """Change the temper; raises KeyError for an unknown one."""
        self.temper = TEMPERS[name]

    def serve(self, link: Link, number: int) -> None:
        """Answer one client until it leaves or the temper ends the connection."""
        if self.temper.every_other_connection and number % 2 == 0:
            return
        if not link.play(self.temper.greet):
            return
        turn = 0
        while (raw := link.read(REQUEST_BYTES)) is not None:
            request = Request.unpack(raw)
            self.seen.append(request)
            if not self._one(link, request, turn):
                return
            turn += 1

    def _one(self, link: Link, request: Request, turn: int) -> bool:
        if request.command == Command.PUT:
            return self._put(link, request)
        return link.play(self._answer(request, turn))

    def _put(self, link: Link, request: Request) -> bool:
        if not self.temper.reads_puts:
            return link.play([Hang()])
        if not 0 <= request.meta.length <= _LARGEST:
            return False
        data = link.read(request.meta.length)
        if data is None or request.meta.size != len(data):
            return False
        if self.temper.keeps_puts:
            self.keep(request.key, request.meta, data)
        return True

    def _answer(self, request: Request, turn: int) -> Sequence[Act]:
        with self._lock:
            entry = self.entries.get(request.key)
            others = (e for k, e in self.entries.items() if k != request.key)
            exchange = Exchange(
                request, entry, self._older.get(request.key), next(others, None), turn
            )
        if request.command == Command.GET:
            return self.temper.get(exchange)
        if request.command == Command.EXIST:
            return self.temper.exist(exchange)
        return honest(exchange)

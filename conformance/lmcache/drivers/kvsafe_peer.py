# SPDX-License-Identifier: Apache-2.0
"""Driver of kvsafe's own clients, without the engine: what `trust: peer` sees of a server.

.venv/bin/python -m conformance.lmcache.drivers.kvsafe_peer
"""

from __future__ import annotations

from conformance.lmcache.drivers.loop import Outcome, Wanted, drive
from kvsafe.lmcache.answers import Answer, ChunkShape, Fetch, Found, Lost, Offer, PeerStore
from kvsafe.lmcache.links import LinkSetting
from kvsafe.lmcache.lmclient import LmClient
from kvsafe.lmcache.respclient import RespClient, RespSetting
from kvsafe.lmcache.wire import Address

DEADLINE_S = 2.0

_WORDS = {Found.HIT: "hit", Found.ABSENT: "miss", Found.STORED: "stored"}


class KvsafePeer:
    """`LmClient` or `RespClient`, one connection, a short deadline."""

    def __init__(self) -> None:
        self._store: PeerStore | None = None

    def open(self, wire: str, host: str, port: int) -> Outcome:
        """Take the address; it connects when it is asked."""
        link = LinkSetting(Address(host, port), connections=1, deadline_s=DEADLINE_S)
        self._store = LmClient(link) if wire == "lm" else RespClient(RespSetting(link))
        return Outcome("open")

    def look(self, key: str) -> Outcome:
        """Whether the server says that it has a chunk."""
        outcome = _outcome(self._opened().look([key])[0])
        return Outcome(
            {"hit": "yes", "miss": "no"}.get(outcome.word, outcome.word), None, outcome.note
        )

    def fetch(self, key: str, wanted: Wanted) -> Outcome:
        """Fetch into a buffer of exactly the wanted length."""
        into = bytearray(wanted.length)
        answer = self._opened().fetch([Fetch(key, _shape(wanted), memoryview(into))])[0]
        return _outcome(answer, bytes(into) if answer is Found.HIT else None)

    def store(self, key: str, wanted: Wanted, data: bytes) -> Outcome:
        """Store, and believe it when the server says that it has it."""
        return _outcome(self._opened().store([Offer(key, _shape(wanted), memoryview(data))])[0])

    def _opened(self) -> PeerStore:
        if self._store is None:
            raise RuntimeError("not open")
        return self._store


def _shape(wanted: Wanted) -> ChunkShape:
    return ChunkShape(wanted.fmt, wanted.dtype, wanted.shape, wanted.length)


def _outcome(answer: Answer, data: bytes | None = None) -> Outcome:
    if isinstance(answer, Found):
        return Outcome(_WORDS[answer], data)
    if isinstance(answer, Lost):
        return Outcome("lost", note=answer.why)
    return Outcome("refused", note=str(answer), more={"number": answer.number})


if __name__ == "__main__":
    drive(KvsafePeer())

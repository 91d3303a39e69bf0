# SPDX-License-Identifier: Apache-2.0
"""Client of a lm:// server that trusts nothing it says.

PUT has no answer, so each window of PUTs is followed by EXIST for its keys; a value counts as
stored when the server says so. What the protocol cannot do is not pretended: nothing is removed,
and a reply that answers another request of the same shape is found by whoever opens the chunk.
"""

from collections.abc import Sequence
from typing import Final

from kvsafe.lmcache.answers import Answer, Fetch, Found, Lost, Offer
from kvsafe.lmcache.exchange import Exchange, Pieces, require_room, run, wipe_misses
from kvsafe.lmcache.frames import (
    REPLY,
    Reply,
    decode_reply,
    exist_request,
    get_request,
    health_request,
    judge_get,
    judge_look,
    put_request,
)
from kvsafe.lmcache.keys import check_length
from kvsafe.lmcache.links import Links, LinkSetting
from kvsafe.lmcache.wire import Deadline, Wire

LOOK_WINDOW: Final = 64
FETCH_WINDOW: Final = 16
STORE_WINDOW: Final = 4


class _Replies:
    """Replies straight from the connection: their length is known, nothing is read ahead."""

    empty = True

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def next(self, deadline: Deadline) -> Reply:
        head = bytearray(REPLY.size)
        self.wire.read_exactly(memoryview(head), deadline)
        return decode_reply(head)


class LmClient:
    """One lm:// server as a `PeerStore`. Thread-safe; connections and memory are bounded."""

    def __init__(self, setting: LinkSetting) -> None:
        self.links = Links(setting)

    def look(self, keys: Sequence[str]) -> list[Answer]:
        """Which keys the server says it has."""

        def ask(part: Sequence[int]) -> Pieces:
            return [exist_request(keys[at]) for at in part]

        return self._run(Exchange(LOOK_WINDOW, _Replies, ask, _take_look), keys)

    def fetch(self, items: Sequence[Fetch]) -> list[Answer]:
        """Fill the buffers of those items that the server has."""
        for item in items:
            require_room(item.into, item.shape.length)

        def ask(part: Sequence[int]) -> Pieces:
            return [get_request(items[at].key) for at in part]

        def take(replies: _Replies, at: int, deadline: Deadline) -> Answer:
            item = items[at]
            answer = judge_get(replies.next(deadline), item.shape)
            if answer is Found.HIT:
                replies.wire.read_exactly(item.into, deadline, begun=True)
            return answer

        exchange = Exchange(FETCH_WINDOW, _Replies, ask, take)
        return wipe_misses(items, self._run(exchange, [item.key for item in items]))

    def store(self, items: Sequence[Offer]) -> list[Answer]:
        """Store values; STORED means that the server says it has them."""
        for item in items:
            require_room(item.data, item.shape.length)

        def ask(part: Sequence[int]) -> Pieces:
            pieces: Pieces = []
            for at in part:
                pieces += (put_request(items[at].key, items[at].shape), items[at].data)
            return pieces + [exist_request(items[at].key) for at in part]

        exchange = Exchange(STORE_WINDOW, _Replies, ask, _take_stored)
        return self._run(exchange, [item.key for item in items])

    def remove(self, keys: Sequence[str]) -> list[Answer]:
        """The protocol has no way to remove anything."""
        return [Lost("lm:// cannot remove")] * len(keys)

    def health(self, key: str) -> Answer:
        """HIT when the server says that it is well. `key` may be any valid key text."""

        def ask(part: Sequence[int]) -> Pieces:
            return [health_request(key) for _ in part]

        return self._run(Exchange(1, _Replies, ask, _take_look), [key])[0]

    def close(self) -> None:
        """Let go of connections."""
        self.links.close()

    def _run(self, exchange: Exchange[_Replies], keys: Sequence[str]) -> list[Answer]:
        # Keys that do not fit a request are refused before anything is sent.
        return run(self.links, exchange, [check_length(key) for key in keys])


def _take_look(replies: _Replies, _at: int, deadline: Deadline) -> Answer:
    return judge_look(replies.next(deadline))


def _take_stored(replies: _Replies, _at: int, deadline: Deadline) -> Answer:
    answer = judge_look(replies.next(deadline))
    if answer is Found.HIT:
        return Found.STORED
    return Lost("not there after it was stored") if answer is Found.ABSENT else answer

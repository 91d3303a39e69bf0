# SPDX-License-Identifier: Apache-2.0
"""Client of a Redis or Valkey server as a store of chunks.

Own code and no library: a library allocates what a reply declares, and what a chunk store needs
is a handful of commands (`spec/decisions/` says more). SET answers, and a value is there whole or
not at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvsafe.lmcache.answers import Answer, Fetch, Found, Lost, Offer
from kvsafe.lmcache.exchange import Exchange, Pieces, require_room, run, wipe_misses
from kvsafe.lmcache.keys import refuse_key
from kvsafe.lmcache.links import Links, LinkSetting
from kvsafe.lmcache.objectkeys import MAX_TEXT
from kvsafe.lmcache.resp import ReplyReader, command, read_count, read_status, read_value
from kvsafe.lmcache.wire import Deadline, Wire, WireError
from kvsafe.seal.refusal import Refusal

LOOK_WINDOW: Final = 32
FETCH_WINDOW: Final = 16
STORE_WINDOW: Final = 4
MAX_VALUE: Final = 512 << 20
"""Redis's own limit."""


@dataclass(frozen=True, slots=True)
class RespSetting:
    """How a RESP server is used.

    Attributes:
        username, password: for AUTH; the password comes from the environment, never from JSON.
        database: for SELECT; 0 sends none.
        ttl_s: whole seconds after which the server forgets what we stored; None: never.
    """

    link: LinkSetting
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    ttl_s: int | None = None


class RespClient:
    """One RESP server as a `PeerStore`. Thread-safe; connections and memory are bounded."""

    def __init__(self, setting: RespSetting) -> None:
        self._setting = setting
        self.links = Links(setting.link, self._greet)

    def look(self, keys: Sequence[str]) -> list[Answer]:
        """Which keys the server says it has."""

        def take(reader: ReplyReader, _at: int, deadline: Deadline) -> Answer:
            count = read_count(reader, deadline, 1)
            if isinstance(count, int):
                return Found.HIT if count else Found.ABSENT
            return count

        return self._run(Exchange(LOOK_WINDOW, ReplyReader, _each(b"EXISTS", keys), take), keys)

    def fetch(self, items: Sequence[Fetch]) -> list[Answer]:
        """Fill the buffers of those items that the server has."""
        for item in items:
            require_room(item.into, item.shape.length)
        keys = [item.key for item in items]

        def take(reader: ReplyReader, at: int, deadline: Deadline) -> Answer:
            return read_value(reader, items[at].into, deadline)

        exchange = Exchange(FETCH_WINDOW, ReplyReader, _each(b"GET", keys), take)
        return wipe_misses(items, self._run(exchange, keys))

    def store(self, items: Sequence[Offer]) -> list[Answer]:
        """Store values."""
        for item in items:
            require_room(item.data, item.shape.length)
            if item.shape.length > MAX_VALUE:
                raise ValueError(f"a value of {item.shape.length} bytes, at most {MAX_VALUE}")
        ttl = self._setting.ttl_s
        tail = () if ttl is None else (b"EX", b"%d" % ttl)

        def ask(part: Sequence[int]) -> Pieces:
            pieces: Pieces = []
            for at in part:
                pieces += command(b"SET", items[at].key.encode(), items[at].data, *tail)
            return pieces

        def take(reader: ReplyReader, _at: int, deadline: Deadline) -> Answer:
            return read_status(reader, deadline)

        exchange = Exchange(STORE_WINDOW, ReplyReader, ask, take)
        return self._run(exchange, [item.key for item in items])

    def remove(self, keys: Sequence[str]) -> list[Answer]:
        """Remove keys; ABSENT whether they were there or not."""

        def take(reader: ReplyReader, _at: int, deadline: Deadline) -> Answer:
            count = read_count(reader, deadline, 1)
            return Found.ABSENT if isinstance(count, int) else count

        return self._run(Exchange(LOOK_WINDOW, ReplyReader, _each(b"DEL", keys), take), keys)

    def ping(self) -> Answer:
        """STORED when the server answers at all."""

        def ask(part: Sequence[int]) -> Pieces:
            return [piece for _ in part for piece in command(b"PING")]

        def take(reader: ReplyReader, _at: int, deadline: Deadline) -> Answer:
            return read_status(reader, deadline, b"PONG")

        return run(self.links, Exchange(1, ReplyReader, ask, take), [None])[0]

    def close(self) -> None:
        """Let go of connections."""
        self.links.close()

    def _run(self, exchange: Exchange[ReplyReader], keys: Sequence[str]) -> list[Answer]:
        return run(self.links, exchange, [_check_key(key) for key in keys])

    def _greet(self, wire: Wire, deadline: Deadline) -> None:
        setting, steps = self._setting, []
        if setting.password is not None:
            user = [] if setting.username is None else [setting.username.encode()]
            steps.append(command(b"AUTH", *user, setting.password.encode()))
        if setting.database:
            steps.append(command(b"SELECT", b"%d" % setting.database))
        for step in steps:
            wire.send(step, deadline)
            answer = read_status(ReplyReader(wire), deadline)
            if answer is not Found.STORED:
                why = answer.why if isinstance(answer, Lost) else "another protocol"
                raise WireError(f"login: {why}")


def _each(verb: bytes, keys: Sequence[str]) -> Callable[[Sequence[int]], Pieces]:
    def ask(part: Sequence[int]) -> Pieces:
        return [piece for at in part for piece in command(verb, keys[at].encode())]

    return ask


def _check_key(key: str) -> Refusal | None:
    length = len(key.encode("utf-8", "surrogatepass"))
    return None if length <= MAX_TEXT else refuse_key("key", f"at most {MAX_TEXT} bytes", length)

# SPDX-License-Identifier: Apache-2.0
"""A Redis-like server in a thread, honest or wrong in one chosen way (see `hostile.py`).

It knows what LMCache's RESP adapter and kvsafe need: PING, EXISTS, SET, GET, DEL, and answers
everything else with an error, as Redis does. Only RESP2 arrays of bulk strings are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.lmcache.listener import Act, Close, Drip, Flood, Hang, Link, Listener, Reset, Send

__all__ = ["RESP_TEMPERS", "HostileRedis", "RespTemper"]

_GAP_S = 0.05
_LINE = 64
_LARGEST = 256 << 20
_WORDS = 64

Answer = Callable[[bytes], Sequence[Act]]


def bulk(data: bytes) -> bytes:
    """`data` as a RESP bulk string."""
    return b"$%d\r\n%s\r\n" % (len(data), data)


@dataclass(frozen=True, slots=True)
class RespTemper:
    """One way to behave; `get` answers a GET that has a value, `exists` an EXISTS."""

    name: str
    summary: str
    get: Answer = lambda data: [Send(bulk(data))]
    miss: Sequence[Act] = (Send(b"$-1\r\n"),)
    exists: Sequence[Act] | None = None
    set: Sequence[Act] = (Send(b"+OK\r\n"),)
    keeps: bool = True
    greet: Sequence[Act] = ()


def _says(*acts: Act) -> Answer:
    return lambda _: acts


def _sends(raw: bytes) -> Answer:
    return lambda _: [Send(raw)]


def _flip(data: bytes) -> bytes:
    place = len(data) // 2
    return data[:place] + bytes((data[place] ^ 0x10,)) + data[place + 1 :]


def _head(data: bytes) -> bytes:
    return b"$%d\r\n" % len(data)


_NIL = (Send(b"$-1\r\n"),)
_ONE = (Send(b":1\r\n"),)
_ERRORS = {
    "error-loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "error-moved": b"-MOVED 3999 127.0.0.1:6381\r\n",
    "error-noauth": b"-NOAUTH Authentication required.\r\n",
    "error-endless": b"-ERR " + b"x" * (1 << 20),
}

_ALL = (
    RespTemper("good", "honest in everything"),
    RespTemper(
        "split-header",
        "honest, in two segments",
        get=lambda d: [Drip(_head(d)[:2], _GAP_S), Send(bulk(d)[2:])],
    ),
    RespTemper("bit-flip", "one bit is wrong", get=lambda d: [Send(bulk(_flip(d)))]),
    RespTemper("reversed", "other bytes of equal size", get=lambda d: [Send(bulk(d[::-1]))]),
    RespTemper("short-bulk", "half the value", get=lambda d: [Send(bulk(d[: len(d) // 2]))]),
    RespTemper("long-bulk", "512 bytes too many", get=lambda d: [Send(bulk(d + bytes(512)))]),
    RespTemper("empty-bulk", "no bytes", get=_sends(b"$0\r\n\r\n")),
    RespTemper(
        "huge-bulk",
        "a length of 2^63-1, then silence",
        get=_says(Send(b"$9223372036854775807\r\n"), Hang()),
    ),
    RespTemper("negative-bulk", "a length of -2", get=_sends(b"$-2\r\n")),
    RespTemper("odd-length", "a length that is no number", get=lambda d: [Send(b"$4_096\r\n" + d)]),
    RespTemper(
        "spaced-length",
        "a length with a sign and a space",
        get=lambda d: [Send(b"$ +%d\r\n%s\r\n" % (len(d), d))],
    ),
    RespTemper("no-terminator", "no CR LF behind it", get=lambda d: [Send(_head(d) + d + b"XX")]),
    RespTemper("simple-string", "a simple string", get=_sends(b"+OK\r\n")),
    RespTemper("integer", "an integer", get=_sends(b":1\r\n")),
    RespTemper("array", "an array of one value", get=lambda d: [Send(b"*1\r\n" + bulk(d))]),
    RespTemper("nested", "arrays in arrays, very deep", get=_sends(b"*1\r\n" * 20000)),
    RespTemper("resp3-null", "a RESP3 null", get=_sends(b"_\r\n")),
    RespTemper(
        "push", "a RESP3 push before the value", get=lambda d: [Send(b">1\r\n+x\r\n" + bulk(d))]
    ),
    RespTemper("unknown-type", "a type that does not exist", get=_sends(b"?4\r\nabcd\r\n")),
    RespTemper(
        "endless-line",
        "a length line without an end",
        get=_says(Send(b"$"), Flood(b"1" * 4096)),
    ),
    RespTemper("extra-reply", "an answer more", get=lambda d: [Send(bulk(d) + b"+OK\r\n")]),
    RespTemper("early-reply", "an answer before any question", greet=(Send(b":1\r\n"),)),
    RespTemper(
        "exists-then-nil", "EXISTS says 1, GET says nil", get=_says(*_NIL), miss=_NIL, exists=_ONE
    ),
    RespTemper("exists-two", "EXISTS of one key says 2", exists=(Send(b":2\r\n"),)),
    RespTemper("exists-text", "EXISTS says OK", exists=(Send(b"+OK\r\n"),)),
    RespTemper(
        "cut", "half the value and the end", get=lambda d: [Send(bulk(d)[: len(d) // 2]), Close()]
    ),
    RespTemper(
        "reset", "a TCP reset inside the value", get=lambda d: [Send(bulk(d)[:99]), Reset()]
    ),
    RespTemper("close-at-once", "accepts and closes", greet=(Close(),)),
    RespTemper(
        "silent",
        "never answers",
        get=_says(Hang()),
        miss=(Hang(),),
        exists=(Hang(),),
        set=(Hang(),),
    ),
    RespTemper(
        "silent-after-length", "the length, then nothing", get=lambda d: [Send(_head(d)), Hang()]
    ),
    RespTemper(
        "drip",
        "one byte at a time, for ever",
        get=lambda d: [Send(_head(d)), Drip(d, 0.5)],
        exists=(Drip(b":" + b"0" * 60 + b"1\r\n", 0.5),),
    ),
    RespTemper(
        "flood",
        "a right answer and then bytes without an end",
        get=lambda d: [Send(bulk(d)), Flood(bytes(1 << 16))],
    ),
    RespTemper("forgetful", "says OK to SET and keeps nothing", keeps=False),
    RespTemper(
        "set-error", "no room: SET is refused", set=(Send(b"-OOM no room\r\n"),), keeps=False
    ),
    *(RespTemper(name, "GET is an error", get=_sends(raw)) for name, raw in _ERRORS.items()),
)

RESP_TEMPERS: dict[str, RespTemper] = {temper.name: temper for temper in _ALL}


class HostileRedis(Listener):
    """A server with one temper; `entries` is what it holds, `seen` the commands, in order."""

    def __init__(
        self, temper: str | RespTemper = "good", host: str = "127.0.0.1", port: int = 0
    ) -> None:
        super().__init__(host, port)
        self.temper = temper if isinstance(temper, RespTemper) else RESP_TEMPERS[temper]
        self.seen: list[list[bytes]] = []
        self.entries: dict[bytes, bytes] = {}

    def keep(self, key: str, data: bytes) -> None:
        """Store one value as if it had been set."""
        with self._lock:
            self.entries[key.encode()] = data

    def play(self, name: str) -> None:
        """Change the temper; raises KeyError for an unknown one."""
        self.temper = RESP_TEMPERS[name]

    def serve(self, link: Link, number: int) -> None:
        """Answer one client until it leaves or the temper ends the connection."""
        if not link.play(self.temper.greet):
            return
        while (words := _read_command(link)) is not None:
            if not words:
                link.play([Send(b"-ERR Protocol error\r\n")])
                return
            self.seen.append([word if len(word) <= _LINE * 8 else b"..." for word in words])
            if not link.play(self._answer(words)):
                return

    def _answer(self, words: list[bytes]) -> Sequence[Act]:
        with self._lock:
            match [words[0].upper(), *words[1:]]:
                case [b"PING"]:
                    return [Send(b"+PONG\r\n")]
                case [b"GET", key]:
                    held = self.entries.get(key)
                    return self.temper.miss if held is None else self.temper.get(held)
                case [b"SET", key, value]:
                    if self.temper.keeps:
                        self.entries[key] = value
                    return self.temper.set
                case [b"EXISTS", *keys]:
                    count = sum(key in self.entries for key in keys)
                    return self.temper.exists or [Send(b":%d\r\n" % count)]
                case [b"DEL", *keys]:
                    gone = sum(self.entries.pop(key, None) is not None for key in keys)
                    return [Send(b":%d\r\n" % gone)]
        return [Send(b"-ERR unknown command\r\n")]


def _number(line: bytes | None, mark: bytes, limit: int) -> int | None:
    if line is None or not line.startswith(mark) or not line[1:].isdigit():
        return None
    value = int(line[1:])
    return value if value <= limit else None


def _read_command(link: Link) -> list[bytes] | None:
    """One command; an empty list when it is malformed, None when the client is gone."""
    line = link.read_line(_LINE)
    if line is None:
        return None
    count = _number(line, b"*", _WORDS)
    words: list[bytes] = []
    for _ in range(count or 0):
        length = _number(link.read_line(_LINE), b"$", _LARGEST)
        word = None if length is None else link.read(length + 2)
        if word is None or not word.endswith(b"\r\n"):
            return []
        words.append(word[:-2])
    return words

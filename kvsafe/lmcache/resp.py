# SPDX-License-Identifier: Apache-2.0
"""RESP2 as Redis and Valkey speak it, the small part that a chunk store needs.

Replies are read with bounds: a line has at most 512 bytes, and a value goes straight into the
buffer that the caller made for the length it expects. A declared length is compared, never used:
nothing is allocated for it. Pushes, arrays and RESP3 types are never asked for, so they are
refused (1301).
"""

import re
from typing import Final

from kvsafe.lmcache.answers import Answer, Found, Lost
from kvsafe.lmcache.wire import Deadline, Wire
from kvsafe.seal.refusal import Refusal, RefusalKind

MAX_LINE: Final = 512
_ROOM: Final = 4096
_INTEGER: Final = re.compile(rb"-?(?:0|[1-9][0-9]{0,18})")
_WORD: Final = re.compile(rb"[A-Z]{1,24}")
_TYPES: Final = b"+-:$"


def command(*parts: bytes | memoryview) -> list[bytes | memoryview]:
    """A command as pieces to be sent one after the other; large parts are not copied."""
    pieces: list[bytes | memoryview] = [b"*%d\r\n" % len(parts)]
    for part in parts:
        size = part.nbytes if isinstance(part, memoryview) else len(part)
        pieces += (b"$%d\r\n" % size, part, b"\r\n")
    return pieces


class ReplyReader:
    """Reads replies from one connection; what was read ahead is kept for the next reply."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._room = bytearray(_ROOM)
        self._have = 0

    @property
    def empty(self) -> bool:
        """Whether nothing was read ahead."""
        return self._have == 0

    def line(self, deadline: Deadline, *, begun: bool = False) -> bytes | Refusal:
        """One line without its end."""
        searched = 0
        while True:
            at = self._room.find(b"\r\n", searched, self._have)
            if at >= 0:
                line = bytes(self._room[:at])
                self._drop(at + 2)
                return line
            if self._have >= MAX_LINE:
                return _refuse("line", f"at most {MAX_LINE} bytes", "a longer one")
            searched = max(0, self._have - 1)
            self._fill(deadline, begun=begun)

    def _fill(self, deadline: Deadline, *, begun: bool) -> None:
        space = memoryview(self._room)[self._have :]
        self._have += self._wire.read_some(space, deadline, begun=begun or self._have > 0)

    def _drop(self, count: int) -> None:
        rest = self._have - count
        self._room[:rest] = self._room[count : self._have]
        self._have = rest

    def body(self, into: memoryview, deadline: Deadline) -> Refusal | None:
        """A value of exactly `len(into)` bytes and the line end behind it."""
        ready = min(self._have, len(into))
        into[:ready] = self._room[:ready]
        self._drop(ready)
        self._wire.read_exactly(into[ready:], deadline, begun=True)
        while self._have < 2:
            self._fill(deadline, begun=True)
        end = bytes(self._room[:2])
        self._drop(2)
        return None if end == b"\r\n" else _refuse("value", "a line end behind it", "other bytes")


def _refuse(field: str, expected: object, found: object) -> Refusal:
    return Refusal.of(RefusalKind.PEER_REPLY, field, expected, found)


def _typed(reader: ReplyReader, deadline: Deadline) -> tuple[bytes, bytes] | Refusal:
    """The type of the next reply and the rest of its first line."""
    line = reader.line(deadline)
    if isinstance(line, Refusal):
        return line
    if not line or line[:1] not in _TYPES:
        return _refuse("type", "one of + - : $", line[:1])
    return line[:1], line[1:]


def _unexpected(kind: bytes, rest: bytes, wanted: str) -> Answer:
    """A reply of another type: an error is an answer, anything else breaks the protocol."""
    if kind != b"-":
        return _refuse("type", wanted, kind)
    # The first word is a code by convention; the rest of the text is nobody's business.
    word = _WORD.match(rest)
    return Lost(f"the server answers {word[0].decode() if word else 'an error'}")


def read_status(reader: ReplyReader, deadline: Deadline, want: bytes = b"OK") -> Answer:
    """A simple string. STORED for `want`, Lost for an error."""
    typed = _typed(reader, deadline)
    if isinstance(typed, Refusal):
        return typed
    kind, rest = typed
    if kind != b"+":
        return _unexpected(kind, rest, "+")
    return Found.STORED if rest == want else _refuse("status", want, "another text")


def read_count(reader: ReplyReader, deadline: Deadline, most: int) -> int | Answer:
    """An integer from 0 to `most`."""
    typed = _typed(reader, deadline)
    if isinstance(typed, Refusal):
        return typed
    kind, rest = typed
    if kind != b":":
        return _unexpected(kind, rest, ":")
    if not _INTEGER.fullmatch(rest) or not 0 <= int(rest) <= most:
        return _refuse("integer", f"0 to {most}", rest[:24])
    return int(rest)


def read_value(reader: ReplyReader, into: memoryview, deadline: Deadline) -> Answer:
    """A bulk string of exactly `len(into)` bytes: HIT, ABSENT (no such key), or why not."""
    typed = _typed(reader, deadline)
    if isinstance(typed, Refusal):
        return typed
    kind, rest = typed
    if kind != b"$":
        return _unexpected(kind, rest, "$")
    if rest == b"-1":
        return Found.ABSENT
    if not _INTEGER.fullmatch(rest) or int(rest) != len(into):
        return Refusal.of(RefusalKind.PEER_LENGTH, "length", len(into), rest[:24])
    return reader.body(into, deadline) or Found.HIT

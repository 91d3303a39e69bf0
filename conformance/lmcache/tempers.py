# SPDX-License-Identifier: Apache-2.0
"""The tempers of an lm:// server: one honest, the others each wrong in one way.

A temper changes what an honest server would do at one of three moments: when a client connects,
when it asks, and when it puts. Everything else stays honest, so that a client that fails a case
fails it for the named reason.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.lmcache.listener import Act, Close, Drip, Flood, Hang, Reset, Send
from conformance.lmcache.wire import (
    FAIL,
    NO_SHAPE,
    SUCCESS,
    Command,
    Dtype,
    Format,
    Meta,
    Reply,
    Request,
)

__all__ = ["TEMPERS", "Entry", "Exchange", "Temper", "honest"]

_GAP_S = 0.05
_FLOOD = bytes(1 << 16)


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored chunk: what the client said about it, and its bytes."""

    meta: Meta
    data: bytes


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and what the server knows: the entry asked for, an older one, another key's."""

    request: Request
    entry: Entry | None
    older: Entry | None
    other: Entry | None
    turn: int


Answer = Callable[[Exchange], Sequence[Act]]


def _hit(entry: Entry, **changes: int | tuple[int, int, int, int]) -> bytes:
    return Reply(SUCCESS, entry.meta.but(**changes)).pack()


def honest(exchange: Exchange) -> list[Act]:
    """What LMCache's own server answers to GET, EXIST and HEALTH; LIST gets nothing."""
    entry = exchange.entry
    match exchange.request.command:
        case Command.GET if entry is not None:
            return [Send(_hit(entry) + entry.data)]
        case Command.EXIST if entry is not None:
            return [Send(Reply(SUCCESS).pack())]
        case Command.GET | Command.EXIST:
            return [Send(Reply(FAIL).pack())]
        case Command.HEALTH:
            return [Send(Reply(SUCCESS).pack())]
    return []


@dataclass(frozen=True, slots=True)
class Temper:
    """One way to behave; `get` and `exist` answer, `keeps_puts` False forgets what was put."""

    name: str
    summary: str
    get: Answer = honest
    exist: Answer = honest
    greet: Sequence[Act] = ()
    keeps_puts: bool = True
    reads_puts: bool = True
    every_other_connection: bool = False


def _on_hit(answer: Callable[[Entry], Sequence[Act]]) -> Answer:
    """Lie only where there is something to lie about."""

    def get(exchange: Exchange) -> Sequence[Act]:
        return honest(exchange) if exchange.entry is None else answer(exchange.entry)

    return get


def _said(**changes: int | tuple[int, int, int, int]) -> Answer:
    """The right bytes under a changed header."""
    return _on_hit(lambda e: [Send(_hit(e, **changes) + e.data)])


def _flip(data: bytes) -> bytes:
    place = len(data) // 2
    return data[:place] + bytes((data[place] ^ 0x10,)) + data[place + 1 :]


def _other_keys(exchange: Exchange) -> Sequence[Act]:
    entry = exchange.entry
    if entry is None:
        return honest(exchange)
    other = exchange.other
    data = other.data if other is not None else entry.data[::-1]
    return [Send(_hit(entry) + data[: len(entry.data)].ljust(len(entry.data), b"\0"))]


def _negative(entry: Entry) -> Sequence[Act]:
    a, b, c, d = entry.meta.shape
    return [Send(_hit(entry, shape=(-a, -b, c, d)) + entry.data)]


def _turned(entry: Entry) -> Sequence[Act]:
    a, b, c, d = entry.meta.shape
    return [Send(_hit(entry, shape=(a, c, b, d)) + entry.data)]


def _other_dtype(entry: Entry) -> Sequence[Act]:
    dtype = Dtype.FLOAT16 if entry.meta.dtype == Dtype.BFLOAT16 else Dtype.BFLOAT16
    return [Send(_hit(entry, dtype=dtype) + entry.data)]


def _other_format(entry: Entry) -> Sequence[Act]:
    fmt = Format.KV_2TD if entry.meta.fmt != Format.KV_2TD else Format.KV_2LTD
    return [Send(_hit(entry, fmt=fmt) + entry.data)]


def _short(entry: Entry) -> Sequence[Act]:
    half = len(entry.data) // 2
    return [Send(_hit(entry, length=half) + entry.data[:half])]


def _long(entry: Entry) -> Sequence[Act]:
    more = len(entry.data) + 512
    return [Send(_hit(entry, length=more) + entry.data + bytes(512))]


def _smaller_shape(entry: Entry) -> Sequence[Act]:
    a, b, c, d = entry.meta.shape
    return [Send(_hit(entry, shape=(a, b, max(1, c // 2), d)) + entry.data)]


def _stale(exchange: Exchange) -> Sequence[Act]:
    older = exchange.older
    return honest(exchange) if older is None else [Send(_hit(older) + older.data)]


def _miss_with_bytes(entry: Entry) -> Sequence[Act]:
    return [Send(Reply(FAIL, entry.meta).pack() + entry.data)]


def _yes(_: Exchange) -> Sequence[Act]:
    return [Send(Reply(SUCCESS).pack())]


def _hang(_: Exchange) -> Sequence[Act]:
    return [Hang()]


def _cut(entry: Entry) -> Sequence[Act]:
    return [Send(_hit(entry) + entry.data[: len(entry.data) // 2]), Close()]


def _second_reply(exchange: Exchange) -> Sequence[Act]:
    """Answers the second question of a connection with the first answer once more."""
    entry = exchange.other if exchange.turn and exchange.other is not None else exchange.entry
    return honest(exchange) if entry is None else [Send(_hit(entry) + entry.data)]


def _big_endian(entry: Entry) -> Sequence[Act]:
    return [Send(Reply(SUCCESS, entry.meta).pack(">") + entry.data)]


def _code(code: int) -> Answer:
    return _on_hit(lambda e: [Send(struct.pack("<i", code) + _hit(e)[4:] + e.data)])


_ALL = (
    Temper("good", "honest in everything"),
    Temper(
        "split-header",
        "honest, but the reply comes in two segments, as TCP allows",
        get=_on_hit(lambda e: [Drip(_hit(e)[:7], _GAP_S), Send(_hit(e)[7:] + e.data)]),
    ),
    Temper(
        "slow-but-honest",
        "honest, with pauses inside the payload",
        get=_on_hit(
            lambda e: [Send(_hit(e) + e.data[:-4]), Drip(e.data[-4:], _GAP_S)],
        ),
    ),
    Temper(
        "flapping",
        "every other connection, from the first, is closed at once; the rest is honest",
        every_other_connection=True,
    ),
    Temper(
        "bit-flip",
        "one bit of the payload is wrong",
        get=_on_hit(lambda e: [Send(_hit(e) + _flip(e.data))]),
    ),
    Temper("other-key", "the bytes of another key, of equal size", get=_other_keys),
    Temper("other-dtype", "another element type of equal size", get=_on_hit(_other_dtype)),
    Temper("other-format", "another format of equal size", get=_on_hit(_other_format)),
    Temper("turned-shape", "two dimensions exchanged, size equal", get=_on_hit(_turned)),
    Temper("negative-dims", "two dimensions negative, size equal", get=_on_hit(_negative)),
    Temper("no-shape", "a hit whose shape is all zero", get=_said(shape=NO_SHAPE)),
    Temper("smaller-shape", "half the tokens in the shape, all bytes", get=_on_hit(_smaller_shape)),
    Temper("short-length", "half the length and half the bytes, full shape", get=_on_hit(_short)),
    Temper("long-length", "512 bytes more than the shape", get=_on_hit(_long)),
    Temper(
        "huge-length",
        "a length of 2^31-1, then silence",
        get=_on_hit(lambda e: [Send(_hit(e, length=2**31 - 1) + e.data), Hang()]),
    ),
    Temper(
        "huge-everything",
        "length and shape agree on 2 GiB, then silence",
        get=_on_hit(
            lambda e: [
                Send(_hit(e, length=2**31 - 4, shape=(2, 2, 2**14, 2**14)) + e.data),
                Hang(),
            ]
        ),
    ),
    Temper("negative-length", "a length of -1", get=_said(length=-1)),
    Temper(
        "no-length",
        "a hit of no bytes",
        get=_on_hit(lambda e: [Send(_hit(e, length=0))]),
    ),
    Temper("code-500", "a code that is neither hit nor miss, then the payload", get=_code(500)),
    Temper("code-0", "code 0, then the payload", get=_code(0)),
    Temper("unknown-format", "a format number that does not exist", get=_said(fmt=99)),
    Temper("unknown-dtype", "an element type that does not exist", get=_said(dtype=99)),
    Temper("unknown-location", "a place that does not exist", get=_said(location=99)),
    Temper("big-endian", "the header in the other byte order", get=_on_hit(_big_endian)),
    Temper("miss-with-bytes", "a miss that is followed by bytes", get=_on_hit(_miss_with_bytes)),
    Temper(
        "extra-bytes",
        "a right answer and then bytes that nobody asked for",
        get=_on_hit(lambda e: [Send(_hit(e) + e.data + bytes(range(64)))]),
    ),
    Temper(
        "early-answer",
        "an answer to a question that was not asked, sent at the start",
        greet=(Send(Reply(SUCCESS).pack()),),
    ),
    Temper("old-answer", "the second answer of a connection is another key's", get=_second_reply),
    Temper("stale", "the value before the last overwrite", get=_stale),
    Temper(
        "exist-then-miss",
        "EXIST says yes, GET says no",
        exist=_yes,
        get=lambda _: [Send(Reply(FAIL).pack())],
    ),
    Temper(
        "header-then-close",
        "a hit header and the end of the stream, as after an interrupted PUT",
        exist=_yes,
        get=_on_hit(lambda e: [Send(_hit(e)), Close()]),
    ),
    Temper("cut-payload", "half the payload and the end of the stream", get=_on_hit(_cut)),
    Temper(
        "cut-header",
        "half a header and the end of the stream",
        get=_on_hit(lambda e: [Send(_hit(e)[:17]), Close()]),
    ),
    Temper(
        "reset",
        "a TCP reset in the middle of the payload",
        get=_on_hit(lambda e: [Send(_hit(e) + e.data[:100]), Reset()]),
    ),
    Temper("close-at-once", "accepts and closes", greet=(Close(),)),
    Temper(
        "silent", "accepts, reads, never answers", get=lambda _: [Hang()], exist=lambda _: [Hang()]
    ),
    Temper(
        "silent-after-header",
        "a hit header and then nothing, the connection stays open",
        get=_on_hit(lambda e: [Send(_hit(e)), Hang()]),
    ),
    Temper(
        "drip",
        "one byte at a time, for ever: each read succeeds, the whole never ends",
        get=_on_hit(lambda e: [Send(_hit(e)), Drip(e.data, 0.5)]),
        exist=lambda _: [Drip(Reply(SUCCESS).pack(), 0.5)],
    ),
    Temper(
        "flood",
        "a right answer and then bytes without an end",
        get=_on_hit(lambda e: [Send(_hit(e) + e.data), Flood(_FLOOD)]),
    ),
    Temper("deaf", "never reads what is put", reads_puts=False),
    Temper("forgetful", "takes what is put and keeps nothing", keeps_puts=False),
)

TEMPERS: dict[str, Temper] = {temper.name: temper for temper in _ALL}

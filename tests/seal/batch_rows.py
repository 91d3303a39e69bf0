# SPDX-License-Identifier: Apache-2.0
"""Worlds of suite aes256-gmac, their batch openers, and rows that these must or must not take.

`ROWS` is the compact list: each row differs in one thing from a right one, with all other tags
right, so that one comparison of `batch.c` alone can notice it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from kvsafe.seal.batch import BatchOpener, Native, batch_opener
from kvsafe.seal.header import Header, bitmap
from kvsafe.seal.opening import Expectation
from kvsafe.seal.refusal import Refusal
from kvsafe.seal.suites import Suite
from tests.seal.rows import (
    EPOCH,
    GENERATION,
    KEY,
    OLD_SECRET,
    OTHER_KEY,
    SECRET,
    World,
    get,
    identity,
    put,
    spec_slice_tag,
)

GMAC = Suite.AES256_GMAC
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "two writers": ((96, 64), 5),
    "twins, whole bytes of slots": ((64, 64), 8),
    "one writer, one slot": ((300,), 1),
    "no tail": ((40, 4056), 9),
    "sixty writers, two header pages": ((16,) * 60, 500),
    "slices of one byte": ((1, 1, 1), 3),
}
"""Slice bytes and slots."""


def expectation(world: World) -> Expectation:
    """What this engine expects, as its opener has it."""
    digest = world.suite.digest(world.document)
    return Expectation(
        world.suite, world.keyring, world.layout, world.document, digest, world.geometry
    )


def quick(world: World, key_bytes: int = len(KEY)) -> BatchOpener:
    """The batch opener of an engine that must have one."""
    found = batch_opener(expectation(world), key_bytes)
    assert found is not None
    return found


def says(opener: BatchOpener, row: bytes | bytearray, key: bytes = KEY, epoch: int = EPOCH) -> bool:
    """What a batch opener says of one row."""
    (answer,) = opener.right([memoryview(bytearray(row))], [key], epoch)
    return answer


def plainly_sealed(answer: Header | Refusal, world: World) -> bool:
    """Whether an opened row has the active key and covers all slots: all that is asked in C."""
    return (
        isinstance(answer, Header)
        and answer.fixed.key_id == world.keyring.active.key_id
        and answer.coverage == bitmap(world.slots, range(world.slots))
    )


@contextmanager
def worlds_of(suite: Suite) -> Iterator[None]:
    """`World()` is one of `suite` meanwhile, also in the cases of `cases.py`."""
    init: Any = World.__init__
    before = init.__defaults__
    init.__defaults__ = (suite, *before[1:])
    try:
        yield
    finally:
        init.__defaults__ = before


# --- forgers -------------------------------------------------------------------------------------


def slice_tag(
    world: World, row: bytes | bytearray, index: int, secret: bytes = SECRET, **other: int | bytes
) -> bytes:
    """The tag of a slice of `row`; `other` values in its context, each under its name."""
    place = world.layout.slices[index]
    key = bytes(row[144 : 144 + get(row, "key_bytes")])
    context: dict[str, int | bytes] = {
        "rank": place.rank,
        "key_bytes": len(key),
        "offset": place.offset,
        "length": place.length,
        "epoch": get(row, "epoch"),
        "generation": get(row, "generation"),
        "identity": bytes(row[80:112]),
        "key": key,
    }
    assert other.keys() <= context.keys()
    context |= other
    sizes = {"rank": 4, "key_bytes": 4, "offset": 8, "length": 8, "epoch": 8, "generation": 8}
    before = b"".join(
        value if isinstance(value, bytes) else value.to_bytes(sizes[name], "little")
        for name, value in context.items()
    )
    start = world.layout.header_bytes + place.offset
    body = bytes(row[start : start + place.length])
    return spec_slice_tag(world.suite, world.subkey(secret, "slice"), before, body)


def forge_slice(
    world: World, row: bytearray, index: int, secret: bytes = SECRET, **other: int | bytes
) -> bytearray:
    """Give a slice a tag for another context, or by another secret, in an authentic header."""
    return world.forge_record(row, index, tag=slice_tag(world, row, index, secret, **other))


def retag_slices(world: World, row: bytearray, secret: bytes = SECRET) -> bytearray:
    """Give every slice the tag that the header asks for; the header's own tag stays."""
    for index in range(len(world.slices)):
        at = world.part("records")[0] + 64 * index + 32
        row[at : at + 32] = slice_tag(world, row, index, secret)
    return row


def other_generation(world: World, generation: int) -> bytearray:
    """Another generation in the header and in all records, slices as they were."""
    row = world.chunk()
    put(row, "generation", generation)
    for index in range(len(world.slices)):
        world.forge_record(row, index, generation=generation)
    return row


def _flip(at: int, world: World) -> bytearray:
    """One bit of a row; `at` counts from the end if it is negative."""
    row = world.chunk()
    row[at] ^= 0x10
    return row


def _flip_part(name: str, at: int, world: World, *, tagged: bool = False) -> bytearray:
    """One bit of a part; `at` counts from the part's end if it is negative."""
    start, length = world.part(name)
    row = _flip(start + at % length, world)
    return world.retag(row) if tagged else row


def _flip_slice(index: int, at: int, world: World) -> bytearray:
    place = world.layout.slices[index]
    return _flip(world.layout.header_bytes + place.offset + at % place.length, world)


def _field(name: str, at: int, world: World) -> bytearray:
    """One byte of a field of the fixed part, in an authentic header."""
    row = world.chunk()
    value = get(row, name) ^ 1 << 8 * at
    return world.forge(row, **{name: value})


def _record(index: int, field: str, world: World) -> bytearray:
    """One field of a record, in an authentic header."""
    tag = bytearray(slice_tag(world, world.chunk(), index))
    tag[-1] ^= 1
    wrong: dict[str, int | bytes] = {
        "rank": 77,
        "reserved": 1,
        "offset": 5,
        "length": 7,
        "generation": GENERATION + 1,
        "tag": bytes(tag),
    }
    return world.forge_record(world.chunk(), index, **{field: wrong[field]})


def _other_slice(name: str, value: int | bytes, world: World) -> bytearray:
    other: dict[str, Any] = {name: value}
    return forge_slice(world, world.chunk(), 1, **other)


def _other_key_in_header(at: int, world: World) -> bytearray:
    """An authentic header of another key over slices of ours."""
    key = bytearray(KEY)
    key[at] ^= 1
    return world.forge_part(world.chunk(), "key", bytes(key))


# --- the compact list ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One row, who is asked for it, and what must be said."""

    make: Callable[[World], bytearray]
    right: bool = False
    key: bytes = KEY
    epoch: int = EPOCH
    shape: str = "two writers"


FAR = EPOCH + (1 << 56)
_PLAIN: Callable[[World], bytearray] = World.chunk
_RIGHT = {
    **{f"right: {name}": Row(_PLAIN, True, shape=name) for name in SHAPES},
    "right: other key": Row(lambda w: w.chunk(OTHER_KEY), True, key=OTHER_KEY),
    "right: epoch 0": Row(lambda w: w.chunk(epoch=0), True, epoch=0),
    "right: last epoch": Row(lambda w: w.chunk(epoch=2**64 - 1), True, epoch=2**64 - 1),
    "right: other generation": Row(lambda w: w.chunk(generation=2**64 - 1), True),
    "right: other content": Row(lambda w: w.chunk(fill=2), True),
    "right: sealed at another time": Row(lambda w: w.forge(w.chunk(), sealed_at=2**64 - 1), True),
}
_HEADERS = {
    "key asked for by another": Row(_PLAIN, key=OTHER_KEY),
    "first byte of the key": Row(partial(_other_key_in_header, 0)),
    "last byte of the key": Row(partial(_other_key_in_header, -1)),
    "epoch before": Row(lambda w: w.chunk(epoch=EPOCH - 1)),
    "epoch after": Row(_PLAIN, epoch=EPOCH - 1),
    "epoch far away": Row(lambda w: w.chunk(epoch=FAR)),
    "epoch over slices of ours": Row(lambda w: w.forge(w.chunk(epoch=EPOCH - 1), epoch=EPOCH)),
    "generation over slices of ours": Row(lambda w: other_generation(w, GENERATION + 1)),
    "part coverage": Row(lambda w: w.chunk(covered=range(4))),
    "bits past the slots": Row(lambda w: w.forge_part(w.chunk(), "coverage", b"\x3f")),
    "last byte of coverage": Row(
        lambda w: w.chunk(covered=range(499)), shape="sixty writers, two header pages"
    ),
    "sealed at, not tagged": Row(partial(_flip, 40)),
    "first byte of the header tag": Row(partial(_flip_part, "header tag", 0)),
    "last byte of the header tag": Row(partial(_flip_part, "header tag", -1)),
    "older key": Row(lambda w: _by_older_key(w)),
    **{
        f"{name}, byte {at}": Row(partial(_field, name, at))
        for name, at in (
            ("magic", 0),
            ("version", 0),
            ("suite", 0),
            ("flags", 3),
            ("key_id", 0),
            ("key_id", 7),
            ("payload_bytes", 0),
            ("header_bytes", 3),
            ("identity_bytes", 0),
            ("geometry_bytes", 0),
            ("writers", 0),
            ("slots", 1),
            ("key_bytes", 0),
            ("reserved", 1),
            ("identity_digest", 0),
            ("geometry_digest", 31),
        )
    },
    **{
        f"{part}, byte {at}": Row(partial(_flip_part, part, at, tagged=True))
        for part in ("identity", "geometry", "filler")
        for at in (0, -1)
    },
}
_RECORDS = {
    f"record {index}: {field}": Row(partial(_record, index, field))
    for index in (0, 1)
    for field in ("rank", "reserved", "offset", "length", "generation", "tag")
}
_BODIES = {
    **{
        f"slice {index}, byte {at}": Row(partial(_flip_slice, index, at))
        for index in (0, 1)
        for at in (0, 50, -1)
    },
    "last of sixty slices": Row(
        partial(_flip_slice, 59, -1), shape="sixty writers, two header pages"
    ),
    "last byte without a tail": Row(partial(_flip, -1), shape="no tail"),
    "first byte of the tail": Row(partial(_flip_part, "tail", 0)),
    "middle of the tail": Row(partial(_flip_part, "tail", 999)),
    "last byte of the tail": Row(partial(_flip_part, "tail", -1)),
    "slice by another secret": Row(lambda w: forge_slice(w, w.chunk(), 1, OLD_SECRET)),
    **{
        f"slice of another {name}": Row(partial(_other_slice, name, value))
        for name, value in (
            ("rank", 0),
            ("key_bytes", 35),
            ("offset", 0),
            ("length", 65),
            ("epoch", EPOCH + 1),
            ("generation", GENERATION - 1),
            ("identity", bytes(32)),
            ("key", OTHER_KEY),
        )
    },
}
ROWS = {**_RIGHT, **_HEADERS, **_RECORDS, **_BODIES}
"""By name. In every wrong row only what its name says is wrong."""
EXPECTED = {name: row.right for name, row in ROWS.items()}


def _by_older_key(world: World) -> bytearray:
    slices, slots = world.slices, world.slots
    return World(GMAC, slices, slots, secrets=(OLD_SECRET,), document=world.document).chunk()


@cache
def world_of(shape: str) -> World:
    """One engine for each shape, with an older key in its ring."""
    return World(GMAC, *SHAPES[shape], secrets=(SECRET, OLD_SECRET), document=identity(model="m"))


@cache
def made(name: str) -> bytes:
    """The row of `ROWS` with this name."""
    row = ROWS[name]
    return bytes(row.make(world_of(row.shape)))


def answers(native: Native) -> dict[str, bool]:
    """What the C code of `native` says to each of `ROWS`: each is asked for alone, untried."""
    openers = {name: BatchOpener(native, expectation(world_of(name)), len(KEY)) for name in SHAPES}
    return {
        name: says(openers[row.shape], made(name), row.key, row.epoch) for name, row in ROWS.items()
    }

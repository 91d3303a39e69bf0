# SPDX-License-Identifier: Apache-2.0
"""Every way in which a row is wrong, as data: how to make it, and the one right answer.

A case is checked together with its positive control: the same world's own row, everything
wanted, opens. Forged rows carry right header tags, so that the later steps are really reached.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from kvsafe.seal import cbor
from kvsafe.seal.suites import Suite
from tests.seal.rows import (
    EPOCH,
    GENERATION,
    GEOMETRY,
    KEY,
    OLD_SECRET,
    OTHER_KEY,
    SECRET,
    World,
    as_bytes,
    identity,
    kind_of,
    put,
)
from tests.seal.test_identity import sample


@dataclass(frozen=True)
class Ask:
    """One question to the opener."""

    row: bytes | bytearray
    key: bytes = KEY
    epoch: int = EPOCH
    wanted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """A wrong row: `answer` is `number field`, or `opened` for one that only looks wrong."""

    name: str
    answer: str
    make: Callable[[World], Ask | bytearray]
    world: Callable[[], World] = World


def answer_of(case: Case) -> str:
    """What the opener says to this case."""
    world = case.world()
    ask = case.make(world)
    if isinstance(ask, bytearray):
        ask = Ask(ask)
    return kind_of(world.open(ask.row, ask.key, ask.epoch, ask.wanted))


def check(case: Case) -> None:
    """Raises `AssertionError` unless the control opens and the case gets its answer."""
    world = case.world()
    assert kind_of(world.open(world.chunk(), wanted=range(world.slots))) == "opened"
    found = answer_of(case)
    assert found == case.answer, f"{found}, and not {case.answer}"


def _fields(answer: str, name: str, values: Iterable[int | bytes]) -> list[Case]:
    return [
        Case(
            f"{name} = {value.hex() if isinstance(value, bytes) else value}",
            answer,
            partial(_forge, name, value),
        )
        for value in values
    ]


def _forge(name: str, value: int | bytes, world: World) -> bytearray:
    return world.forge(world.chunk(), **{name: value})


BIG = partial(World, slices=(5000, 3000))
TWINS = partial(World, slices=(64, 64))
ROTATED = partial(World, secrets=(SECRET, OLD_SECRET))
OLD = partial(World, secrets=(OLD_SECRET,))
_ROOM = World().layout.row_bytes - World().layout.header_bytes
_DOCUMENTS_ROOM = World().part("records")[0] - World().part("geometry")[0]

LENGTHS = [
    *_fields("301 header_bytes", "header_bytes", [0, 1, 4095, 4097, 12288, 1 << 20]),
    *_fields("301 header_bytes", "header_bytes", [(1 << 20) + 4096, 2**32 - 4096, 2**32 - 1]),
    *_fields("303 payload_bytes", "header_bytes", [8192]),
    *_fields("302 identity_bytes", "identity_bytes", [0, 65537, 2**32 - 1]),
    *_fields("302 header", "identity_bytes", [65536]),
    *_fields("702 identity", "identity_bytes", [1, len(identity()) - 1, len(identity()) + 1]),
    *_fields("302 geometry_bytes", "geometry_bytes", [0, 65537, 2**32 - 1]),
    *_fields("302 header", "geometry_bytes", [65536, _DOCUMENTS_ROOM + 1]),
    *_fields("802 geometry", "geometry_bytes", [1, len(GEOMETRY) + 1, _DOCUMENTS_ROOM]),
    *_fields("304 writers", "writers", [0, 1025, 2**32 - 1]),
    *_fields("901 writers", "writers", [1, 3]),
    *_fields("302 header", "writers", [1024]),
    *_fields("302 slots", "slots", [0, 4097, 2**32 - 1]),
    *_fields("801 slots", "slots", [1, 4, 6, 8]),
    *_fields("702 identity", "slots", [9, 4096]),
    *_fields("302 key_bytes", "key_bytes", [0, 129, 65535]),
    *_fields("501 key", "key_bytes", [1, 35, 37, 128]),
    *_fields("303 payload_bytes", "payload_bytes", [0, _ROOM + 1, 2**32 - 1, 2**63, 2**64 - 1]),
    *_fields("801 payload_bytes", "payload_bytes", [1, 159, 161, _ROOM]),
]

TERMS = [
    *_fields("102 magic", "magic", [bytes(8), b"\x89kvsafe\r"]),
    *_fields("201 version", "version", [0, 2, 65535]),
    *_fields("202 suite", "suite", [0, 2, 3, 4, 65535]),
    *_fields("203 flags", "flags", [1, 2**31]),
    *_fields("203 flags", "reserved", [1, 65535]),
    *_fields("204 key_id", "key_id", [bytes(8), b"\xff" * 8]),
    *_fields("601 epoch", "epoch", [0, EPOCH - 1]),
    *_fields("602 epoch", "epoch", [EPOCH + 1, 2**63, 2**64 - 1]),
    *_fields("902 writer[0].generation", "generation", [0, GENERATION - 1, 2**64 - 1]),
    *_fields("702 identity", "identity_digest", [bytes(32)]),
    *_fields("802 geometry", "geometry_digest", [bytes(32)]),
    *_fields("opened", "sealed_at", [0, 2**64 - 1]),
]


def _cut(length: int, world: World) -> bytearray:
    row = world.chunk()
    return row[:length].ljust(length, b"\0")


def _longer_header(header_bytes: int, row_bytes: int, world: World) -> bytearray:
    row = world.chunk().ljust(row_bytes, b"\0")
    return world.forge(row, header_bytes=header_bytes, payload_bytes=4096)


ROW_LENGTHS = [
    *(Case(f"row of {n} bytes", "101 row", partial(_cut, n)) for n in (0, 1, 8, 143)),
    *(
        Case(f"row of {n} bytes", "301 header_bytes", partial(_cut, n))
        for n in (144, 145, 2048, 4095)
    ),
    *(
        Case(f"row of {n} bytes", "303 payload_bytes", partial(_cut, n))
        for n in (4096, 4097, 4096 + 159)
    ),
    *(
        Case(f"row of {n} bytes", "801 row_bytes", partial(_cut, n))
        for n in (4096 + 160, 8191, 8193, 12288)
    ),
    Case(
        "longest header of the format",
        "801 header_bytes",
        partial(_longer_header, 1 << 20, (1 << 20) + 8192),
    ),
    Case(
        "header longer than the format allows",
        "301 header_bytes",
        partial(_longer_header, (1 << 20) + 4096, (1 << 20) + 8192),
    ),
    Case(
        "header of two pages", "801 header_bytes", partial(_longer_header, 8192, 12288), world=BIG
    ),
]


def _record(index: int, fields: dict[str, int | bytes], world: World) -> bytearray:
    return world.forge_record(world.chunk(), index, **fields)


def _records(answer: str, index: int, *edits: dict[str, int | bytes]) -> list[Case]:
    return [Case(f"record {index} {edit}", answer, partial(_record, index, edit)) for edit in edits]


def _exchange_records(retag: bool, world: World) -> bytearray:
    row = world.chunk()
    at, _ = world.part("records")
    row[at : at + 64], row[at + 64 : at + 128] = row[at + 64 : at + 128], row[at : at + 64]
    return world.retag(row) if retag else row


def _same_record_twice(world: World) -> bytearray:
    row = world.chunk()
    at, _ = world.part("records")
    row[at + 64 : at + 128] = row[at : at + 64]
    return world.retag(row)


RECORDS = [
    *_records("901 writer[0]", 0, {"rank": 1}, {"reserved": 1}, {"offset": 1}, {"length": 0}),
    *_records("901 writer[0]", 0, {"length": 97}, {"length": 160}, {"length": 2**63}),
    *_records("901 writer[1]", 1, {"rank": 0}, {"rank": 2}, {"rank": 2**32 - 1}),
    *_records(
        "901 writer[1]", 1, {"offset": 95, "length": 65}, {"offset": 0}, {"offset": 2**64 - 1}
    ),
    *_records("901 writer[1]", 1, {"length": 2**32 - 1}, {"length": 2**64 - 1}),
    *_records("902 writer[1].generation", 1, {"generation": GENERATION + 1}, {"generation": 0}),
    *_records("1001 writer[0].tag", 0, {"tag": bytes(32)}),
    *_records("1001 writer[1].tag", 1, {"tag": bytes(32)}),
    Case("records exchanged", "401 header tag", partial(_exchange_records, False)),
    Case("records exchanged, tagged", "901 writer[0]", partial(_exchange_records, True)),
    Case("one writer twice", "901 writer[1]", _same_record_twice),
]


def _part(name: str, at: int, data: bytes, world: World) -> bytearray:
    return world.forge_part(world.chunk(), name, data, at)


def _flip(name: str, world: World) -> bytearray:
    row = world.chunk()
    row[world.part(name)[0]] ^= 1
    return row


def _wants(covered: tuple[int, ...], wanted: tuple[int, ...], world: World) -> Ask:
    return Ask(world.chunk(covered=covered), wanted=wanted)


PARTS = [
    Case("flipped bit of the key", "401 header tag", partial(_flip, "key")),
    Case("flipped bit of a record", "401 header tag", partial(_flip, "records")),
    Case("flipped bit of the filler", "401 header tag", partial(_flip, "filler")),
    Case("flipped bit of the header tag", "401 header tag", partial(_flip, "header tag")),
    Case("flipped bit of the payload", "1001 writer[0].tag", partial(_flip, "payload")),
    Case("byte in the filler", "904 filler", partial(_part, "filler", 0, b"\1")),
    Case("last byte of the filler", "904 filler", partial(_part, "records", -1, b"\1")),
    Case("byte in the tail", "904 tail", partial(_part, "tail", 0, b"\1")),
    Case("last byte of the row", "904 tail", partial(_part, "tail", _ROOM - 161, b"\1")),
    Case("coverage past the slots", "904 coverage", partial(_part, "coverage", 0, b"\x3f")),
    Case("wanted and not covered", "903 slot[1]", partial(_wants, (0, 2), (0, 1, 2))),
    Case("wanted and covered", "opened", partial(_wants, (0, 2), (0, 2))),
    Case("nothing covered", "903 slot[0]", partial(_wants, (), (0,))),
    Case("wanted past the slots", "903 slot[5]", partial(_wants, (0, 1, 2, 3, 4), (4, 5))),
    Case("wanted before the slots", "903 slot[-1]", partial(_wants, (0, 1, 2, 3, 4), (-1,))),
    Case("wanted far away", f"903 slot[{2**40}]", partial(_wants, (0,), (2**40,))),
]


def _document(name: str, document: bytes, world: World) -> bytearray:
    return world.with_document(world.chunk(), name, document)


_DAMAGED = {
    "no CBOR": b"\xff\xff",
    "a list": b"\x80",
    "a number": b"\x00",
    "a tag": b"\xc0\xa0",
    "a self-described map": b"\xd9\xd9\xf7\xa0",
    "indefinite": b"\xbf\xff",
    "a key twice": b"\xa2\x61a\x00\x61a\x00",
    "a key that is a number": b"\xa1\x00\x00",
    "keys out of order": b"\xa2\x61b\x00\x61a\x00",
    "a longer form of a length": b"\xa1\x78\x01a\x00",
    "a longer form of a number": b"\xa1\x61a\x18\x00",
    "a longer form of a float": b"\xa1\x61a\xfb" + bytes(8),
    "a payload in a NaN": b"\xa1\x61a\xf9\x7e\x01",
    "a bignum": b"\xa1\x61a\xc2\x49\x01" + bytes(8),
    "undefined": b"\xa1\x61a\xf7",
    "text that is no UTF-8": b"\xa1\x61\xff\x00",
    "huge list": b"\xa1\x61a\x9b" + b"\x7f" + b"\xff" * 7,
    "huge map": b"\xbb" + b"\x7f" + b"\xff" * 7,
    "huge text": b"\xa1\x61a\x7a\xff\xff\xff\xff",
    "nested": b"\xa1\x61a" + b"\x81" * 500 + b"\x00",
    "more behind it": b"\xa0\x00",
}
_OTHERS = {
    "model": identity(model="another"),
    "weights": identity(weights=b"\x01" + bytes(31)),
    "groups[1]": identity(groups=["a", 2]),
    "rope.a": identity(rope={"a": 2, "b": {"c": 2.5}}),
    "mla": identity(mla=1),
    "later_field": identity(later_field=1),
}
_FEWER = cbor.encode({name: value for name, value in sample().items() if name != "model"})

DOCUMENTS = [
    *(
        Case(f"identity: {name}", "702 identity", partial(_document, "identity", document))
        for name, document in _DAMAGED.items()
    ),
    *(
        Case(f"geometry: {name}", "802 geometry", partial(_document, "geometry", document))
        for name, document in _DAMAGED.items()
    ),
    *(
        Case(f"identity with another {name}", f"701 {name}", partial(_document, "identity", text))
        for name, text in _OTHERS.items()
    ),
    Case("identity without model", "701 model", partial(_document, "identity", _FEWER)),
    Case("identity under our digest", "702 identity", partial(_part, "identity", 9, b"Z")),
    Case("geometry under our digest", "802 geometry", partial(_part, "geometry", 9, b"Z")),
    Case("geometry: a map", "801 geometry.workers", partial(_document, "geometry", b"\xa0")),
    Case(
        "geometry of another rank",
        "801 geometry.workers[0][0][1]",
        partial(_document, "geometry", GEOMETRY.replace(b"\x00\x01", b"\x00\x02", 1)),
    ),
]


def _foreign_row(sealer: Callable[[], World], world: World) -> bytearray:
    return sealer().chunk()


def _dressed_up(world: World) -> bytearray:
    """An unkeyed chunk that calls itself keyed, tagged with everything that is public."""
    row = World(Suite.BLAKE3).chunk()
    put(row, "suite", 1)
    return World(Suite.BLAKE3).retag(row)


def _other_key_id(world: World) -> bytearray:
    """Tagged by the old key under the id of the new one."""
    row = World(secrets=(OLD_SECRET,)).chunk()
    put(row, "key_id", world.keyring.active.key_id)
    return world.retag(row, OLD_SECRET)


KEYS = [
    Case("unkeyed chunk", "202 suite", partial(_foreign_row, partial(World, Suite.BLAKE3))),
    Case("unkeyed chunk in keyed dress", "204 key_id", _dressed_up),
    Case("chunk of suite 2", "202 suite", partial(_foreign_row, partial(World, Suite.HMAC_SHA256))),
    Case(
        "keyed chunk, unkeyed reader",
        "202 suite",
        partial(_foreign_row, World),
        world=partial(World, Suite.BLAKE3),
    ),
    Case("older key in the ring", "opened", partial(_foreign_row, OLD), world=ROTATED),
    Case("retired key", "204 key_id", partial(_foreign_row, OLD)),
    Case("retired key under the id of the new one", "401 header tag", _other_key_id),
]


def _bodies_exchanged(world: World) -> bytearray:
    row = world.chunk()
    at, length = world.part("payload")
    row[at : at + length] = world.payload(2)
    return row


def _twin_slices_exchanged(world: World) -> bytearray:
    row = world.chunk()
    at, _ = world.part("payload")
    row[at : at + 64], row[at + 64 : at + 128] = row[at + 64 : at + 128], row[at : at + 64]
    return row


def _slice_of_rank_0_as_rank_1(world: World) -> bytearray:
    row = world.chunk()
    at, _ = world.part("payload")
    record, _ = world.part("records")
    row[at + 64 : at + 128] = row[at : at + 64]
    return world.forge_record(row, 1, tag=bytes(row[record + 32 : record + 64]))


def _header_of_another_model(world: World) -> bytearray:
    row = World(document=identity(model="another")).chunk()
    at, length = world.part("payload")
    row[at : at + length] = world.payload()
    return row


def _given_our_key(world: World) -> bytearray:
    return world.forge_part(world.chunk(OTHER_KEY), "key", KEY)


def _given_our_generation(world: World) -> bytearray:
    row = world.chunk(generation=GENERATION - 1)
    put(row, "generation", GENERATION)
    for index in range(len(world.slices)):
        world.forge_record(row, index, generation=GENERATION)
    return row


def _given_our_identity(world: World) -> bytearray:
    other = World(document=identity(model="wrong"))
    return world.with_document(other.chunk(), "identity", world.document)


SWAPS = [
    Case("chunk of another key", "501 key", lambda world: world.chunk(OTHER_KEY)),
    Case("our chunk asked for by another key", "501 key", lambda w: Ask(w.chunk(), OTHER_KEY)),
    Case("our chunk asked for by a prefix", "501 key", lambda w: Ask(w.chunk(), KEY[:-1])),
    Case("our chunk asked for by no key", "501 key", lambda w: Ask(w.chunk(), b"")),
    Case("body of another chunk", "1001 writer[0].tag", _bodies_exchanged),
    Case("slices exchanged", "1001 writer[0].tag", _twin_slices_exchanged, world=TWINS),
    Case("slice of another rank", "1001 writer[1].tag", _slice_of_rank_0_as_rank_1, world=TWINS),
    Case("chunk from before a reset", "601 epoch", lambda w: Ask(w.chunk(), epoch=EPOCH + 1)),
    Case("chunk from after our epoch", "602 epoch", lambda w: Ask(w.chunk(), epoch=EPOCH - 1)),
    Case("header of another model", "701 model", _header_of_another_model),
    Case("another key's slices under our key", "1001 writer[0].tag", _given_our_key),
    Case(
        "an old epoch's slices under ours",
        "1001 writer[0].tag",
        lambda world: world.forge(world.chunk(epoch=EPOCH - 1), epoch=EPOCH),
    ),
    Case("an old generation's slices under ours", "1001 writer[0].tag", _given_our_generation),
    Case("another model's slices under ours", "1001 writer[0].tag", _given_our_identity),
    Case("last slice is another's", "1001 writer[1].tag", partial(_part, "payload", 96, b"ZZZZ")),
    Case("last byte of the payload", "1001 writer[1].tag", partial(_part, "payload", 159, b"Z")),
]

CASES = [
    *TERMS,
    *LENGTHS,
    *ROW_LENGTHS,
    *RECORDS,
    *PARTS,
    *DOCUMENTS,
    *KEYS,
    *SWAPS,
]
BY_NAME = {case.name: case for case in CASES}

__all__ = ["BY_NAME", "CASES", "Ask", "Case", "answer_of", "as_bytes", "check"]

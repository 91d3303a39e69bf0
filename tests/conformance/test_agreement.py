# SPDX-License-Identifier: Apache-2.0
"""Two readers, one page: they accept the same rows and refuse at the same step, by number."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.reader import suites
from conformance.reader.chunk_reader import PAGE, Expected
from kvsafe.seal.cbor import encode
from kvsafe.seal.header import bitmap
from tests.conformance import worlds
from tests.conformance.rows import Draft, retag_header
from tests.conformance.worlds import IDENTITY, KEY, OLDER, SECRET, SUITES, ask, draft

SHAPES = {
    "one writer": ((300,), 1),
    "three writers": ((300, 300, 70), 2),
    "slots": ((640,), 11),
    "whole pages": ((4096, 4096), 8),
}
OTHER_KEY = KEY[:-1] + b"\x02"
WIDE = (0, 1, 2, 3, 7, 8, 9, 255, 4095, 4096, 8192, 65536, 65537, 2**20, 2**20 + 4096, 2**31)
NUMBERS = [
    "writers",
    "epoch",
    "generation",
    "payload_bytes",
    "identity_bytes",
    "geometry_bytes",
    "slots",
    "key_bytes",
]

examples = settings(max_examples=120, deadline=None)
any_suite = st.sampled_from(SUITES)
any_shape = st.sampled_from(list(SHAPES.values()))


def agreed(row: bytes, expected: Expected) -> int:
    """The number that both readers give, 0 for accepted."""
    both = ask(row, expected)
    assert both.reader == both.kvsafe
    return both.reader


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("suite", SUITES)
def test_a_row_of_kvsafe_is_the_row_of_the_page(suite: str, shape: str) -> None:
    made = draft(suite, *SHAPES[shape])
    row = worlds.seal_with_kvsafe(made)
    assert agreed(row, made.expected(range(made.slots))) == 0
    (sealed_at,) = struct.unpack_from("<Q", row, 40)
    assert made.but(sealed_at=sealed_at).row() == row
    assert agreed(made.row(), made.expected()) == 0


@pytest.mark.parametrize("suite", SUITES)
def test_a_slot_that_was_not_written_is_not_offered(suite: str) -> None:
    made = draft(suite, (900,), slots=9).but(coverage=bitmap(9, [0, 3, 8]))
    row = worlds.seal_with_kvsafe(made)
    for slot in range(9):
        assert agreed(row, made.expected([slot])) == (0 if slot in (0, 3, 8) else 903)
    assert agreed(row, made.expected([8, 0, 0])) == 0
    assert agreed(row, made.expected([0, 9])) == 903


@pytest.mark.parametrize("suite", SUITES[:3])
def test_after_a_rotation_old_rows_open_while_their_key_is_in_the_ring(suite: str) -> None:
    made = draft(suite)
    row = worlds.seal_with_kvsafe(made)
    for secrets, number in (((SECRET,), 0), ((OLDER, SECRET), 0), ((OLDER,), 204)):
        assert agreed(row, replace(made.expected(), secrets=secrets)) == number
    # The id of a key that is in the ring does not make the tags of another key right.
    named = row[:16] + suites.key_id(OLDER) + row[24:]
    assert agreed(named, replace(made.expected(), secrets=(OLDER, SECRET))) == 401


@pytest.mark.parametrize("reads", SUITES)
@pytest.mark.parametrize("writes", SUITES)
def test_a_reader_of_one_suite_refuses_the_others(writes: str, reads: str) -> None:
    row = worlds.seal_with_kvsafe(draft(writes))
    assert agreed(row, draft(reads).expected()) == (0 if writes == reads else 202)
    renumbered = row[:10] + struct.pack("<H", suites.NUMBERS[reads]) + row[12:]
    if writes != reads:
        assert agreed(renumbered, draft(reads).expected()) in (204, 401)


@examples
@given(any_suite, any_shape, st.data())
def test_no_bit_can_be_flipped(suite: str, shape: Any, data: st.DataObject) -> None:
    made = draft(suite, *shape)
    row = bytearray(made.row())
    head = st.integers(0, 8 * made.header_bytes - 1)
    bit = data.draw(st.one_of(head, head.map(lambda n: n % 1152), st.integers(0, 8 * len(row) - 1)))
    row[bit // 8] ^= 1 << bit % 8
    number = agreed(bytes(row), made.expected())
    payload = bit // 8 - made.header_bytes
    if payload >= 0:
        assert number == (1001 if payload < sum(map(len, made.slices)) else 904)
    else:
        assert 0 < number < 500


@examples
@given(any_suite, any_shape, st.data())
def test_no_range_can_be_overwritten(suite: str, shape: Any, data: st.DataObject) -> None:
    made = draft(suite, *shape)
    row = made.row()
    start = data.draw(st.integers(0, len(row) - 1))
    fresh = data.draw(st.one_of(st.binary(min_size=1, max_size=200), st.just(bytes(64))))
    changed = (row[:start] + fresh + row[start + len(fresh) :])[: len(row)]
    assert (agreed(changed, made.expected()) == 0) == (changed == row)


@examples
@given(any_suite, any_shape, st.data())
def test_no_other_length(suite: str, shape: Any, data: st.DataObject) -> None:
    made = draft(suite, *shape)
    row = made.row()
    near = st.sampled_from([0, 7, 8, 143, 144, 145, PAGE - 1, PAGE, PAGE + 1, len(row) - PAGE])
    cut = data.draw(st.one_of(near, st.integers(0, len(row) - 1)))
    assert agreed(row[:cut], made.expected()) in (101, 301, 303, 801)
    more = data.draw(st.sampled_from([b"\0", b"x", bytes(PAGE), b"x" * PAGE]))
    assert agreed(row + more, made.expected()) == 801


@pytest.mark.parametrize("suite", SUITES)
def test_a_row_in_the_place_of_another(suite: str) -> None:
    made = draft(suite, (300, 300))
    row = worlds.seal_with_kvsafe(made)
    mine = made.expected()
    assert agreed(row, mine) == 0
    assert agreed(row, replace(mine, key=OTHER_KEY)) == 501
    assert agreed(row, replace(mine, key=KEY[:-1])) == 501
    assert agreed(row, replace(mine, epoch=4)) == 601
    assert agreed(row, replace(mine, epoch=2)) == 602
    assert agreed(row, made.but(identity=encode({**IDENTITY, "layers": 29})).expected()) == 701
    assert agreed(row, made.but(geometry=encode({"workers": []})).expected()) == 801


@pytest.mark.parametrize("suite", SUITES)
def test_slices_do_not_change_places(suite: str) -> None:
    made = draft(suite, (300, 300))
    row, at, end = made.row(), made.header_bytes, made.header_bytes - 32
    payload = row[at + 300 : at + 600] + row[at : at + 300] + row[at + 600 :]
    assert agreed(row[:at] + payload, made.expected()) == 1001
    records = row[end - 64 : end] + row[end - 128 : end - 64]
    moved = row[: end - 128] + records + row[end:at] + payload
    assert agreed(moved, made.expected()) == 401
    assert agreed(retag_header(moved, suite, SECRET, at), made.expected()) == 901
    renamed = {0: {"tag": made.record(1, bytes(32))[32:]}, 1: {"tag": bytes(32)}}
    assert agreed(made.but(records=renamed).row(), made.expected()) == 1001


CHANGES: dict[str, Callable[[Draft], Draft]] = {
    "content": lambda made: made.but(slices=tuple(part[::-1] for part in made.slices)),
    "key": lambda made: made.but(key=OTHER_KEY),
    "epoch": lambda made: made.but(epoch=4),
    "generation": lambda made: made.but(generation=8),
    "identity": lambda made: made.but(identity=encode({**IDENTITY, "layers": 29})),
    "secret": lambda made: made.but(secret=OLDER),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("suite", SUITES)
def test_a_header_does_not_take_another_payload(suite: str, change: str) -> None:
    made = draft(suite, (300, 300))
    other = CHANGES[change](made)
    at, row, theirs = made.header_bytes, made.row(), other.row()
    assert agreed(theirs, other.expected()) == 0
    spliced = row[:at] + theirs[at:]
    # Two chunks with the same content differ in their headers only.
    assert agreed(spliced, made.expected()) == (1001 if change == "content" else 0)
    # The other row's records under this header, closed again with the right key.
    end, start = at - 32, at - 32 - 128
    mixed = retag_header(row[:start] + theirs[start:end] + row[end:], suite, SECRET, at)
    number = 902 if change == "generation" else 1001
    if (suite, change) == ("blake3", "secret"):
        number = 0  # suite 3 has no secret: it is the same row
    assert agreed(mixed, made.expected()) == number


def field(**values: int | bytes) -> Callable[[Draft], Draft]:
    """A draft whose fixed part says something else."""
    return lambda made: made.but(fixed={**made.fixed, **values})


def record(**values: int) -> Callable[[Draft], Draft]:
    """A draft whose second writer record says something else."""
    return lambda made: made.but(records={**made.records, 1: values})


CASES: dict[str, tuple[int, Callable[[Draft], Draft]]] = {
    "nothing": (0, lambda made: made),
    "magic": (102, field(magic=b"\x89kvsafe\r")),
    "version": (201, field(version=2)),
    "suite": (202, field(suite=5)),
    "flags": (203, field(flags=1 << 31)),
    "reserved": (203, field(reserved=1)),
    "key id": (204, field(key_id=b"12345678")),
    "header of no page": (301, field(header_bytes=0)),
    "header of half a page": (301, field(header_bytes=4096 + 2048)),
    "header longer than the row": (301, field(header_bytes=3 * 4096)),
    "no identity": (302, field(identity_bytes=0)),
    "no geometry": (302, field(geometry_bytes=0)),
    "no slots": (302, field(slots=0)),
    "too many slots": (302, field(slots=4097)),
    "no key": (302, field(key_bytes=0)),
    "long key": (302, field(key_bytes=129)),
    "documents over the records": (302, field(geometry_bytes=4000)),
    "no payload": (303, field(payload_bytes=0)),
    "payload longer than the row": (303, field(payload_bytes=4097)),
    "payload of 2^64 - 1": (303, field(payload_bytes=2**64 - 1)),
    "shorter key": (501, field(key_bytes=35)),
    "other key": (501, lambda made: made.but(key=OTHER_KEY)),
    "older epoch": (601, lambda made: made.but(epoch=2)),
    "later epoch": (602, lambda made: made.but(epoch=4)),
    "longest epoch": (602, lambda made: made.but(epoch=2**64 - 1)),
    "other identity": (701, lambda made: made.but(identity=encode({"engine": "x"}))),
    "identity is no map": (702, lambda made: made.but(identity=encode(["x"]))),
    "identity is no CBOR": (702, lambda made: made.but(identity=b"\xff" * 40)),
    "identity of two forms": (702, lambda made: made.but(identity=b"\xa1\x61a\x18\x01")),
    "identity with other digest": (702, field(identity_digest=bytes(32))),
    "longer header": (801, lambda made: made.but(header_bytes=8192)),
    "shorter payload": (801, field(payload_bytes=599)),
    "fewer slots": (801, field(slots=2)),
    "longer row": (801, lambda made: made.but(tail=bytes(8192))),
    "other geometry": (801, lambda made: made.but(geometry=encode({"workers": []}))),
    "geometry is no CBOR": (802, lambda made: made.but(geometry=b"\xff" * 40)),
    "geometry with other digest": (802, field(geometry_digest=bytes(32))),
    "other rank": (901, record(rank=0)),
    "reserved of a record": (901, record(reserved=1)),
    "other offset": (901, record(offset=299)),
    "other length": (901, record(length=299)),
    "record of another generation": (902, record(generation=8)),
    "header of another generation": (902, field(generation=8)),
    "bit past the slots": (904, lambda made: made.but(coverage=b"\x0f")),
    "uncovered slot": (903, lambda made: made.but(coverage=b"\x06")),
    "filler": (904, lambda made: made.but(filler=b"\0\0\x01")),
    "tail": (904, lambda made: made.but(tail=b"\0\x01")),
    "slice tag": (1001, lambda made: made.but(records={**made.records, 0: {"tag": b"x" * 32}})),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("suite", SUITES)
def test_each_rule_of_the_page(suite: str, case: str) -> None:
    number, change = CASES[case]
    made = draft(suite, (300, 300), slots=3)
    assert agreed(change(made).row(), made.expected([0])) == number


ONE_OF_EACH_STEP = (
    "magic",
    "key id",
    "no payload",
    "other key",
    "later epoch",
    "other identity",
    "other geometry",
    "other rank",
    "uncovered slot",
    "tail",
    "slice tag",
)


@pytest.mark.parametrize(("first", "second"), [*combinations(ONE_OF_EACH_STEP, 2)])
def test_the_first_step_that_fails_decides(first: str, second: str) -> None:
    made = draft("blake3-keyed", (300, 300), slots=3)
    row = CASES[first][1](CASES[second][1](made)).row()
    step = min(CASES[first][0], CASES[second][0]) // 100
    assert agreed(row, made.expected([0])) // 100 == step
    end = made.header_bytes
    untagged = row[: end - 1] + bytes([row[end - 1] ^ 1]) + row[end:]
    assert agreed(untagged, made.expected([0])) // 100 == min(step, 4)


@examples
@given(
    any_suite,
    st.dictionaries(
        st.sampled_from(
            [
                "epoch",
                "generation",
                "payload_bytes",
                "identity_bytes",
                "geometry_bytes",
                "slots",
                "key_bytes",
            ]
        ),
        st.one_of(st.sampled_from(WIDE), st.integers(0, 400)),
        max_size=3,
    ),
    st.dictionaries(
        st.sampled_from(["rank", "reserved", "offset", "length", "generation"]),
        st.one_of(st.sampled_from(WIDE), st.integers(0, 400)),
        max_size=2,
    ),
)
def test_fields_under_a_right_tag(
    suite: str, fixed: dict[str, int], written: dict[str, int]
) -> None:
    made = draft(suite, (300, 300), slots=3)
    limits = {"slots": 2**32, "key_bytes": 2**16}
    fixed = {name: value % limits.get(name, 2**32) for name, value in fixed.items()}
    changed = made.but(fixed=fixed, records={1: written})
    row = changed.row()
    assert (agreed(row, made.expected([0])) == 0) == (row == made.row())


@examples
@given(any_suite, st.data())
def test_bytes_under_a_right_tag(suite: str, data: st.DataObject) -> None:
    made = draft(suite, (300, 300), slots=3)
    row = made.row()
    start = data.draw(st.one_of(st.integers(0, 400), st.integers(PAGE - 200, PAGE - 1)))
    fresh = data.draw(st.binary(min_size=1, max_size=8))
    changed = (row[:start] + fresh + row[start + len(fresh) :])[: len(row)]
    closed = retag_header(changed, suite, SECRET, made.header_bytes)
    number = agreed(closed, made.expected([0]))
    outside = closed[:40] + row[40:48] + closed[48:]
    same = retag_header(outside, suite, SECRET, made.header_bytes) == row
    assert (number == 0) == same


@pytest.mark.parametrize("number", [0, 1025, 2**32 - 1])
def test_an_impossible_number_of_writers(number: int) -> None:
    made = draft("blake3-keyed", (300, 300))
    assert agreed(made.but(fixed={"writers": number}).row(), made.expected()) == 304


@pytest.mark.parametrize("lengths", [(600,), (200, 200, 200)])
def test_the_number_of_writers(lengths: tuple[int, ...]) -> None:
    made = draft("blake3-keyed", (300, 300))
    other = draft("blake3-keyed", lengths)
    assert agreed(other.row(), replace(made.expected(), key=OTHER_KEY)) == 501
    assert agreed(other.row(), made.expected()) == 901

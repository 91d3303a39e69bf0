# SPDX-License-Identifier: Apache-2.0
"""Any bytes: the opener answers with a value, and opens a row only if it is the very one.

The strongest property here needs no list of faults: whatever an editor with the header key does
to a row, it opens only if nothing but `sealed_at` (which decides nothing) has changed.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvsafe.seal.header import Header
from kvsafe.seal.opening import read_claims, read_outer
from kvsafe.seal.refusal import Refusal
from kvsafe.seal.suites import Suite
from tests.seal.rows import EPOCH, FIELDS, KEY, RECORD_FIELDS, World, kind_of, put

WORLDS = {suite: World(suite) for suite in Suite}
ROWS = {suite: bytes(world.chunk()) for suite, world in WORLDS.items()}
SEALED_AT = range(40, 48)

suites = st.sampled_from(Suite)
sizes = st.sampled_from([0, 1, 2, 127, 128, 129, 4095, 4096, 4097, 8191, 8192, 65535, 65536, 65537])
big = st.sampled_from([2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])


def _numbers(length: int) -> st.SearchStrategy[int]:
    top = 2 ** (8 * length) - 1
    return st.one_of(sizes, big, st.integers(0, top)).map(lambda value: min(value, top))


def _field_edits() -> st.SearchStrategy[tuple[int, bytes]]:
    places = [(offset, length) for offset, length in FIELDS.values()]
    records = WORLDS[Suite.BLAKE3_KEYED].part("records")[0]
    for index in range(2):
        places += [
            (records + 64 * index + offset, length) for offset, length in RECORD_FIELDS.values()
        ]
    return st.sampled_from(places).flatmap(
        lambda place: _numbers(place[1]).map(lambda value: (place[0], _le(value, place[1])))
    )


def _le(value: int, length: int) -> bytes:
    return value.to_bytes(length, "little")


spans = st.tuples(st.integers(0, 8191), st.binary(min_size=1, max_size=40))
edits = st.lists(st.one_of(_field_edits(), spans), min_size=1, max_size=4)
cuts = st.one_of(st.none(), st.integers(0, 20000), sizes)


def _edited(row: bytes, changes: list[tuple[int, bytes]], cut: int | None) -> bytearray:
    out = bytearray(row)
    for at, data in changes:
        out[at : at + len(data)] = data
    del out[len(row) :]
    return out if cut is None else out[:cut].ljust(cut, b"\0")


def _same(left: bytes | bytearray, right: bytes | bytearray) -> bool:
    """Equal but for `sealed_at` and the header tag, which follows from it."""
    a, b = bytearray(left), bytearray(right)
    for row in (a, b):
        row[40:48] = bytes(8)
        row[4096 - 32 : 4096] = bytes(32)
    return a == b


@settings(max_examples=400, deadline=None)
@given(suites, edits, cuts)
def test_without_the_key_only_the_very_row_opens(
    suite: Suite, changes: list[tuple[int, bytes]], cut: int | None
) -> None:
    row = _edited(ROWS[suite], changes, cut)
    opened = isinstance(WORLDS[suite].open(row), Header)
    assert opened is (row == ROWS[suite])


@settings(max_examples=800, deadline=None)
@given(suites, edits, cuts)
@example(Suite.BLAKE3_KEYED, [(40, b"\xff" * 8)], None)
def test_with_right_header_tags_only_the_same_chunk_opens(
    suite: Suite, changes: list[tuple[int, bytes]], cut: int | None
) -> None:
    world = WORLDS[suite]
    row = world.retag(_edited(ROWS[suite], changes, cut))
    opened = isinstance(world.open(row), Header)
    assert opened is _same(row, ROWS[suite])


@settings(max_examples=300, deadline=None)
@given(suites, st.binary(max_size=9000), st.booleans(), st.binary(max_size=40))
def test_random_bytes_are_refused_with_a_value(
    suite: Suite, data: bytes, dressed: bool, key: bytes
) -> None:
    world, row = WORLDS[suite], bytearray(data)
    if dressed and len(row) >= 144:
        put(row, "magic", b"\x89kvsafe\n")
        put(row, "version", 1)
        put(row, "suite", suite.value)
        put(row, "flags", 0)
        put(row, "reserved", 0)
        put(row, "key_id", world.keyring.active.key_id)
        world.retag(row)
    view = memoryview(row)
    assert isinstance(world.opener.open(view, key, EPOCH, range(3)), Refusal)
    assert isinstance(world.opener.open_header(view, key, EPOCH), Refusal)
    outer = read_outer(view, suite, world.keyring)
    assert isinstance(outer, Refusal) or dressed


@settings(max_examples=400, deadline=None)
@given(suites, edits, cuts, st.integers(144, 4096))
@example(Suite.BLAKE3, [], None, 144)
def test_without_a_ring_steps_1_to_3_say_the_same(
    suite: Suite, changes: list[tuple[int, bytes]], cut: int | None, shown: int
) -> None:
    """Also where only the beginning of a row is at hand: a tool looks before it reads on."""
    world = WORLDS[suite]
    row = world.retag(_edited(ROWS[suite], changes, cut))
    view = memoryview(row)
    claims = read_claims(view[:shown], len(row))
    outer = read_outer(view, suite, world.keyring)
    if isinstance(claims, Refusal):
        assert isinstance(outer, Refusal)
        # The ring's own "no" comes before the lengths; another known suite is none for a tool.
        assert outer.number in (claims.number, 202, 204)
        assert claims.step <= 3 and outer.step <= claims.step
        return
    if isinstance(outer, Refusal):
        assert outer.number in (202, 204, 401)
    else:
        assert outer[:2] == claims


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=1, max_size=1500), st.sampled_from(["identity", "geometry"]))
def test_any_document_under_a_right_tag_is_refused(document: bytes, name: str) -> None:
    world = WORLDS[Suite.BLAKE3_KEYED]
    row = world.with_document(bytearray(ROWS[world.suite]), name, document)
    number = kind_of(world.open(row)).split()[0]
    assert number in (("701", "702") if name == "identity" else ("801", "802"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-(2**70), 2**70), max_size=6))
def test_any_wanted_slots_get_an_answer(wanted: list[int]) -> None:
    world = WORLDS[Suite.BLAKE3_KEYED]
    opened = kind_of(world.open(ROWS[world.suite], wanted=wanted)) == "opened"
    assert opened is all(0 <= slot < world.slots for slot in wanted)


# --- every single bit ----------------------------------------------------------------------------

_EXPECTED = {
    "magic": {"102"},
    "version": {"201"},
    "suite": {"202"},
    "flags": {"203"},
    "reserved": {"203"},
    "key_id": {"204"},
    "payload_bytes": {"303", "401"},
    "header_bytes": {"301", "303"},
    "identity_bytes": {"302", "401"},
    "geometry_bytes": {"302", "401"},
    "writers": {"302", "304", "401"},
    "slots": {"302", "401"},
    "key_bytes": {"302", "401"},
}


def _numbers_of_flips(world: World, row: bytearray, places: range) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    view = memoryview(row)
    for at in places:
        for bit in range(8):
            row[at] ^= 1 << bit
            answer = world.opener.open(view, KEY, EPOCH)
            row[at] ^= 1 << bit
            found.setdefault(at, set()).add(kind_of(answer).split()[0])
    return found


def test_every_bit_of_a_header_counts() -> None:
    world = WORLDS[Suite.BLAKE3_KEYED]
    row = bytearray(ROWS[world.suite])
    found = _numbers_of_flips(world, row, range(4096))
    for name, (offset, length) in FIELDS.items():
        expected = _EXPECTED.get(name, {"401"})
        numbers = set().union(*(found.pop(at) for at in range(offset, offset + length)))
        assert numbers <= expected, name
    assert set().union(*found.values()) == {"401"}
    assert kind_of(world.open(row)) == "opened"


def test_every_bit_of_payload_and_tail_counts() -> None:
    world = WORLDS[Suite.BLAKE3_KEYED]
    row = bytearray(ROWS[world.suite])
    found = _numbers_of_flips(world, row, range(4096, 4096 + 160))
    assert set().union(*found.values()) == {"1001"}
    tail = _numbers_of_flips(world, row, range(4096 + 160, 8192))
    assert set().union(*tail.values()) == {"904"}
    assert kind_of(world.open(row)) == "opened"


@pytest.mark.parametrize("suite", [Suite.HMAC_SHA256, Suite.BLAKE3], ids=lambda suite: suite.label)
def test_every_byte_counts_in_the_other_suites(suite: Suite) -> None:
    world = WORLDS[suite]
    row = bytearray(ROWS[suite])
    view = memoryview(row)
    for at in range(len(row)):
        row[at] ^= 0x10
        assert isinstance(world.opener.open(view, KEY, EPOCH), Refusal), at
        row[at] ^= 0x10
    assert kind_of(world.open(row)) == "opened"

# SPDX-License-Identifier: Apache-2.0
"""Rows opened in C: yes only for what `Opener.open` takes, and for all that is plainly sealed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvsafe.seal import batch
from kvsafe.seal.batch import (
    BatchOpener,
    batch_opener,
    native,
)
from kvsafe.seal.header import Header
from kvsafe.seal.layout import MAX_KEY_BYTES
from kvsafe.seal.suites import Suite
from tests.seal.batch_rows import (
    EXPECTED,
    GMAC,
    ROWS,
    SHAPES,
    answers,
    expectation,
    forge_slice,
    made,
    other_generation,
    plainly_sealed,
    quick,
    retag_slices,
    says,
    world_of,
    worlds_of,
)
from tests.seal.cases import CASES, Ask, Case
from tests.seal.rows import (
    EPOCH,
    FIELDS,
    GENERATION,
    KEY,
    OLD_SECRET,
    OTHER_KEY,
    RECORD_FIELDS,
    SECRET,
    World,
    kind_of,
)

pytestmark = pytest.mark.skipif(
    native() is None, reason="batch.c was not built: no C compiler, or no OpenSSL 3"
)
SEALED_AT = range(40, 48)


# --- named rows ----------------------------------------------------------------------------------

OTHER_ANSWERS = {"suite = 4": "opened", "unkeyed chunk in keyed dress": "202 suite"}
"""Cases of `cases.py` that mean another thing where suite 4 is our own."""
OPENED_ONE_BY_ONE = {
    "older key in the ring": "the key is not the active one",
    "wanted and covered": "not all slots are covered",
}
WANTED_PAST_ALL = {"wanted past the slots", "wanted before the slots"}
"""Right rows of all slots: a batch opener is not told which slots are wanted."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_case_is_taken_that_is_refused(case: Case) -> None:
    with worlds_of(GMAC):
        world = case.world()
        asked = case.make(world)
        ask = asked if isinstance(asked, Ask) else Ask(asked)
        answer = world.open(ask.row, ask.key, ask.epoch, ask.wanted)
        assert kind_of(answer) == OTHER_ANSWERS.get(case.name, case.answer)
        opener = batch_opener(expectation(world), len(KEY))
        if opener is None:
            assert world.suite is Suite.BLAKE3
            return
        assert says(opener, world.chunk())
        right = isinstance(answer, Header) and case.name not in OPENED_ONE_BY_ONE
        right |= case.name in WANTED_PAST_ALL
        assert says(opener, ask.row, ask.key, ask.epoch) is right
        assert plainly_sealed(world.open(ask.row, ask.key, ask.epoch), world) is right


def test_the_exceptions_are_cases() -> None:
    names = {case.name for case in CASES}
    assert names >= {*OTHER_ANSWERS, *OPENED_ONE_BY_ONE, *WANTED_PAST_ALL}


def test_the_compact_list_says_what_it_should() -> None:
    found = native()
    assert found is not None
    assert answers(found) == EXPECTED
    assert sum(EXPECTED.values()) >= 12 and len(EXPECTED) >= 60


@pytest.mark.parametrize("name", ROWS)
def test_each_row_gets_its_answer(name: str) -> None:
    row = ROWS[name]
    world = world_of(row.shape)
    assert says(quick(world), made(name), row.key, row.epoch) is row.right
    answer = world.open(made(name), row.key, row.epoch)
    assert plainly_sealed(answer, world) is row.right


def test_opened_rows_that_are_left_to_the_opener_have_an_older_key_or_part_coverage() -> None:
    opened = {
        name
        for name, row in ROWS.items()
        if not row.right
        and isinstance(world_of(row.shape).open(made(name), row.key, row.epoch), Header)
    }
    assert opened == {"older key", "part coverage", "last byte of coverage"}


@pytest.mark.parametrize("key_bytes", [1, 2, 35, 64, MAX_KEY_BYTES])
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_rows_of_every_shape_and_key_are_taken(shape: str, key_bytes: int) -> None:
    world = world_of(shape)
    opener = quick(world, key_bytes)
    for key in (bytes(key_bytes), b"\xff" * key_bytes, b"\0a" * 64):
        own = key[:key_bytes]
        row = world.chunk(own)
        assert isinstance(world.open(row, own), Header)
        assert says(opener, row, own)
        row[-1 if shape != "no tail" else 5000] ^= 1
        assert not says(opener, row, own)


# --- every bit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["two writers", "no tail"])
def test_every_bit_of_a_row_counts(shape: str) -> None:
    world = world_of(shape)
    opener, row = quick(world), world.chunk()
    view = memoryview(row)
    taken = set()
    for at in range(len(row)):
        for bit in range(8):
            row[at] ^= 1 << bit
            if opener.right([view], [KEY], EPOCH) != [False]:
                taken.add(at)
            row[at] ^= 1 << bit
    assert taken == set()
    assert opener.right([view], [KEY], EPOCH) == [True]


def test_under_right_header_tags_every_bit_counts_but_those_of_the_time() -> None:
    world = world_of("two writers")
    opener, row = quick(world), world.chunk()
    view = memoryview(row)
    start, _ = world.part("header tag")
    taken = []
    for at in range(start):
        for bit in range(8):
            row[at] ^= 1 << bit
            world.retag(row)
            if opener.right([view], [KEY], EPOCH) != [False]:
                taken.append((at, bit))
            row[at] ^= 1 << bit
            # A forged length of the header moves its tag.
            world.retag(row)
            if at in range(56, 60):
                row[:] = world.chunk()
    assert taken == [(at, bit) for at in SEALED_AT for bit in range(8)]
    assert opener.right([view], [KEY], EPOCH) == [True]


# --- forged fields and slices --------------------------------------------------------------------


def _values(length: int) -> list[bytes]:
    numbers = [0, 1, 2**31, 2 ** (8 * length) - 1]
    return [value.to_bytes(length, "little") for value in numbers if value < 256**length]


@pytest.mark.parametrize("name", FIELDS)
def test_a_forged_field_is_noticed_but_for_the_time(name: str) -> None:
    world = world_of("two writers")
    offset, length = FIELDS[name]
    for value in _values(length):
        row = world.chunk()
        same = row[offset : offset + length] == value
        world.forge(row, **{name: value})
        assert says(quick(world), row) is (same or name == "sealed_at")
        assert says(quick(world), row) is isinstance(world.open(row), Header)


@pytest.mark.parametrize("name", RECORD_FIELDS)
@pytest.mark.parametrize("index", [0, 1])
def test_a_forged_field_of_a_record_is_noticed(name: str, index: int) -> None:
    world = world_of("two writers")
    offset, length = RECORD_FIELDS[name]
    start = world.part("records")[0] + 64 * index + offset
    for value in _values(length):
        row = world.chunk()
        same = row[start : start + length] == value
        world.forge_record(row, index, **{name: value})
        assert says(quick(world), row) is same


def test_a_generation_is_right_with_its_records_and_its_slices() -> None:
    """The header alone, then the records, then the tags: only all three are another sealed row."""
    world = world_of("two writers")
    opener = quick(world)
    row = world.forge(world.chunk(), generation=GENERATION + 1)
    assert (kind_of(world.open(row)), says(opener, row)) == ("902 writer[0].generation", False)
    row = other_generation(world, GENERATION + 1)
    assert (kind_of(world.open(row)), says(opener, row)) == ("1001 writer[0].tag", False)
    world.retag(retag_slices(world, row))
    assert (kind_of(world.open(row)), says(opener, row)) == ("opened", True)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    "other",
    [
        {"rank": 2},
        {"key_bytes": len(KEY) + 1},
        {"offset": 1},
        {"length": 1},
        {"epoch": EPOCH - 1},
        {"epoch": EPOCH + (1 << 56)},
        {"generation": GENERATION - 1},
        {"generation": GENERATION + (1 << 56)},
        {"identity": bytes(32)},
        {"key": OTHER_KEY},
        {"key": KEY[:-1]},
        {"secret": OLD_SECRET},
    ],
    ids=str,
)
def test_a_slice_of_another_context_is_noticed(index: int, other: dict[str, Any]) -> None:
    world = world_of("two writers")
    opener = quick(world)
    assert says(opener, forge_slice(world, world.chunk(), index))
    row = forge_slice(world, world.chunk(), index, **other)
    assert kind_of(world.open(row)) == f"1001 writer[{index}].tag"
    assert not says(opener, row)


# --- any edits -----------------------------------------------------------------------------------

EDITED = world_of("two writers")
_SECRETS = st.sampled_from([None, SECRET, SECRET, OLD_SECRET])


def _sealed() -> list[bytearray]:
    older = World(GMAC, *SHAPES["two writers"], secrets=(OLD_SECRET,), document=EDITED.document)
    return [
        *(EDITED.chunk(fill=fill) for fill in (1, 2)),
        EDITED.chunk(OTHER_KEY),
        EDITED.chunk(epoch=EPOCH + 1),
        EDITED.chunk(generation=GENERATION + 1),
        EDITED.chunk(covered=(0, 2)),
        older.chunk(),
    ]


BASES = [bytes(row) for row in _sealed()]


def _places() -> list[tuple[int, int]]:
    """First byte and length: fields, records, parts, and ends of parts."""
    records = EDITED.part("records")[0]
    names = ("key", "coverage", "identity", "geometry", "filler", "header tag", "payload", "tail")
    parts = [EDITED.part(name) for name in names]
    fields = [
        (records + 64 * index + at, n) for index in (0, 1) for at, n in RECORD_FIELDS.values()
    ]
    return [*FIELDS.values(), *fields, *parts, *((at + n - 1, 1) for at, n in parts)]


def _edit(place: tuple[int, int]) -> st.SearchStrategy[tuple[int, bytes]]:
    at, length = place
    short = min(length, 8)
    others = st.sampled_from([row[at : at + length] for row in BASES])
    return st.one_of(st.binary(min_size=short, max_size=short), others).map(lambda data: (at, data))


anywhere = st.tuples(st.integers(0, len(BASES[0]) - 1), st.binary(min_size=1, max_size=8))
edits = st.lists(st.one_of(st.sampled_from(_places()).flatmap(_edit), anywhere), max_size=3)


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(BASES),
    edits,
    _SECRETS,
    _SECRETS,
    st.sampled_from([KEY, KEY, KEY, OTHER_KEY]),
    st.sampled_from([EPOCH, EPOCH, EPOCH, EPOCH + 1]),
)
@example(BASES[0], [(40, b"\xff" * 8)], None, SECRET, KEY, EPOCH)
@example(BASES[0], [(EDITED.part("payload")[0], b"other")], SECRET, SECRET, KEY, EPOCH)
@example(BASES[2], [(24, (EPOCH + 1).to_bytes(8, "little"))], SECRET, SECRET, OTHER_KEY, EPOCH + 1)
@example(BASES[5], [], None, None, KEY, EPOCH)
@example(BASES[6], [], None, None, KEY, EPOCH)
def test_any_edited_row_is_taken_exactly_if_it_is_plainly_sealed(
    base: bytes,
    changes: list[tuple[int, bytes]],
    slices: bytes | None,
    header: bytes | None,
    key: bytes,
    epoch: int,
) -> None:
    row = bytearray(base)
    for at, data in changes:
        row[at : at + len(data)] = data
    del row[len(base) :]
    row = row.ljust(len(base), b"\0")
    if slices is not None and int.from_bytes(row[76:78], "little") <= MAX_KEY_BYTES:
        retag_slices(EDITED, row, slices)
    if header is not None:
        EDITED.retag(row, header)
    answer = EDITED.open(row, key, epoch)
    yes = says(quick(EDITED), row, key, epoch)
    assert not yes or isinstance(answer, Header)
    assert yes is plainly_sealed(answer, EDITED)


# --- the trial before use ------------------------------------------------------------------------


class _Faulty:
    """A batch opener with its questions or its answers changed."""

    def __init__(self, opener: BatchOpener, change: Callable[..., list[bool]]) -> None:
        self._opener, self._change = opener, change

    def right(self, rows: list[memoryview], keys: list[bytes], epoch: int) -> list[bool]:
        """As `BatchOpener`."""
        return self._change(self._opener.right, rows, keys, epoch)


def _blind(right: bytes, at: int) -> Callable[..., list[bool]]:
    """One byte is always put right before."""

    def change(ask: Any, rows: list[memoryview], keys: list[bytes], epoch: int) -> list[bool]:
        copies = [memoryview(bytearray(row)) for row in rows]
        for copy in copies:
            copy[at] = right[at]
        return list(ask(copies, keys, epoch))

    return change


def _tried(shape: str, change: Callable[..., list[bool]]) -> bool:
    world = world_of(shape)
    faulty: Any = _Faulty(quick(world), change)
    return batch._knows_right_from_wrong(faulty, expectation(world), len(KEY))


@pytest.mark.parametrize("shape", SHAPES)
def test_an_opener_that_does_not_see_a_byte_of_some_kind_is_not_used(shape: str) -> None:
    layout = world_of(shape).layout
    right = bytes(batch.sealed_row(expectation(world_of(shape)), b"k" * len(KEY), 5, 3))
    assert _tried(shape, lambda ask, *what: ask(*what))
    header, record = layout.header_bytes, layout.record_offset(0)
    heads = [0, 24, 32, 40, 48, 80, 144, record - 1, record, record + 24, record + 63]
    ends = [header + place.offset + at for place in layout.slices for at in (0, place.length - 1)]
    tail = [] if shape == "no tail" else [header + layout.payload_bytes, layout.row_bytes - 1]
    for at in (*heads, *ends, *tail):
        assert not _tried(shape, _blind(right, at)), at


@pytest.mark.parametrize(
    "change",
    [
        lambda ask, rows, keys, epoch: ask(rows, [b"k" * len(KEY)] * len(keys), epoch),
        lambda ask, rows, keys, epoch: ask(rows, keys, 5),
        lambda ask, rows, keys, epoch: [*ask(rows[:1], keys[:1], epoch), *[False] * len(rows[1:])],
        lambda ask, rows, keys, epoch: [False] * len(rows),
        lambda ask, rows, keys, epoch: [True] * len(rows),
    ],
    ids=["any key", "any epoch", "the first row only", "never", "always"],
)
def test_an_opener_with_one_gross_fault_is_not_used(change: Callable[..., list[bool]]) -> None:
    assert not _tried("two writers", change)

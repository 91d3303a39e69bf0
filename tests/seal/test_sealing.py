# SPDX-License-Identifier: Apache-2.0
"""Sealing: what is sealed opens again, is what `spec/chunk.md` says, and needs every writer."""

import hashlib
from collections.abc import Sequence

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsafe.seal.header import Header, bitmap
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.layout import LayoutError, RowLayout, round_up
from kvsafe.seal.opening import Expectation
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.sealing import HeaderSealer, SealSetting, SliceSealer
from kvsafe.seal.suites import Suite
from tests.seal.rows import (
    EPOCH,
    GENERATION,
    GEOMETRY,
    KEY,
    SECRET,
    World,
    get,
    identity,
    keyring,
    kind_of,
    spec_slice_tag,
    spec_tag,
)

suites = st.sampled_from(Suite)
lengths = st.lists(st.integers(1, 9000), min_size=1, max_size=6).map(tuple)
words = st.integers(0, 2**64 - 1)


@settings(max_examples=120, deadline=None)
@given(suites, lengths, st.integers(1, 70), words, words, st.data())
def test_what_is_sealed_opens_with_what_was_said(
    suite: Suite,
    slices: tuple[int, ...],
    slots: int,
    epoch: int,
    generation: int,
    data: st.DataObject,
) -> None:
    covered = data.draw(st.sets(st.integers(0, slots - 1)))
    world = World(suite, slices, slots)
    row = world.chunk(epoch=epoch, generation=generation, covered=covered)
    header = world.open(row, epoch=epoch, wanted=covered)
    assert isinstance(header, Header)
    assert (header.key, header.fixed.epoch, header.fixed.generation) == (KEY, epoch, generation)
    assert {slot for slot in range(slots) if header.covers(slot)} == covered
    assert [record.length for record in header.records] == list(slices)
    for slot in range(slots):
        assert (kind_of(world.open(row, epoch=epoch, wanted=[slot])) == "opened") is (
            slot in covered
        )


@settings(max_examples=60, deadline=None)
@given(suites, lengths, st.integers(1, 70))
def test_a_sealed_row_is_what_the_specification_says(
    suite: Suite, slices: tuple[int, ...], slots: int
) -> None:
    world = World(suite, slices, slots)
    row = world.chunk()
    header_bytes, payload = get(row, "header_bytes"), sum(slices)
    assert row[:8] == b"\x89kvsafe\n" and get(row, "version") == 1
    assert header_bytes % 4096 == 0 and len(row) == round_up(header_bytes + payload, 4096)
    assert bytes(row[80:112]) == _digest(suite, world.document)
    assert bytes(row[112:144]) == _digest(suite, world.geometry)
    at = 144 + len(KEY) + (slots + 7) // 8
    end = at + len(world.document) + len(world.geometry)
    assert bytes(row[at:end]) == world.document + world.geometry
    assert not any(row[end : header_bytes - 32 - 64 * len(slices)])
    assert not any(row[header_bytes + payload :])
    tag = spec_tag(suite, world.subkey(SECRET, "header"), bytes(row[: header_bytes - 32]))
    assert bytes(row[header_bytes - 32 : header_bytes]) == tag
    _check_records(world, row, header_bytes)


def _digest(suite: Suite, data: bytes) -> bytes:
    over_sha256 = suite in (Suite.HMAC_SHA256, Suite.AES256_GMAC)
    return hashlib.sha256(data).digest() if over_sha256 else blake3(data).digest()


def _check_records(world: World, row: bytearray, header_bytes: int) -> None:
    offset, writers = 0, len(world.slices)
    for rank, length in enumerate(world.slices):
        start = header_bytes - 32 - 64 * (writers - rank)
        numbers = (rank, 4), (0, 4), (offset, 8), (length, 8), (GENERATION, 8)
        record = b"".join(value.to_bytes(size, "little") for value, size in numbers)
        assert bytes(row[start : start + 32]) == record
        said = (rank, 4), (len(KEY), 4), (offset, 8), (length, 8), (EPOCH, 8), (GENERATION, 8)
        context = b"".join(value.to_bytes(size, "little") for value, size in said)
        context += bytes(row[80:112]) + KEY
        body = bytes(row[header_bytes + offset : header_bytes + offset + length])
        found = bytes(row[start + 32 : start + 64])
        subkey = world.subkey(SECRET, "slice")
        assert found == spec_slice_tag(world.suite, subkey, context, body)
        offset += length


def _unsealed(world: World, writers: Sequence[int]) -> bytearray:
    row = bytearray(world.layout.row_bytes)
    for index in writers:
        SliceSealer(world.setting, index).seal_slice(memoryview(row), KEY, EPOCH, GENERATION)
    return row


def _seal(world: World, row: bytearray, generation: int = GENERATION) -> Refusal | None:
    sealer = HeaderSealer(world.setting, world.geometry)
    coverage = bitmap(world.slots, range(world.slots))
    return sealer.seal(memoryview(row), KEY, EPOCH, generation, coverage)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_header_is_not_closed_without_every_writer(missing: int) -> None:
    world = World(slices=(64, 64, 64))
    row = _unsealed(world, [index for index in range(3) if index != missing])
    refusal = _seal(world, row)
    assert refusal is not None and refusal.kind is RefusalKind.WRITER_GENERATION
    assert refusal.field == f"writer[{missing}].generation"
    assert kind_of(world.open(row)) != "opened"
    assert _seal(world, _unsealed(world, range(3))) is None


def test_a_record_of_an_earlier_use_of_the_row_does_not_count() -> None:
    world = World()
    row = _unsealed(world, [0, 1])
    refusal = _seal(world, row, GENERATION + 1)
    assert refusal is not None and refusal.kind is RefusalKind.WRITER_GENERATION
    assert _seal(world, row) is None


def test_a_record_of_another_layout_does_not_count() -> None:
    world, other = World(), World(slices=(64, 96))
    refusal = _seal(world, _unsealed(other, [0, 1]))
    assert refusal is not None and refusal.kind is RefusalKind.WRITER
    assert _seal(other, _unsealed(other, [0, 1])) is None


def test_a_row_is_not_readable_before_its_header_is_closed() -> None:
    world = World()
    row = _unsealed(world, [0, 1])
    assert kind_of(world.open(row)) == "102 magic"
    used = world.chunk(fill=2, generation=GENERATION - 1)
    for index in range(2):
        SliceSealer(world.setting, index).seal_slice(memoryview(used), KEY, EPOCH, GENERATION)
    assert kind_of(world.open(used)) == "401 header tag"


def test_nothing_of_an_earlier_chunk_stays_in_header_or_tail() -> None:
    world = World()
    fresh, used = bytearray(world.layout.row_bytes), bytearray(b"\xaa" * world.layout.row_bytes)
    at, length = world.part("payload")
    for row in (fresh, used):
        row[at : at + length] = world.payload()
        for index in range(2):
            SliceSealer(world.setting, index).seal_slice(memoryview(row), KEY, EPOCH, GENERATION)
        assert _seal(world, row) is None
        row[40:48] = bytes(8)
        world.retag(row)
    assert fresh == used


@pytest.mark.parametrize("suite", Suite, ids=lambda suite: suite.label)
@pytest.mark.parametrize("other", Suite, ids=lambda suite: suite.label)
def test_a_ring_serves_its_own_suite_only(suite: Suite, other: Suite) -> None:
    world = World(suite)
    digest = suite.digest(world.document)
    ring = keyring(other)
    if suite is other:
        SealSetting(suite, ring, world.layout, world.document, digest)
        Expectation(suite, ring, world.layout, world.document, digest, GEOMETRY)
        return
    with pytest.raises(ValueError, match="key ring of suite"):
        SealSetting(suite, ring, world.layout, world.document, digest)
    with pytest.raises(ValueError, match="key ring of suite"):
        Expectation(suite, ring, world.layout, world.document, digest, GEOMETRY)


def test_the_unkeyed_suite_has_to_be_asked_for_by_name() -> None:
    assert Suite.named("blake3") is Suite.BLAKE3
    assert [suite for suite in Suite if not suite.keyed] == [Suite.BLAKE3]
    for text in ("", "none", "BLAKE3", "blake3 ", "unkeyed", "3"):
        with pytest.raises(ValueError, match="unknown suite"):
            Suite.named(text)
    assert Keyring.unkeyed().suite == "blake3"


def test_documents_that_leave_no_room_are_refused_before_the_first_seal() -> None:
    world = World()
    room = world.part("records")[0] - world.part("geometry")[0]
    fits = world.geometry.ljust(room, b"\0")
    HeaderSealer(world.setting, fits)
    with pytest.raises(LayoutError, match="geometry document"):
        HeaderSealer(world.setting, fits + bytes(len(KEY)))
    row, coverage = memoryview(bytearray(world.layout.row_bytes)), bitmap(world.slots, range(5))
    for index in range(2):
        SliceSealer(world.setting, index).seal_slice(row, KEY, EPOCH, GENERATION)
    full = HeaderSealer(world.setting, fits)
    assert full.seal(row, KEY, EPOCH, GENERATION, coverage) is None
    for key, bits in (
        (KEY + b"\0", coverage),
        (b"", coverage),
        (KEY, coverage + b"\0"),
        (KEY, b""),
    ):
        with pytest.raises(LayoutError):
            full.seal(row, key, EPOCH, GENERATION, bits)


def test_the_longest_document_of_the_format_opens() -> None:
    empty = len(identity(filler=b"")) + 2
    document = identity(filler=bytes(65536 - empty))
    world = World(document=document)
    assert len(document) == 65536
    assert kind_of(world.open(world.chunk())) == "opened"
    with pytest.raises(LayoutError):
        World(document=document + b"\0")


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("identity_bytes", (0, 65537), (1, 65536)),
        ("key_bytes", (0, 129), (1, 128)),
        ("slots", (0, 4097), (1, 4096)),
        ("slice_bytes", ((), (1,) * 1025, (0,), ((1 << 40) + 1,)), ((1,), (1,) * 1024, (1 << 40,))),
    ],
)
def test_layouts_stay_within_the_format(
    name: str, wrong: tuple[object, ...], right: tuple[object, ...]
) -> None:
    shape: dict[str, object] = {"identity_bytes": 99, "key_bytes": 36, "slots": 1}
    shape["slice_bytes"] = (8,)
    for value in right:
        layout = RowLayout.plan(**{**shape, name: value})  # type: ignore[arg-type]
        assert layout.header_bytes % 4096 == layout.row_bytes % 4096 == 0
        assert layout.header_bytes <= 1 << 20
    for value in wrong:
        with pytest.raises(LayoutError):
            RowLayout.plan(**{**shape, name: value})  # type: ignore[arg-type]


def test_a_coverage_bitmap_has_no_bit_outside() -> None:
    assert bitmap(9, [0, 8]) == b"\x01\x01"
    for slot in (-1, 9, 15):
        with pytest.raises(ValueError, match="slot"):
            bitmap(9, [slot])

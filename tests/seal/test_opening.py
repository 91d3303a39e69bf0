# SPDX-License-Identifier: Apache-2.0
"""Opening: every wrong row gets its one right answer, and every refusal has a case."""

import ast
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from kvsafe.seal import opening
from kvsafe.seal.header import FixedPart, Header, read_record, read_records
from kvsafe.seal.opening import Spans, read_claims, read_outer
from kvsafe.seal.refusal import MEANINGS, Refusal, RefusalKind, bounded
from kvsafe.seal.suites import Suite, tags_equal
from tests.seal.cases import BY_NAME, CASES, Case, check
from tests.seal.rows import EPOCH, KEY, OTHER_KEY, World, kind_of

TESTS = Path(__file__).resolve().parents[1]
LAST_STEP_OF_OPENING = 10


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_wrong_row_gets_its_answer(case: Case) -> None:
    check(case)


def test_no_two_cases_have_one_name() -> None:
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("suite", Suite, ids=lambda suite: suite.label)
@pytest.mark.parametrize(
    "name",
    [
        "flipped bit of the key",
        "flipped bit of the payload",
        "chunk of another key",
        "body of another chunk",
        "slice of another rank",
        "byte in the tail",
        "another key's slices under our key",
    ],
)
def test_the_answer_is_the_same_in_every_suite(suite: Suite, name: str) -> None:
    case = BY_NAME[name]
    slices = case.world().slices
    check(Case(name, case.answer, case.make, lambda: World(suite, slices)))


def test_every_refusal_of_the_opener_has_a_case() -> None:
    given = {int(case.answer.split()[0]) for case in CASES if case.answer != "opened"}
    own = {
        kind.value
        for kind in RefusalKind
        if kind.step <= LAST_STEP_OF_OPENING and kind is not RefusalKind.IDENTITY_ELSEWHERE
    }
    assert given == own


def test_every_other_refusal_is_named_in_a_test() -> None:
    text = "".join(
        path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__).resolve()
    )
    missing = [
        kind.name
        for kind in RefusalKind
        if (kind.step > LAST_STEP_OF_OPENING or kind is RefusalKind.IDENTITY_ELSEWHERE)
        and f"RefusalKind.{kind.name}" not in text
    ]
    assert missing == []


def test_every_refusal_has_a_meaning_and_a_number_of_its_own() -> None:
    assert set(MEANINGS) == set(RefusalKind)
    assert len(set(MEANINGS.values())) == len(RefusalKind)
    assert all(kind.step == kind.value // 100 for kind in RefusalKind)
    source = ast.parse((TESTS.parent / "kvsafe" / "seal" / "refusal.py").read_text())
    numbers = [
        node.value.value
        for node in ast.walk(source)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, int) and node.value.value > 100
    ]
    # An enum takes a number that is given twice for another name of the first: no member shows it.
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_text_of_a_refusal_is_short_and_printable(case: Case) -> None:
    world = case.world()
    made = case.make(world)
    row = made if isinstance(made, bytearray) else made.row
    answer = world.open(row)
    if isinstance(answer, Refusal):
        assert len(str(answer)) < 800
        assert str(answer).isprintable()
        assert world.payload().hex()[:16] not in str(answer)


@pytest.mark.parametrize(
    "value", ["x" * 10**6, b"x" * 10**5, "a\nb\x1b[31m\0", "e\ud800", None, {}]
)
def test_bounded_text_is_bounded(value: object) -> None:
    assert len(bounded(value)) <= 160
    assert bounded(value).isprintable()


def test_a_worker_can_open_its_own_slice_alone() -> None:
    world = World()
    row = world.chunk()
    row[world.layout.header_bytes] ^= 1
    view = memoryview(row)
    header = world.opener.open_header(view, KEY, EPOCH)
    assert isinstance(header, Header)
    bad = world.opener.open_slice(view, header, 0)
    assert bad is not None and bad.kind is RefusalKind.PAYLOAD_TAG
    assert world.opener.open_slice(view, header, 1) is None


def test_a_ring_without_the_key_of_a_header_refuses_its_slices() -> None:
    world = World()
    row = memoryview(world.chunk())
    header = world.opener.open_header(row, KEY, EPOCH)
    assert isinstance(header, Header)
    assert world.opener.open_slice(row, header, 0) is None
    foreign = Header(header.fixed._replace(key_id=b"\1" * 8), KEY, header.coverage, header.records)
    refusal = world.opener.open_slice(row, foreign, 0)
    assert refusal is not None and refusal.kind is RefusalKind.KEY_ID


def test_a_row_that_changes_after_its_tag_was_checked_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    row = world.chunk()

    def slow(left: bytes, right: bytes) -> bool:
        equal = tags_equal(left, right)
        row[:4096] = world.chunk(OTHER_KEY, epoch=EPOCH + 1)[:4096]
        return equal

    monkeypatch.setattr(opening, "tags_equal", slow)
    header = world.opener.open_header(memoryview(row), KEY, EPOCH)
    assert isinstance(header, Header)
    assert (header.key, header.fixed.epoch) == (KEY, EPOCH)
    monkeypatch.undo()
    assert kind_of(world.open(row)) == "501 key"


@pytest.mark.parametrize("writers", [1, 60], ids=["one page", "two pages"])
@pytest.mark.parametrize("torn", [False, True], ids=["quiet", "changing"])
def test_a_row_that_changes_while_it_is_read_is_one_chunk_or_none(
    writers: int, torn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the lengths and the rest another chunk of the same shape comes into the row."""
    world = World(slices=(16,) * writers)
    assert (world.layout.header_bytes > 4096) is (writers > 1)
    row, other = world.chunk(), world.chunk(OTHER_KEY, epoch=EPOCH + 1)
    right = opening._check_lengths

    def late(fixed: FixedPart, row_bytes: int) -> Spans | Refusal:
        row[: len(other)] = other
        return right(fixed, row_bytes)

    if torn:
        monkeypatch.setattr(opening, "_check_lengths", late)
    header = world.opener.open_header(memoryview(row), KEY, EPOCH)
    # Of a header of one page nothing is read a second time.
    whole = not torn or writers == 1
    assert kind_of(header) == ("opened" if whole else "401 header tag")
    assert not isinstance(header, Header) or (header.key, header.fixed.epoch) == (KEY, EPOCH)


def test_all_records_are_read_as_each_of_them() -> None:
    world = World(slices=(16, 32, 48))
    row = bytes(world.chunk())
    start, length = world.part("records")
    records = read_records(row, start, start + length)
    assert records == tuple(read_record(row, start + 64 * index) for index in range(3))
    assert [record.rank for record in records] == [0, 1, 2]


def test_chunks_of_other_lengths_in_turn_have_their_own_places() -> None:
    """The places of parts are kept from chunk to chunk, and so nobody may move them."""
    shapes = [(writers, slots) for writers in (1, 2, 60) for slots in (1, 8, 9, 500)]
    worlds = [World(slices=(16,) * writers, slots=slots) for writers, slots in shapes]
    for world in (*worlds, *worlds):
        outer = read_outer(memoryview(world.chunk()), world.suite, world.keyring)
        assert not isinstance(outer, Refusal)
        _, spans, head = outer
        found = (spans.key, spans.coverage, spans.identity, spans.geometry, spans.filler)
        names = ("key", "coverage", "identity", "geometry", "filler")
        assert found == tuple(world.part(name)[0] for name in names)
        assert (spans.records, spans.tag) == (world.part("records")[0], len(head) - 32)
        with pytest.raises(FrozenInstanceError):
            spans.key = 0  # type: ignore[misc]


@pytest.mark.parametrize(("shown", "row_bytes"), [(143, 8192), (8192, 143), (0, 8192), (0, 0)])
def test_neither_a_short_row_nor_a_short_look_claims_anything(shown: int, row_bytes: int) -> None:
    row = memoryview(World().chunk())
    assert not isinstance(read_claims(row[:144], len(row)), Refusal)
    claims = read_claims(row[:shown], row_bytes)
    assert isinstance(claims, Refusal) and claims.kind is RefusalKind.TOO_SHORT
    assert claims.found == str(row_bytes)


def test_outer_reading_needs_no_engine() -> None:
    world = World()
    outer = read_outer(memoryview(world.chunk()), world.suite, world.keyring)
    assert not isinstance(outer, Refusal)
    fixed, spans, head = outer
    assert (fixed.epoch, fixed.writers, fixed.slots) == (EPOCH, 2, 5)
    assert spans.key == 144 and spans.tag == fixed.header_bytes - 32 == len(head) - 32
    other = World(Suite.HMAC_SHA256)
    refused = read_outer(memoryview(world.chunk()), other.suite, other.keyring)
    assert isinstance(refused, Refusal) and refused.kind is RefusalKind.SUITE

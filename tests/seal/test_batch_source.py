# SPDX-License-Identifier: Apache-2.0
"""Faults seeded in the source of `batch.c`, one at a time: each is noticed by a row or a call."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import kvsafe.seal
from kvsafe.native import SUFFIXES
from kvsafe.seal import batch
from kvsafe.seal.batch import BatchOpener, Native, batch_opener, native
from tests.seal.batch_rows import (
    EXPECTED,
    answers,
    expectation,
    made,
    world_of,
)
from tests.seal.batch_spy import FALLIBLE, STATES, Spied, failing, late_header, quiet, shortening
from tests.seal.rows import EPOCH, KEY, OTHER_KEY

SOURCE = Path(kvsafe.seal.__file__).with_name("batch.c")
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
pytestmark = pytest.mark.skipif(
    native() is None or COMPILER is None, reason="batch.c was not built: no C compiler"
)
PLAIN = "right: two writers"


def _compiled(source: str, folder: Path) -> ctypes.CDLL:
    (folder / "one.c").write_text(source)
    target = folder / "one.so"
    command = [str(COMPILER), "-O1", "-w", "-fPIC", "-fvisibility=hidden", "-shared"]
    subprocess.run([*command, "-o", str(target), str(folder / "one.c")], check=True, timeout=60)
    return ctypes.CDLL(str(target))


@cache
def _text() -> str:
    return SOURCE.read_text()


def _between(first: str, last: str) -> str:
    """The text from one to the other, both with it; `first` alone where they are not there."""
    start, end = _text().find(first), _text().find(last)
    return _text()[start : end + len(last)] if 0 <= start < end else first


# --- what is looked at ---------------------------------------------------------------------------


def _in_order(found: Native) -> list[bool]:
    """Four rows in one call, of which the second and the third are wrong."""
    opener = BatchOpener(found, expectation(world_of("two writers")), len(KEY))
    names = (PLAIN, "slice 1, byte -1", "part coverage", "right: other key")
    rows = [memoryview(bytearray(made(name))) for name in names]
    return opener.right(rows, [KEY, KEY, KEY, OTHER_KEY], EPOCH)


def _one(found: Native, row: bytearray) -> bool:
    opener = BatchOpener(found, expectation(world_of("two writers")), len(KEY))
    return opener.right([memoryview(row)], [KEY], EPOCH) == [True]


def _failing(found: Native) -> dict[str, bool]:
    """Whether a row is taken although one call, made as it should be, says that it failed."""
    said = {}
    for name in FALLIBLE:
        counted = Spied(found, name, quiet)
        _one(counted.native, bytearray(made(PLAIN)))
        for at in range(counted.calls):
            spied = Spied(found, name, failing(at))
            said[f"{name}, call {at}"] = _one(spied.native, bytearray(made(PLAIN)))
    return said


def _short_tags(found: Native) -> list[bool]:
    """Whether a row is taken although one tag of it is said to be a byte shorter."""
    changes = [Spied(found, "EVP_MAC_final", shortening(at)) for at in range(7)]
    return [_one(spied.native, bytearray(made(PLAIN))) for spied in changes]


def _states(found: Native) -> list[int]:
    """How many states are made, and given back."""
    calls = []
    for name in STATES:
        spied = Spied(found, name, quiet)
        _one(spied.native, bytearray(made(PLAIN)))
        calls.append(spied.calls)
    return calls


def _changing(found: Native) -> bool:
    """Whether a header is taken that came into the row after the tag of another was checked."""
    row, late = late_header()

    def change(number: int, result: int, _: Any) -> int:
        if number == 0:
            row[:4096] = late
        return result

    return _one(Spied(found, "CRYPTO_memcmp", change).native, row)


def _wrong(found: Native) -> list[str]:
    """What is not as it must be, in words."""
    said = answers(found)
    wrong = [name for name, right in EXPECTED.items() if said[name] is not right]
    if _in_order(found) != [True, False, False, True]:
        wrong.append("order of answers")
    wrong += [name for name, taken in _failing(found).items() if taken]
    if any(_short_tags(found)):
        wrong.append("short tags")
    made_of_them, given_back = _states(found)
    if made_of_them != given_back:
        wrong.append("states")
    if _changing(found):
        wrong.append("a row that changes")
    return wrong


# --- faults --------------------------------------------------------------------------------------

DIFFER_SLICE = "open->crypto->differ(found, tag, TAG) == 0"
DIFFER_HEAD = "crypto->differ(found, head + bytes, TAG) == 0"
EPOCH_OF_HEAD = "memcmp(head + EPOCH_AT, epoch, 8) != 0"
KEY_OF_HEAD = "memcmp(head + KEY_AT, key, (size_t)rows->key_bytes) != 0"
BEHIND_KEY = "!same(head, rows->head, KEY_AT + rows->key_bytes, records)"
GENERATION = "memcmp(head + at + RECORD_GENERATION_AT, head + GENERATION_AT, 8) != 0"
RECORDS = "i < rows->slices; i++) {"
SLICES = "i < rows->slices; i++)\n        if (!is_slice"
IN_RECORD = "at, at + RECORD_GENERATION_AT"
TAIL = "!is_zero(row + rows->tail_at, rows->row_bytes - rows->tail_at)"
KEY_OF_SLICE = "open->rows->slice_key, TAG, NULL) == 1"
KEY_OF_HEADER = "open->rows->header_key, TAG, NULL) == 1"
FINAL = "crypto->final(mac, out, &got, bytes) == 1 && got == bytes"
COPY_OF_HEAD = _between(
    "uint8_t head[HEAD_MOST];", "memcpy(head, row, (size_t)rows->header_bytes);"
)
ANY = "i < count; i++)\n        any"
SAME_GENERATION = "head + GENERATION_AT, 8);\n"
SAME_EPOCH = "head + EPOCH_AT, 8);\n"
PLACE = "RECORD * i + RECORD_TAG_AT"

SEEDED: tuple[tuple[str, str, str], ...] = (
    # Comparisons of tags.
    (DIFFER_SLICE, "1", "slice 0, byte 0"),
    (DIFFER_SLICE, "open->crypto->differ(found, tag, TAG - 1) == 0", "record 1: tag"),
    (DIFFER_HEAD, "1", "sealed at, not tagged"),
    (DIFFER_HEAD, "crypto->differ(found, head + bytes, TAG - 1) == 0", "last byte of the header"),
    (DIFFER_HEAD, "crypto->differ(found + 1, head + bytes + 1, TAG - 1) == 0", "first byte of"),
    ("!is_header_tag(open, head) || ", "", "sealed at, not tagged"),
    # Ranges of the header.
    ("!same(head, rows->head, 0, EPOCH_AT)", "0", "version, byte 0"),
    ("!same(head, rows->head, 0, EPOCH_AT)", "!same(head, rows->head, 1, EPOCH_AT)", "magic"),
    ("head, 0, EPOCH_AT)", "head, 0, EPOCH_AT - 1)", "key_id, byte 7"),
    (EPOCH_OF_HEAD, "0", "epoch before"),
    (EPOCH_OF_HEAD, "memcmp(head + EPOCH_AT, epoch, 7) != 0", "epoch far away"),
    ("!same(head, rows->head, TIME_END, KEY_AT)", "0", "payload_bytes, byte 0"),
    ("TIME_END, KEY_AT)", "TIME_END + 1, KEY_AT)", "payload_bytes, byte 0"),
    ("TIME_END, KEY_AT)", "TIME_END, KEY_AT - 1)", "geometry_digest, byte 31"),
    ("TIME_END, KEY_AT)", "TIME_END - 1, KEY_AT)", "right: sealed at another time"),
    (KEY_OF_HEAD, "0", "first byte of the key"),
    (KEY_OF_HEAD, "memcmp(head + KEY_AT, key, rows->key_bytes - 1) != 0", "last byte of the key"),
    (BEHIND_KEY, "0", "part coverage"),
    ("KEY_AT + rows->key_bytes, records)", "KEY_AT + rows->key_bytes + 1, records)", "part cov"),
    ("rows->key_bytes, records)", "rows->key_bytes, records - 1)", "filler, byte -1"),
    # Records.
    (RECORDS, "i < rows->slices - 1; i++) {", "record 1: rank"),
    (RECORDS, "i++ < rows->slices - 1;) {", "record 0: rank"),
    (IN_RECORD, "at + 4, at + RECORD_GENERATION_AT", "record 0: rank"),
    (IN_RECORD, "at, at + RECORD_GENERATION_AT - 8", "record 1: length"),
    (GENERATION, "0", "record 1: generation"),
    # Slices and the tail.
    (SLICES, SLICES.replace("slices;", "slices - 1;"), "slice 1, byte 0"),
    (SLICES, SLICES.replace("slices;", "slices && i < 59;"), "last of sixty slices"),
    (PLACE, "RECORD_TAG_AT", PLAIN),
    ("row + place->start", "row + open->rows->places->start", PLAIN),
    ("(size_t)place->bytes, hash)", "(size_t)place->bytes - 1, hash)", PLAIN),
    (TAIL, "0", "first byte of the tail"),
    (TAIL, TAIL.replace("- rows", "- 1 - rows"), "last byte of the tail"),
    ("row + rows->tail_at", "row + rows->tail_at - 1", PLAIN),
    (
        "int64_t i = 0; i < count; i++)\n        any",
        "int64_t i = 1; i < count; i++)\n        any",
        "first byte of the tail",
    ),
    ("any |= bytes[i]", "any = bytes[i]", "middle of the tail"),
    ("any |= bytes[i]", "any ^= bytes[i] & 0x0f", "middle of the tail"),
    # What a slice is bound to.
    ("memcpy(context + CONTEXT_EPOCH_AT, head + EPOCH_AT, 8);", "", PLAIN),
    ("memcpy(context + CONTEXT_GENERATION_AT, head + GENERATION_AT, 8);", "", PLAIN),
    ("memcpy(context + CONTEXT_KEY_AT, key,", "memset(context + CONTEXT_KEY_AT, 0,", PLAIN),
    ("CONTEXT_KEY_AT + key_bytes;", "CONTEXT_KEY_AT;", PLAIN),
    (
        "head + GENERATION_AT, 8);\n    memcpy",
        "head + GENERATION_AT, 4);\n    memcpy",
        "right: oth",
    ),
    ("head + EPOCH_AT, 8);\n", "head + EPOCH_AT, 4);\n", "right: last epoch"),
    ("hmac(open, 2, context, bytes, hash, GMAC, found)", "1", PLAIN),
    ("rows[i], keys[i], epoch)", "rows[i], keys[0], epoch)", "order of answers"),
    ("rows[i], keys[i], epoch)", "rows[0], keys[i], epoch)", "order of answers"),
    (KEY_OF_SLICE, KEY_OF_HEADER, PLAIN),
    (KEY_OF_HEADER, KEY_OF_SLICE, PLAIN),
    # Answers.
    ("answers[i] = begun", "answers[0] = begun", "order of answers"),
    ("begun && is_right(&open, rows[i], keys[i], epoch)", "begun", "slice 0, byte 0"),
    ("i < count; i++)\n        answers", "i < count - 1; i++)\n        answers", PLAIN),
    # Calls that fail.
    (KEY_OF_HEADER, KEY_OF_HEADER.replace("==", "<="), "EVP_MAC_init, call 0"),
    (KEY_OF_SLICE, KEY_OF_SLICE.replace("==", "<="), "EVP_MAC_init, call 1"),
    ("key, TAG, params) == 1", "key, TAG, params) <= 1", "EVP_MAC_init, call 2"),
    ("open->hmac, digest) == 1", "open->hmac, digest) <= 1", "set_params, call 0"),
    ("open->gmac, block) == 1", "open->gmac, block) <= 1", "set_params, call 1"),
    ("open->hmac, head, bytes) == 1", "open->hmac, head, bytes) <= 1", "update, call 0"),
    ("open->hmac, &first, 1) == 1", "open->hmac, &first, 1) <= 1", "EVP_MAC_update, call 1"),
    ("open->hmac, context, bytes) == 1", "open->hmac, context, bytes) <= 1", "update, call 2"),
    ("open->gmac, data, bytes) == 1", "open->gmac, data, bytes) <= 1", "EVP_MAC_update, call 3"),
    ("more, more_bytes) == 1", "more, more_bytes) <= 1", "EVP_MAC_update, call 6"),
    (FINAL, FINAL.replace("== 1", "<= 1"), "EVP_MAC_final, call 0"),
    (FINAL, "crypto->final(mac, out, &got, bytes) == 1", "short tags"),
    ("    crypto->end(open.hmac);\n", "", "states"),
    ("    crypto->end(open.gmac);\n", "", "states"),
    # One reading of the header.
    (COPY_OF_HEAD, "const uint8_t *head = row;", "a row that changes"),
)
"""What is in the source, what is there instead, and (the beginning of) one of what notices it."""


def test_the_source_does_what_it_says(tmp_path: Path) -> None:
    assert _wrong(Native.of(_compiled(_text(), tmp_path))) == []


@pytest.mark.parametrize("fault", SEEDED, ids=[f"{right} -> {wrong}" for right, wrong, _ in SEEDED])
def test_a_seeded_fault_is_noticed(tmp_path: Path, fault: tuple[str, str, str]) -> None:
    right, wrong, by = fault
    assert _text().count(right) == 1, "the seeded fault no longer fits batch.c"
    noticed = _wrong(Native.of(_compiled(_text().replace(right, wrong), tmp_path)))
    assert [name for name in noticed if by in name] != [], noticed


# --- what is not used ----------------------------------------------------------------------------


GROSS = (
    (DIFFER_SLICE, "1"),
    (DIFFER_HEAD, "1"),
    ("!same(head, rows->head, 0, EPOCH_AT)", "0"),
    ("!same(head, rows->head, TIME_END, KEY_AT)", "0"),
    (EPOCH_OF_HEAD, "0"),
    (KEY_OF_HEAD, "0"),
    (BEHIND_KEY, "0"),
    (f"!same(head, rows->head, {IN_RECORD})", "0"),
    (GENERATION, "0"),
    (TAIL, "0"),
)


@pytest.mark.parametrize("fault", GROSS, ids=[right for right, _ in GROSS])
def test_a_shared_object_with_a_gross_fault_is_not_used(
    fault: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _text().count(fault[0]) == 1
    wrong = Native.of(_compiled(_text().replace(*fault), tmp_path))
    want = expectation(world_of("two writers"))
    assert batch_opener(want, len(KEY)) is not None
    monkeypatch.setattr(batch, "native", lambda: wrong)
    assert batch_opener(want, len(KEY)) is None


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("    int64_t slices;", "    int64_t slices, more;"),
        ("    int64_t bytes;", "    int32_t bytes[3];"),
        ("    void *gmac;", "    void *gmac, *more;"),
        ("{ 1, sizeof(struct crypto)", "{ 2, sizeof(struct crypto)"),
        ("kvsafe_seal_sizes", "kvsafe_sizes_of_another"),
        ("kvsafe_open(", "kvsafe_shut("),
    ],
)
def test_a_shared_object_of_another_version_is_not_loaded(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _text().count(right) == 1
    library = _compiled(_text().replace(right, wrong), tmp_path)
    with pytest.raises((ValueError, AttributeError)):
        Native.of(library)
    (tmp_path / "one.so").rename(tmp_path / f"_batch{SUFFIXES[0]}")
    monkeypatch.setattr(batch, "__file__", str(tmp_path / "batch.py"))
    native.cache_clear()
    try:
        assert native() is None
    finally:
        native.cache_clear()

# SPDX-License-Identifier: Apache-2.0
"""A batch opener in use: many rows in a call, threads, misuse, a libcrypto that fails, and none."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvsafe.native import SUFFIXES, sizes_of
from kvsafe.seal import batch
from kvsafe.seal.batch import (
    LIBCRYPTO,
    MOST_HEADER_BYTES,
    MOST_ROW_BYTES,
    BatchOpener,
    Native,
    batch_opener,
    native,
)
from kvsafe.seal.layout import FIXED, MAX_KEY_BYTES, MAX_SLOTS, Slice, coverage_bytes
from kvsafe.seal.suites import Suite
from tests.seal.batch_rows import (
    GMAC,
    ROWS,
    expectation,
    made,
    quick,
    says,
    world_of,
)
from tests.seal.batch_spy import (
    FALLIBLE,
    STATES,
    Change,
    Spied,
    failing,
    late_header,
    quiet,
    shortening,
)
from tests.seal.rows import (
    EPOCH,
    KEY,
    OTHER_KEY,
    World,
)

pytestmark = pytest.mark.skipif(
    native() is None, reason="batch.c was not built: no C compiler, or no OpenSSL 3"
)


@pytest.fixture
def unloaded() -> Iterator[None]:
    """What was loaded before is forgotten, and what is loaded meanwhile after."""
    native.cache_clear()
    yield
    native.cache_clear()


# --- many rows in a call -------------------------------------------------------------------------


def _mixed(seed: int) -> tuple[list[bytearray], list[bytes], list[bool]]:
    """Rows of one shape and epoch in some order, with keys and right answers."""
    names = [
        name for name, row in ROWS.items() if row.shape == "two writers" and row.epoch == EPOCH
    ]
    chosen = [*names, *(name for name in names if ROWS[name].right), names[0]] * 2
    random.Random(seed).shuffle(chosen)
    rows = [bytearray(made(name)) for name in chosen]
    return rows, [ROWS[name].key for name in chosen], [ROWS[name].right for name in chosen]


@pytest.mark.parametrize("seed", range(5))
def test_answers_are_in_the_order_of_the_rows(seed: int) -> None:
    rows, keys, right = _mixed(seed)
    opener = quick(world_of("two writers"))
    assert set(right) == {True, False}
    assert opener.right([memoryview(row) for row in rows], keys, EPOCH) == right


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_one_wrong_row_or_key_is_one_wrong_answer(wrong: int) -> None:
    world = world_of("two writers")
    keys = [KEY, OTHER_KEY, KEY[::-1]]
    rows = [world.chunk(key) for key in keys]
    views = [memoryview(row) for row in rows]
    opener = quick(world)
    assert opener.right(views, keys, EPOCH) == [True] * 3
    assert opener.right([views[0]] * 3, [KEY] * 3, EPOCH) == [True] * 3
    rows[wrong][5000 if wrong else 4100] ^= 1
    expected = [at != wrong for at in range(3)]
    assert opener.right(views, keys, EPOCH) == expected
    rows[wrong][5000 if wrong else 4100] ^= 1
    keys[wrong] = b"another key".ljust(len(KEY))
    assert opener.right(views, keys, EPOCH) == expected


def test_no_rows_are_no_answers() -> None:
    assert quick(World(GMAC)).right([], [], EPOCH) == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_keys_is_misuse(count: int) -> None:
    row = memoryview(World(GMAC).chunk())
    with pytest.raises(ValueError, match=f"2 rows and {count} keys"):
        quick(World(GMAC)).right([row, row], [KEY] * count, EPOCH)


@pytest.mark.parametrize("length", [0, 1, 143, 4096, 8191, 8193, 12288])
def test_rows_of_another_length_are_left_to_the_opener(length: int) -> None:
    world = World(GMAC)
    right = memoryview(world.chunk())
    other = memoryview(world.chunk()[:length].ljust(length, b"\0"))
    assert quick(world).right([right, other], [KEY] * 2, EPOCH) == [False, False]
    assert quick(world).right([other, right], [KEY] * 2, EPOCH) == [False, False]


@pytest.mark.parametrize("key", [b"", KEY[:-1], KEY + b"\0", b"k" * 129])
def test_keys_of_another_length_are_left_to_the_opener(key: bytes) -> None:
    world = World(GMAC)
    row = memoryview(world.chunk())
    assert quick(world).right([row, row], [KEY, key], EPOCH) == [False, False]


@pytest.mark.parametrize("kind", ["read-only", "with gaps"])
def test_memory_that_c_cannot_be_given_is_misuse_and_nothing_stays_held(kind: str) -> None:
    world = World(GMAC)
    row = world.chunk()
    twice = memoryview(bytearray(2 * len(row)))[::2]
    other = memoryview(bytes(row)) if kind == "read-only" else twice
    with pytest.raises((TypeError, BufferError)):
        quick(world).right([memoryview(row), other], [KEY] * 2, EPOCH)
    row.extend(b"a row that is still held cannot grow")


def test_rows_are_let_go_and_not_written_to() -> None:
    world = World(GMAC)
    row = world.chunk()
    before = bytes(row)
    view = memoryview(row)
    assert quick(world).right([view], [KEY], EPOCH) == [True]
    assert row == before
    view.release()
    row.extend(b"a row that is still held cannot grow")


@pytest.mark.parametrize("epoch", [-1, 2**64])
def test_an_epoch_that_cannot_be_is_misuse(epoch: int) -> None:
    with pytest.raises(OverflowError):
        quick(World(GMAC)).right([memoryview(World(GMAC).chunk())], [KEY], epoch)


@pytest.mark.parametrize("epoch", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_any_epoch_of_the_format_works(epoch: int) -> None:
    world = World(GMAC)
    row = world.chunk(epoch=epoch)
    assert says(quick(world), row, epoch=epoch)
    assert not says(quick(world), row, epoch=epoch ^ 1)
    assert not says(quick(world), row, epoch=epoch ^ 1 << 63)


def test_threads_that_share_an_opener_get_their_own_answers() -> None:
    opener = quick(world_of("two writers"))
    ready = threading.Barrier(8)

    def ask(seed: int) -> bool:
        rows, keys, right = _mixed(seed)
        views = [memoryview(row) for row in rows]
        ready.wait(60)
        return all(opener.right(views, keys, EPOCH) == right for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(ask, seed) for seed in range(8)]
        assert [one.result(60) for one in found] == [True] * 8


# --- where there is none -------------------------------------------------------------------------


@pytest.mark.parametrize("suite", Suite, ids=lambda suite: suite.label)
def test_only_rows_of_gmac_are_opened_in_batches(suite: Suite) -> None:
    found = batch_opener(expectation(World(suite)), len(KEY))
    assert (found is not None) is (suite is GMAC)


@pytest.mark.parametrize(("more", "there"), [(0, True), (1, False)])
def test_long_rows_are_opened_one_by_one(more: int, there: bool) -> None:
    world = World(GMAC, slices=(MOST_ROW_BYTES - 4096 + more,))
    assert (world.layout.row_bytes > MOST_ROW_BYTES) is not there
    assert (batch_opener(expectation(world), len(KEY)) is not None) is there
    if there:
        assert says(quick(world), world.chunk())


def _writers_of_a_long_header() -> int:
    return next(
        count
        for count in range(1, 400)
        if World(GMAC, slices=(16,) * count).layout.header_bytes > MOST_HEADER_BYTES
    )


def test_long_headers_are_opened_one_by_one() -> None:
    count = _writers_of_a_long_header()
    longest = World(GMAC, slices=(16,) * (count - 1))
    assert longest.layout.header_bytes == MOST_HEADER_BYTES
    assert says(quick(longest), longest.chunk())
    longer = World(GMAC, slices=(16,) * count)
    assert batch_opener(expectation(longer), len(KEY)) is None
    # C has bounds of its own, whoever asks.
    found = native()
    assert found is not None
    assert not says(BatchOpener(found, expectation(longer), len(KEY)), longer.chunk())


@pytest.mark.parametrize("key_bytes", [0, MAX_KEY_BYTES + 1])
def test_keys_that_cannot_be_have_no_opener(key_bytes: int) -> None:
    assert batch_opener(expectation(World(GMAC)), key_bytes) is None


def test_a_key_that_does_not_fit_behind_the_documents_has_no_opener() -> None:
    want = expectation(World(GMAC))
    used = FIXED.size + coverage_bytes(want.layout.slots) + len(want.identity_document)
    room = want.layout.record_offset(0) - used - len(KEY)
    full = replace(want, geometry_document=b"g" * room)
    assert batch_opener(full, len(KEY)) is not None
    assert batch_opener(full, len(KEY) + 1) is None


@pytest.mark.parametrize(
    "change",
    [
        {"payload_bytes": 4097},
        {"slices": (Slice(0, 0, 96), Slice(1, 96, 65))},
        {"slices": (Slice(0, 0, 96), Slice(1, -1, 64))},
        {"slices": (Slice(0, 0, 96), Slice(1, 1 << 40, 64))},
        # More than the format has: our own rows would be refused.
        {"slots": MAX_SLOTS + 1},
    ],
    ids=str,
)
def test_a_layout_that_no_row_has_is_not_given_to_c(change: dict[str, Any]) -> None:
    want = expectation(World(GMAC))
    assert batch_opener(want, len(KEY)) is not None
    odd = replace(want, layout=replace(want.layout, **change))
    assert batch_opener(odd, len(KEY)) is None


def _gone() -> bool:
    return native() is None and batch_opener(expectation(World(GMAC)), len(KEY)) is None


@pytest.mark.usefixtures("unloaded")
def test_without_a_shared_object_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not _gone()
    native.cache_clear()
    monkeypatch.setattr(batch, "__file__", str(tmp_path / "batch.py"))
    assert _gone()


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_shared_object_that_is_none_is_not_loaded(
    suffix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"_batch{suffix}").write_bytes(b"\x7fELF and no more")
    monkeypatch.setattr(batch, "__file__", str(tmp_path / "batch.py"))
    assert _gone()


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("name", ["libkvsafe-no-such-library.so.9", "libm.so.6"])
def test_without_libcrypto_or_its_functions_there_is_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "LIBCRYPTO", name)
    assert _gone()


@pytest.mark.usefixtures("unloaded")
def test_a_shared_object_of_other_sizes_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "sizes_of", lambda *of: (*sizes_of(*of)[:-1], 80))
    assert _gone()


class _Always:
    """A library that says the same to all rows."""

    def __init__(self, answer: int, but_first: int | None = None) -> None:
        self._answer, self._first = answer, but_first

    def kvsafe_open(self, count: Any, *arguments: Any) -> None:
        """As in C."""
        for at in range(count.value):
            first = at == 0 and self._first is not None
            arguments[-1][at] = self._first if first else self._answer


@pytest.mark.parametrize("library", [_Always(0), _Always(1), _Always(2), _Always(0, 1)])
def test_a_library_that_knows_no_right_from_wrong_is_not_used(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = native()
    assert found is not None
    monkeypatch.setattr(batch, "native", lambda: Native(library, found.crypto))
    assert batch_opener(expectation(World(GMAC)), len(KEY)) is None


def test_a_libcrypto_without_gmac_is_refused() -> None:
    """Asked for a state of an algorithm that is not there, OpenSSL would read from nowhere."""
    right = ctypes.CDLL(LIBCRYPTO)

    class Without:
        """The library, without one algorithm."""

        EVP_MAC_fetch = staticmethod(lambda _, name, __: None if name == b"GMAC" else 1)

        def __getattr__(self, name: str) -> Any:
            return getattr(right, name)

    without: Any = Without()
    with pytest.raises(ValueError, match="without HMAC or GMAC"):
        batch._crypto(without)


# --- a libcrypto that fails ----------------------------------------------------------------------


def _spied(name: str, change: Change) -> Spied:
    found = native()
    assert found is not None
    return Spied(found, name, change)


def _opener(spied: Spied) -> BatchOpener:
    return BatchOpener(spied.native, expectation(world_of("two writers")), len(KEY))


@pytest.mark.parametrize("told", [0, -1, 2])
@pytest.mark.parametrize("name", FALLIBLE)
def test_no_row_is_taken_whose_cryptography_failed(name: str, told: int) -> None:
    row = made("right: two writers")
    counted = _spied(name, quiet)
    assert says(_opener(counted), row)
    assert counted.calls >= 2
    for at in range(counted.calls):
        assert not says(_opener(_spied(name, failing(at, told))), row), at


def test_no_row_is_taken_whose_tag_has_another_length() -> None:
    row = made("right: two writers")
    for at in range(7):
        assert not says(_opener(_spied("EVP_MAC_final", shortening(at))), row), at
    assert says(_opener(_spied("EVP_MAC_final", shortening(7))), row)


def test_without_memory_for_a_state_no_row_is_taken() -> None:
    row = made("right: two writers")
    counted = _spied("EVP_MAC_CTX_new", quiet)
    assert says(_opener(counted), row)
    assert counted.calls >= 2
    for at in range(counted.calls):
        opener = _opener(_spied("EVP_MAC_CTX_new", failing(at)))
        assert not says(opener, row), at
        # The second time all calls are made well.
        assert says(opener, row), at


@pytest.mark.parametrize("count", [0, 1, 5])
def test_every_state_is_given_back(count: int) -> None:
    rows = [memoryview(bytearray(made("right: two writers")))] * count
    calls = []
    for name in STATES:
        spied = _spied(name, quiet)
        assert _opener(spied).right(rows, [KEY] * count, EPOCH) == [True] * count
        calls.append(spied.calls)
    assert calls[0] == calls[1] >= 2


def test_a_row_that_changes_after_its_header_was_checked_changes_no_answer() -> None:
    row, late = late_header()

    def change(number: int, result: int, _: Any) -> int:
        if number == 0:
            row[:4096] = late
        return result

    opener = _opener(_spied("CRYPTO_memcmp", change))
    assert opener.right([memoryview(row)], [KEY], EPOCH) == [False]
    assert row[:4096] == late

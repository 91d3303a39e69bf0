# SPDX-License-Identifier: Apache-2.0
"""Faults inside a batch: its own system calls fail, hang, and are the last ones of a process."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fuzz.campaigns import batches
from fuzz.campaigns.batches import MANY, FaultyBatch
from fuzz.campaigns.rows import ROW, is_content_of, name_of, row_of
from kvsafe.tiers import LOAD, STORE, Answer, ChunkStore, Outcome, Pool, StoreSetting, Ticket
from kvsafe.tiers.batch import Batch
from kvsafe.tiers.calls import QuickOs
from kvsafe.tiers.storing import Storing
from tests.tiers.stores import MEMORY, temporaries

FAULTY = FaultyBatch.build()
pytestmark = pytest.mark.skipif(FAULTY is None, reason="no C compiler")
WAIT_S = 30.0


def test_every_call_may_fail_and_be_the_last() -> None:
    found, met = batches.campaign(0.03, seed=1, base=MEMORY)
    assert found.faults == []
    assert met["met"] > 40 and met["killed"] > 3 and met["not met"] == 0


def test_a_write_whose_error_is_not_heard_is_found() -> None:
    made = Batch.store

    def deaf(self: Batch, *args: Any) -> None:
        made(self, *args)
        args[-1][:] = [0 for _ in args[-1]]

    with patch.object(Batch, "store", deaf), _only("put"):
        found, _ = batches.campaign(0.1, seed=1, base=MEMORY)
    assert found.lost


def test_room_that_is_not_given_back_is_found() -> None:
    deaf = patch.object(Storing, "undo", lambda self, *args: Outcome(Answer.UNREACHABLE))
    with deaf, _only("put"):
        found, _ = batches.campaign(0.1, seed=1, base=MEMORY)
    assert found.account and found.leftover


@contextmanager
def _only(name: str) -> Iterator[None]:
    [one] = [operation for operation in batches.OPERATIONS if operation.name == name]
    with patch.object(batches, "OPERATIONS", (one,)):
        yield


@contextmanager
def _store(root: Path, **changes: Any) -> Iterator[tuple[ChunkStore, FaultyBatch]]:
    assert FAULTY is not None
    FAULTY.plan(0, 0)
    store = ChunkStore(StoreSetting(str(root), ROW, 64 * ROW, **changes), QuickOs(), FAULTY)
    try:
        assert store.keeper.wait_counted()
        yield store, FAULTY
    finally:
        FAULTY.plan(0, 0)
        store.close()


@pytest.mark.parametrize("sync", ["none", "data", "full"])
def test_bytes_are_on_the_disk_before_they_have_their_name(tmp_path: Path, sync: str) -> None:
    with _store(tmp_path / "s", sync=sync) as (store, faulty):
        batches.put_many(store)
        made = faulty.made
    one = ["fstatat", "openat", "pwrite", "fdatasync", "close", "renameat2"]
    if sync == "none":
        one.remove("fdatasync")
    assert [call for call in made if call != "fsync"] == len(MANY) * one


def _answers(pool: Pool, count: int) -> dict[object, object]:
    end, seen = time.monotonic() + WAIT_S, dict[object, object]()
    while len(seen) < count and time.monotonic() < end:
        seen.update(pool.poll())
        time.sleep(0.001)
    return seen


def test_a_call_that_hangs_costs_its_batch_and_no_more(tmp_path: Path) -> None:
    """F14: late, the next one served, and nothing lands in the rows when it comes back."""
    skew = 0.0
    with _store(tmp_path / "s") as (store, faulty):
        batches.put_many(store)
        into = [memoryview(bytearray(ROW)) for _ in MANY]
        names = [name_of(number) for number in MANY]
        pool = Pool([(LOAD,)], 5.0, 1, lambda: time.monotonic() + skew)
        try:
            faulty.plan(_first(faulty, "pread", lambda: store.get_all(names, into)), batches.STALL)
            for row in into:
                row[:] = bytes(ROW)
            pool.submit(LOAD, "stuck", lambda ticket: _load(store, names, into, ticket))
            end = time.monotonic() + WAIT_S
            while not faulty.stalled and time.monotonic() < end:
                time.sleep(0.001)
            assert faulty.stalled
            skew += 6.0
            [late] = _answers(pool, 1).values()
            assert isinstance(late, Outcome) and late.answer is Answer.LATE
            other = [memoryview(bytearray(ROW))]
            pool.submit(LOAD, "next", lambda ticket: store.get_all(names[:1], other))
            assert _answers(pool, 1) == {"next": [Outcome(Answer.DONE)]}
            assert is_content_of(MANY[0], other[0])
        finally:
            faulty.plan(0, 0)
            assert pool.stop(WAIT_S)
        assert _landed == []


@pytest.mark.parametrize("call", ["pwrite", "renameat2"])
def test_a_store_that_hangs_over_the_end_stores_nothing_afterwards(
    tmp_path: Path, call: str
) -> None:
    """Its folders stay open, so no number of theirs becomes one of a foreign folder."""
    assert FAULTY is not None
    root = tmp_path / "s"
    store = ChunkStore(StoreSetting(str(root), ROW, 64 * ROW), QuickOs(), FAULTY)
    assert store.keeper.wait_counted()
    pool = Pool([(STORE,)], 60.0, 1, time.monotonic)
    ended: list[object] = []
    names = [name_of(number) for number in MANY]
    rows = [memoryview(bytearray(row_of(number))) for number in MANY]

    def work(ticket: Ticket) -> list[Outcome]:
        ended.append(store.put_all(names, rows, ticket))
        return []

    try:
        # Each file takes five calls; one of the second one's hangs.
        FAULTY.plan(8 if call == "pwrite" else 10, batches.STALL)
        pool.submit(STORE, "stuck", work)
        _wait(lambda: FAULTY.stalled)
        assert FAULTY.made[-1] == call
        assert not pool.stop(0.1)
        store.close(stuck=True)
        still = {os.fstat(handle.fd).st_ino for handle in store.folders._buckets.values()}
        assert len(still) == len({store.folders.place(name)[0] for name in names})
    finally:
        FAULTY.plan(0, 0)
    _wait(lambda: bool(ended))
    assert temporaries(root) == []
    # What has its name by then is whole; what was only written has gone.
    files = [path.read_bytes() for path in (root / "objects").rglob("*.chunk")]
    assert len(files) == (1 if call == "pwrite" else 2)
    assert set(files) == {row_of(number) for number in MANY[: len(files)]}
    store.close()


def _wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not until() and time.monotonic() < end:
        time.sleep(0.001)
    assert until()


@pytest.mark.parametrize("call", ["openat", "pwrite", "fdatasync", "renameat2"])
@pytest.mark.parametrize("code", [errno.EINTR, errno.EINVAL, errno.ENOENT, errno.EEXIST])
def test_an_error_in_a_batch_is_that_of_its_file_by_itself(
    tmp_path: Path, call: str, code: int
) -> None:
    """Made once: by itself the file is stored, as it would have been without a batch."""
    with _store(tmp_path / "s", sync="data") as (store, faulty):
        at = _first(faulty, call, lambda: batches.put_many(store))
        for number in MANY:
            assert store.discard(name_of(number))
        faulty.plan(at, batches.FAIL_BEFORE, code)
        assert [outcome.answer for outcome in batches.put_many(store)] == [Answer.DONE] * 5
        assert temporaries(tmp_path / "s") == [] and store.room._in_flight == 0


_landed: list[str] = []


def _load(
    store: ChunkStore, names: Sequence[bytes], into: Sequence[memoryview], ticket: Any
) -> list[Outcome]:
    """As the tier does it: the rows are touched only if the work can still be claimed."""
    outcomes = store.get_all(list(names), list(into), ticket)
    if ticket.claim():
        _landed.append("rows")
    return outcomes


def _first(faulty: FaultyBatch, call: str, act: Any) -> int:
    """The number of the first call of a kind in what `act` does."""
    faulty.plan(0, 0)
    act()
    return faulty.made.index(call) + 1


def test_what_was_written_is_right_and_nothing_else_is(tmp_path: Path) -> None:
    """The positive control of all above: without a fault all five are there, and no more."""
    with _store(tmp_path / "s") as (store, _):
        assert [outcome.answer for outcome in batches.put_many(store)] == [Answer.DONE] * 5
        assert all(outcome.good for outcome in batches.get_many(store))
        assert batches.look_at_many(store) == [True] * 5 + [False]
        files = sorted((tmp_path / "s" / "objects").rglob("*.chunk"))
        assert [path.read_bytes() for path in files] == sorted(
            (row_of(number) for number in MANY), key=[path.read_bytes() for path in files].index
        )

# SPDX-License-Identifier: Apache-2.0
"""F15: capacity and reserve hold at every moment, whatever fails and whoever dies."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvsafe.tiers import Answer, ChunkStore
from tests.tiers.faults import FULL, FaultyOs, failing, failing_after, short
from tests.tiers.stores import (
    ROW,
    holds,
    name_of,
    path_of,
    put,
    quarantined,
    setting,
    store_at,
    temporaries,
    used,
)

CALLS_OF_A_PUT = (
    "stat",
    "open",
    "fstat",
    "mkdir",
    "write",
    "fdatasync",
    "close",
    "publish",
    "fsync",
)


def test_three_times_the_capacity(tmp_path: Path) -> None:
    with store_at(tmp_path / "s", capacity_bytes=10 * ROW) as store:
        for number in range(30):
            assert put(store, number).answer is Answer.DONE
            assert used(tmp_path / "s") <= 10 * ROW
        assert [number for number in range(30) if holds(store, number)] == list(range(20, 30))
        assert store.room.evicted["chunk"] == 20


def test_what_was_used_lately_stays(tmp_path: Path) -> None:
    calls = FaultyOs()
    with store_at(tmp_path / "s", calls, capacity_bytes=4 * ROW) as store:
        for number in range(4):
            assert put(store, number).good
        calls.skew_s = 100
        assert holds(store, 0)
        calls.skew_s = 101
        put(store, 4)
        put(store, 5)
        assert [number for number in range(6) if path_of(store, number).exists()] == [0, 3, 4, 5]


def test_the_account_is_exact_when_nothing_went_wrong(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        for number in range(7):
            put(store, number)
        store.room.return_unspent()
        assert store.charged == 7 * ROW == used(tmp_path / "s")
        store.discard(b"\1" * 36)
        store.quarantine(b"\1" * 36, 1, "nothing there")
        assert store.charged == 7 * ROW
    with store_at(tmp_path / "s") as store:
        assert store.charged == 7 * ROW


def test_quarantined_files_count_and_can_be_evicted(tmp_path: Path) -> None:
    with store_at(tmp_path / "s", capacity_bytes=4 * ROW) as store:
        for number in range(4):
            put(store, number)
        path_of(store, 0).chmod(0o644)
        assert not holds(store, 0)
        assert len(quarantined(tmp_path / "s")) == 1
        for number in range(10, 14):
            put(store, number)
            assert used(tmp_path / "s") <= 4 * ROW
        store.keeper.recount()
        for number in range(20, 24):
            assert put(store, number).answer is Answer.DONE
            assert used(tmp_path / "s") <= 4 * ROW
        assert quarantined(tmp_path / "s") == []
        assert store.room.evicted["quarantined"] == 1


@pytest.mark.parametrize("code", [*FULL, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("what", CALLS_OF_A_PUT)
def test_an_error_at_each_call_of_a_store(tmp_path: Path, what: str, code: int) -> None:
    """The call fails without, and then after, having done its work."""
    for make in (failing, failing_after):
        calls = FaultyOs()
        root = tmp_path / make.__name__
        with store_at(root, calls, sync="full", capacity_bytes=8 * ROW) as store:
            put(store, 0)
            calls.only_threads = ("MainThread",)
            for place in range(1, 12):
                plan = calls.plan(what, make(code), place, 1)
                outcome = put(store, place)
                assert outcome.answer in Answer
                assert used(root) <= 8 * ROW
                calls.calm()
                assert not path_of(store, place).exists() or holds(store, place)
                if not plan.hits:
                    break
            else:
                pytest.fail("the plan was hit every time")
            assert put(store, 99).answer is Answer.DONE
            assert temporaries(root) == []
            store.keeper.recount()
            store.room.return_unspent()
            assert used(root) <= store.charged <= 8 * ROW


@pytest.mark.parametrize("code", FULL)
def test_a_full_disk_is_no_room_and_goes_away(tmp_path: Path, code: int) -> None:
    calls = FaultyOs()
    with store_at(tmp_path / "s", calls) as store:
        put(store, 0)
        for what in ("open", "write", "publish"):
            calls.only_threads = ("MainThread",)
            # The bucket is opened before the file: let opens of folders pass.
            put(store, 1)
            path_of(store, 1).unlink()
            calls.plan(what, failing(code))
            assert put(store, 1).answer is Answer.NO_ROOM
            calls.calm()
            assert put(store, 1).answer is Answer.DONE
            assert holds(store, 0)


def test_a_leftover_that_cannot_be_removed_stays_paid_for(tmp_path: Path) -> None:
    calls = FaultyOs()
    root = tmp_path / "s"
    with store_at(root, calls, capacity_bytes=4 * ROW) as store:
        calls.only_threads = ("MainThread",)
        calls.plan("publish", failing(errno.EIO), 1, 2)
        calls.plan("unlink", failing(errno.EIO), 1, 2)
        assert not put(store, 1).good
        assert not put(store, 2).good
        assert len(temporaries(root)) == 2
        for number in range(10, 20):
            put(store, number)
            assert used(root) <= 4 * ROW
        assert sum(holds(store, number) for number in range(10, 20)) == 2
    with store_at(root, capacity_bytes=4 * ROW) as store:
        assert temporaries(root) == []
        for number in range(30, 40):
            assert put(store, number).good
        assert sum(holds(store, number) for number in range(30, 40)) == 4


def test_the_reserve_is_left_alone(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    too_much = free.f_bavail * free.f_frsize + (1 << 30)
    with store_at(tmp_path / "s", reserve_bytes=too_much) as store:
        assert put(store, 1).answer is Answer.NO_ROOM
    with store_at(tmp_path / "s", reserve_bytes=1) as store:
        assert put(store, 1).answer is Answer.DONE


def test_a_ledger_that_is_lost_or_damaged_is_counted_anew(tmp_path: Path) -> None:
    root = tmp_path / "s"
    for damage in (b"", b"\0" * 80, b"\xff" * 80, b"KVSFSL01" + b"\1" * 72):
        with store_at(root, capacity_bytes=4 * ROW) as store:
            for number in range(4):
                put(store, number)
        (root / "ledger").write_bytes(damage)
        with store_at(root, capacity_bytes=4 * ROW) as store:
            assert store.charged == 4 * ROW
            assert put(store, 50).answer is Answer.DONE
            assert used(root) <= 4 * ROW
            path_of(store, 50).unlink()


def test_a_smaller_capacity_after_a_restart(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        for number in range(12):
            put(store, number)
    with store_at(tmp_path / "s", capacity_bytes=5 * ROW) as store:
        store.keeper.tick()
        assert used(tmp_path / "s") <= 5 * ROW
        assert put(store, 20).answer is Answer.DONE
        assert used(tmp_path / "s") <= 5 * ROW


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A real file system of 64 rows; skipped where this user may not mount one."""
    point = tmp_path / "disk"
    point.mkdir()
    size = f"size={64 * ROW}"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "none", str(point)], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("no right to mount a tmpfs")
    return point


def test_a_small_real_disk(small_disk: Path) -> None:
    try:
        _fill_and_go_on(small_disk)
    finally:
        subprocess.run(["umount", str(small_disk)], check=True)


def _fill_and_go_on(disk: Path) -> None:
    root = disk / "s"
    with store_at(root, capacity_bytes=1000 * ROW) as store:
        answers = [put(store, number).answer for number in range(80)]
        assert answers[:50] == [Answer.DONE] * 50
        assert answers[-1] is Answer.NO_ROOM
        assert set(answers) == {Answer.DONE, Answer.NO_ROOM}
        assert all(
            holds(store, number) == (answer is Answer.DONE) for number, answer in enumerate(answers)
        )
        assert temporaries(root) == []
        path_of(store, 0).unlink()
        path_of(store, 1).unlink()
        assert put(store, 100).answer is Answer.DONE
    with store_at(root, capacity_bytes=1000 * ROW, reserve_bytes=20 * ROW) as store:
        # Others need room: the reserve is restored by eviction, and held.
        store.keeper.tick()
        for number in range(200, 210):
            assert put(store, number).answer is Answer.DONE
            info = os.statvfs(disk)
            assert info.f_bavail * info.f_frsize >= 20 * ROW


def test_nothing_is_written_without_a_known_account(tmp_path: Path) -> None:
    calls = FaultyOs()
    calls.plan("listing", failing(errno.EIO))
    store = ChunkStore(setting(tmp_path / "s"), calls)
    try:
        assert put(store, 1).answer is Answer.NO_ROOM
        calls.calm()
        store.keeper.recount()
        assert store.keeper.wait_counted()
        assert put(store, 1).answer is Answer.DONE
    finally:
        store.close()


@pytest.mark.parametrize("length", [0, 1])
def test_nothing_is_evicted_while_the_account_is_not_known(tmp_path: Path, length: int) -> None:
    """A short read of the ledger says nothing of the room that there is."""
    calls = FaultyOs()
    with store_at(tmp_path / "s", calls, capacity_bytes=100 * ROW) as store:
        for number in range(3):
            assert put(store, number).good
        store.room.return_unspent()
        calls.only_threads = ("MainThread",)
        plan = calls.plan("read", short(length), 1, 1)
        assert put(store, 4).answer in (Answer.DONE, Answer.NO_ROOM)
        assert plan.hits == 1
        assert store.room.evicted["chunk"] == 0
        assert [holds(store, number) for number in range(3)] == [True] * 3
        # Control: the account is known again after a count, and stores go on.
        store.keeper.recount()
        assert store.keeper.wait_counted(2)
        assert put(store, 4).good


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("what", ["open", "fstat", "listing"])
def test_a_bucket_that_cannot_be_listed_is_not_empty(tmp_path: Path, what: str, code: int) -> None:
    """Each call of a count, in turn, once and from then on: the account never says too little."""
    calls = FaultyOs()
    calls.only_threads = ("MainThread",)
    with store_at(tmp_path / "s", calls) as store:
        for number in range(3):
            put(store, number)
        store.keeper.stop(10)
        store.keeper._stop = False
        store.room.return_unspent()
        for times in (1, 1 << 30):
            for at in range(1, 30):
                plan = calls.plan(what, failing(code), at, times)
                _tick(store)
                assert store.charged >= used(tmp_path / "s") == 3 * ROW
                calls.calm()
                if not plan.hits:
                    break
            else:
                pytest.fail("the plan was hit every time")
        before = store.keeper.counts
        _tick(store)
        assert store.keeper.counts == before + 1
        assert store.charged == 3 * ROW


def test_a_bucket_that_is_held_open_and_made_anew_is_counted(tmp_path: Path) -> None:
    calls = FaultyOs()
    calls.only_threads = ("MainThread",)
    with store_at(tmp_path / "s", calls) as store:
        put(store, 1)
        store.keeper.stop(10)
        store.keeper._stop = False
        bucket = path_of(store, 1).parent
        bucket.rename(tmp_path / "s" / "moved")
        shutil.copytree(tmp_path / "s" / "moved", bucket)
        shutil.rmtree(tmp_path / "s" / "moved")
        store.room.return_unspent()
        _tick(store)
        assert store.keeper.errors == {}
        assert store.keeper.counted.files == 1
        assert store.charged == ROW


def _tick(store: ChunkStore) -> None:
    store.keeper.want_count()
    store.keeper.counted.seconds = 0.0
    store.keeper.tick()


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_lease_that_cannot_be_read_is_not_taken_for_empty(tmp_path: Path, code: int) -> None:
    """What another writer may write while a count runs is in no folder yet."""
    calls = FaultyOs()
    calls.only_threads = ("MainThread",)
    with store_at(tmp_path / "s") as other, store_at(tmp_path / "s", calls) as store:
        assert put(other, 1).good
        held = other.room.held
        assert held > 0
        store.keeper.stop(10)
        store.keeper._stop = False
        for what in ("open", "read"):
            for at in range(1, 20):
                plan = calls.plan(what, failing(code), at, 1)
                _tick(store)
                calls.calm()
                assert store.charged >= ROW + held
                if not plan.hits:
                    break


@pytest.mark.parametrize("at", range(1, 9))
def test_a_file_that_is_moved_while_it_is_counted_is_counted(tmp_path: Path, at: int) -> None:
    calls = FaultyOs()
    calls.only_threads = ("MainThread",)
    with store_at(tmp_path / "s", calls) as store:
        for number in range(3):
            put(store, number)
        store.keeper.stop(10)
        store.keeper._stop = False
        store.room.return_unspent()
        assert store.charged == 3 * ROW

        def moved(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for number in range(3):
                store.quarantine(name_of(number), 1, "moved")
            return function(*args, **kwargs)

        calls.plan("listing", moved, at, 1)
        store.keeper.want_count()
        store.keeper.counted.seconds = 0.0
        store.keeper.tick()
        assert store.charged >= used(tmp_path / "s") == 3 * ROW


@pytest.mark.parametrize("there", range(1, 8))
@pytest.mark.parametrize("back", range(1, 8))
def test_a_file_that_is_put_back_while_it_is_counted_is_counted(
    tmp_path: Path, there: int, back: int
) -> None:
    calls = FaultyOs()
    calls.only_threads = ("MainThread",)
    with store_at(tmp_path / "s", calls) as store:
        put(store, 0)
        store.keeper.stop(10)
        store.keeper._stop = False
        store.room.return_unspent()
        folders = store.folders
        bucket, file = folders.place(name_of(0))

        def go(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            os.rename(path_of(store, 0), tmp_path / "s" / "kvsafe-quarantine" / "x")
            return function(*args, **kwargs)

        def come(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not path_of(store, 0).exists():
                with folders.bucket(bucket) as folder:
                    store._quarantine._put_back(folder, file, "x")
            return function(*args, **kwargs)

        calls.plan("listing", come, back, 1)
        calls.plan("listing", go, there, 1)
        store.keeper.want_count()
        store.keeper.counted.seconds = 0.0
        store.keeper.tick()
        assert store.charged >= used(tmp_path / "s") == ROW

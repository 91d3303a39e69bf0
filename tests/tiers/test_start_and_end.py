# SPDX-License-Identifier: Apache-2.0
"""F25: a store that starts on a bad day, and one that ends on it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsafe.tiers import Answer, ChunkStore, StoreRefused
from tests.tiers.faults import FULL, FaultyOs, failing, failing_after
from tests.tiers.stores import MIB, ROW, get, holds, name_of, path_of, put, setting, store_at

PLACES = 30
CALLS = ("open", "fstat", "flock", "read", "write", "close", "publish", "unlink")


def descriptors() -> set[str]:
    """What this process has open."""
    return set(os.listdir("/proc/self/fd"))


# ---- a start that fails ---------------------------------------------------------------------


@pytest.mark.parametrize("make", [failing, failing_after])
@pytest.mark.parametrize("what", CALLS)
def test_a_start_that_fails_keeps_nothing(
    tmp_path: Path, what: str, make: Callable[[int], Any]
) -> None:
    """At each call: it starts or is refused, and then nothing is open, locked or left."""
    root = tmp_path / "s"
    with store_at(root) as store:
        put(store, 1)
    before, refused = descriptors(), 0
    for place in range(1, PLACES):
        calls = FaultyOs()
        calls.only_threads = ("MainThread",)
        plan = calls.plan(what, make(errno.EIO), place, 1)
        try:
            ChunkStore(setting(root), calls).close()
        except StoreRefused:
            refused += 1
        # A fault that leaves something open is no test of who closes it.
        if (what, make) not in (("close", failing), ("open", failing_after)):
            assert descriptors() == before, f"{what} no. {place}"
        with store_at(root, lock_wait_s=0.5) as store:
            assert holds(store, 1)
            assert len(list((root / "leases").iterdir())) == 1
        if not plan.hits:
            break
    else:
        pytest.fail("the plan was hit every time")
    assert refused > 0 or what in ("close", "unlink", "flock", "read")


def test_a_root_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    calls = FaultyOs()
    calls.plan("fstat", failing(errno.EIO), 1, 1)
    before = descriptors()
    with pytest.raises(StoreRefused):
        ChunkStore(setting(tmp_path / "s"), calls)
    assert descriptors() == before


# ---- an end that fails ----------------------------------------------------------------------


@pytest.mark.parametrize("make", [failing, failing_after])
@pytest.mark.parametrize("what", ["close", "flock", "read", "write", "unlink"])
def test_an_end_that_fails_keeps_nothing(
    tmp_path: Path, what: str, make: Callable[[int], Any]
) -> None:
    root = tmp_path / "s"
    before = descriptors()
    for place in range(1, PLACES):
        calls = FaultyOs()
        store = ChunkStore(setting(root), calls)
        assert store.keeper.wait_counted()
        store.discard(name_of(1))
        assert put(store, 1).answer is Answer.DONE
        calls.only_threads = ("MainThread",)
        plan = calls.plan(what, make(errno.EIO), place, 1)
        store.close()
        if make is failing_after or what != "close":
            assert descriptors() == before, f"{what} no. {place}"
        with store_at(root, lock_wait_s=0.5) as store:
            # Nobody holds the ledger, and what the other held is settled by the first count.
            assert len(list((root / "leases").iterdir())) == 1
            store.keeper.recount()
            assert store.keeper.wait_counted(2)
            assert store.charged == ROW
        if not plan.hits:
            break
    else:
        pytest.fail("the plan was hit every time")


def test_a_second_close_does_nothing(tmp_path: Path) -> None:
    store = ChunkStore(setting(tmp_path / "s"))
    store.close()
    store.close()
    assert store.counts["close failed"] == 1


def test_an_unlock_that_fails_leaves_no_lock(tmp_path: Path) -> None:
    """Others can go on at once, not only when this process ends."""
    calls = FaultyOs()
    root = tmp_path / "s"
    with store_at(root, calls) as store, store_at(root, lock_wait_s=0.5) as other:
        calls.only_threads = ("MainThread",)
        for place in (1, 2):
            # The first flock of a grant locks, and fails after that; the second unlocks.
            store.room.return_unspent()
            other.room.return_unspent()
            plan = calls.plan("flock", failing_after(errno.EIO), place, 1)
            assert put(store, place).answer in (Answer.DONE, Answer.UNREACHABLE)
            assert plan.hits == 1
            assert put(other, 10 + place).answer is Answer.DONE


# ---- a full disk ----------------------------------------------------------------------------


def _no_new_bytes(calls: FaultyOs, code: int) -> None:
    """No file can be made, and nothing written: what a full disk says at its worst."""

    def opening(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        name, flags = args[0], args[1]
        if flags & os.O_CREAT and not _is_there(name, kwargs["dir_fd"]):
            raise OSError(code, os.strerror(code))
        return function(*args, **kwargs)

    calls.plan("open", opening)
    calls.plan("write", failing(code))


def _is_there(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@pytest.mark.parametrize("code", FULL)
@pytest.mark.parametrize("ledger", ["there", "of another boot", "gone"])
def test_a_full_disk_serves_and_stores_when_there_is_space(
    tmp_path: Path, code: int, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "s"
    with store_at(root) as store:
        put(store, 1)
    if ledger == "gone":
        (root / "ledger").unlink()
    elif ledger == "of another boot":
        monkeypatch.setattr("kvsafe.tiers.ledger.boot_id", lambda: bytes(range(16)))
    calls = FaultyOs()
    _no_new_bytes(calls, code)
    store = ChunkStore(setting(root), calls)
    try:
        assert store.look([b"\1" * 36]) == [False]
        assert holds(store, 1)
        assert put(store, 1).answer is Answer.PRESENT
        assert put(store, 2).answer is Answer.NO_ROOM
        assert store.room.evicted["chunk"] == 0
        calls.calm()
        store.keeper.recount()
        assert store.keeper.wait_counted()
        assert put(store, 2).answer is Answer.DONE
        assert holds(store, 1)
        store.room.return_unspent()
        assert store.charged == 2 * ROW
        assert [path.name for path in (root / "leases").iterdir()] == [store.lease.name]
    finally:
        store.close()


@pytest.mark.parametrize("code", FULL)
def test_a_full_disk_without_a_store_is_refused(tmp_path: Path, code: int) -> None:
    calls = FaultyOs()
    calls.plan("mkdir", failing(code))
    with pytest.raises(StoreRefused, match="cannot be used"):
        ChunkStore(setting(tmp_path / "s"), calls)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB; skipped where this user may not mount one."""
    point = tmp_path / "disk"
    point.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={MIB}", "none", str(point)]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_real_disk_that_is_full_before_the_start(small_disk: Path) -> None:
    root, filler = small_disk / "s", small_disk / "filler"
    with store_at(root) as store:
        assert put(store, 1).good
    with open(filler, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        for _ in range(2 * MIB // 4096):
            file.write(bytes(4096))
    store = ChunkStore(setting(root))
    try:
        assert holds(store, 1)
        assert put(store, 2).answer is Answer.NO_ROOM
        filler.unlink()
        store.keeper.recount()
        assert store.keeper.wait_counted()
        assert put(store, 2).answer is Answer.DONE
    finally:
        store.close()


# ---- what a killed start leaves -------------------------------------------------------------


def test_probes_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with store_at(root):
        pass
    dead, renamed, alive = (root / f"probe-{name}" for name in ("1", "2-", "3"))
    for path in (dead, renamed, alive):
        path.write_bytes(b"")
    (root / "probe-folder").mkdir()
    with open(alive, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with store_at(root) as store:
            left = sorted(path.name for path in root.iterdir() if "probe" in path.name)
            assert left == ["probe-3", "probe-folder"]
            assert store.keeper.swept == 2
    with store_at(root):
        assert not alive.exists()


def test_a_start_whose_probe_is_swept_makes_another(tmp_path: Path) -> None:
    calls = FaultyOs()
    root = tmp_path / "s"

    def sweep(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        for path in root.glob("probe-*"):
            path.unlink()
        return function(*args, **kwargs)

    plan = calls.plan("publish", sweep, 1, 1)
    with store_at(root, calls) as store:
        assert plan.hits == 1
        assert put(store, 1).good
        assert list(root.glob("probe-*")) == []


# ---- names that survive a power loss -------------------------------------------------------


def _synced(calls: FaultyOs) -> set[tuple[int, int]]:
    """From now on, which folders are synced: (device, inode)."""
    folders: set[tuple[int, int]] = set()

    def note(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        info = os.fstat(args[0])
        function(*args, **kwargs)
        folders.add((info.st_dev, info.st_ino))

    calls.plan("fsync", note)
    return folders


def _id(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_dev, info.st_ino


@pytest.mark.parametrize("sync", ["full", "data"])
def test_the_first_store_syncs_every_name_on_the_way_to_it(tmp_path: Path, sync: str) -> None:
    calls = FaultyOs()
    root = tmp_path / "new" / "s"
    with store_at(root, calls, sync=sync) as store:
        synced = _synced(calls)
        assert put(store, 1).answer is Answer.DONE
        way = [*path_of(store, 1).parents][:5]
        assert way[-1] == tmp_path
        assert {_id(path) for path in way} <= synced if sync == "full" else synced == set()
        once = calls.made["fsync"]
        assert put(store, 2).answer is Answer.DONE
        assert calls.made["fsync"] == once + (2 if sync == "full" else 0)


def test_a_way_that_cannot_be_synced_is_no_store(tmp_path: Path) -> None:
    calls = FaultyOs()
    with store_at(tmp_path / "s", calls, sync="full") as store:
        calls.only_threads = ("MainThread",)
        plan = calls.plan("fsync", failing(errno.EIO), 3, 3)
        assert put(store, 1).answer is Answer.UNREACHABLE
        # It stands, but nobody knows for how long: present is said once it is synced.
        assert put(store, 1).answer is Answer.UNREACHABLE
        standing = store.standing(name_of(1))
        assert standing is not None
        assert standing.answer is Answer.UNREACHABLE
        assert plan.hits == 3
        assert store.standing(name_of(2)) is None
        assert put(store, 1).answer is Answer.PRESENT
        assert get(store, 1)[0].answer is Answer.DONE

# SPDX-License-Identifier: Apache-2.0
"""The disk store on a quiet day: what goes in comes out, and nobody else can look."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvsafe.tiers import Answer, ChunkStore, StoreRefused
from tests.tiers.faults import FaultyOs, Stall, stalled
from tests.tiers.stores import (
    ROW,
    get,
    holds,
    name_of,
    path_of,
    put,
    setting,
    store_at,
    temporaries,
)


@pytest.mark.parametrize("sync", ["none", "data", "full"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_what_goes_in_comes_out_also_after_a_restart(
    tmp_path: Path, sync: str, direct: str
) -> None:
    with store_at(tmp_path / "s", sync=sync, direct_io=direct) as store:
        assert store.look([name_of(1)]) == [False]
        assert get(store, 1)[0].answer is Answer.MISSING
        assert put(store, 1).answer is Answer.DONE
        assert put(store, 1).answer is Answer.PRESENT
        assert store.look([name_of(1), name_of(2)]) == [True, False]
        assert holds(store, 1)
        assert temporaries(tmp_path / "s") == []
    with store_at(tmp_path / "s", sync=sync, direct_io=direct) as store:
        assert holds(store, 1)
        assert not holds(store, 2)


def test_unaligned_rows_and_rows_of_odd_length(tmp_path: Path) -> None:
    with store_at(tmp_path / "s", row_bytes=5001) as store:
        assert not store.direct
        assert put(store, 1).answer is Answer.DONE
        assert holds(store, 1)


def test_modes_are_private(tmp_path: Path) -> None:
    root = tmp_path / "s"
    before = os.umask(0)
    try:
        with store_at(root) as store:
            put(store, 1)
            for folder, _, files in os.walk(root):
                assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
                for file in files:
                    assert stat.S_IMODE(os.stat(os.path.join(folder, file)).st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_descriptor_is_never_inherited(tmp_path: Path) -> None:
    with store_at(tmp_path / "s"):
        ours = [
            int(fd)
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
            and os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path))
        ]
        assert len(ours) >= 5
        assert not any(os.get_inheritable(fd) for fd in ours)


def test_close_leaves_no_descriptor_and_no_lease(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        put(store, 1)
    open_now = [os.readlink(f"/proc/self/fd/{fd}") for fd in _fds()]
    assert not [path for path in open_now if path.startswith(str(tmp_path))]
    assert list((tmp_path / "s" / "leases").iterdir()) == []


def _fds() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_root_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "s"
    root.mkdir(mode=0o700)
    root.chmod(mode)
    with pytest.raises(StoreRefused, match="mode"):
        ChunkStore(setting(root))
    root.chmod(0o755)
    with store_at(root) as store:
        assert put(store, 1).good


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_root_of_somebody_else_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "s"
    root.mkdir(mode=0o700)
    os.chown(root, 12345, -1)
    with pytest.raises(StoreRefused, match="belongs to user 12345"):
        ChunkStore(setting(root))


@pytest.mark.parametrize("part", ["objects", "leases", "kvsafe-quarantine"])
def test_a_folder_inside_that_is_not_ours_alone_is_refused(tmp_path: Path, part: str) -> None:
    root = tmp_path / "s"
    with store_at(root):
        pass
    (root / part).chmod(0o755)
    with pytest.raises(StoreRefused, match=part):
        ChunkStore(setting(root))
    (root / part).rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    (root / part).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreRefused):
        ChunkStore(setting(root))


def test_a_root_that_is_a_link_a_file_or_relative_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "link", tmp_path / "file", Path("relative")):
        with pytest.raises(StoreRefused):
            ChunkStore(setting(root))


def test_a_capacity_below_one_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="holds no row"):
        ChunkStore(setting(tmp_path / "s", capacity_bytes=ROW - 1))


def test_misuse_raises(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        with pytest.raises(ValueError, match="a row of"):
            store.put(name_of(1), memoryview(bytearray(ROW - 1)))
        with pytest.raises(ValueError, match="a buffer of"):
            store.get(name_of(1), memoryview(bytearray(ROW + 1)))
        with pytest.raises(ValueError, match="object name"):
            store.put(b"", memoryview(bytearray(ROW)))


def test_reads_are_served_while_the_first_count_is_stuck(tmp_path: Path) -> None:
    """F15: a restart over many files answers at once; only stores wait for the account."""
    with store_at(tmp_path / "s") as store:
        assert put(store, 1).good
    (tmp_path / "s" / "ledger").unlink()
    calls, stall = FaultyOs(), Stall()
    calls.plan("listing", stalled(stall))
    store = ChunkStore(setting(tmp_path / "s"), calls)
    try:
        assert stall.entered.wait(10)
        assert store.look([name_of(1)]) == [True]
        assert holds(store, 1)
        assert put(store, 2).answer is Answer.NO_ROOM
        calls.calm()
        stall.let_go.set()
        assert store.keeper.wait_counted()
        assert put(store, 2).good
    finally:
        stall.let_go.set()
        store.close()


def test_a_clean_restart_stores_before_any_count(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        assert put(store, 1).good
    calls, stall = FaultyOs(), Stall()
    calls.plan("listing", stalled(stall))
    store = ChunkStore(setting(tmp_path / "s"), calls)
    try:
        assert stall.entered.wait(10)
        assert put(store, 2).good
    finally:
        stall.let_go.set()
        store.close()


def aged(path: Path, seconds: float) -> None:
    """Make a file look as if it had been written that long ago."""
    info = path.stat()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns - int(seconds * 1e9)))


def test_time_to_live(tmp_path: Path) -> None:
    with store_at(tmp_path / "s", ttl_s=1000.0) as store:
        for number in range(5):
            put(store, number)
        aged(path_of(store, 0), 900)
        for number in range(1, 4):
            aged(path_of(store, number), 1100)
        assert holds(store, 0)
        assert not holds(store, 1)
        assert not path_of(store, 1).exists()
        assert store.look([name_of(2), name_of(4)]) == [False, True]
        assert put(store, 2).answer is Answer.DONE
        store.keeper.recount()
        assert [number for number in range(5) if path_of(store, number).exists()] == [0, 2, 4]
        store.room.return_unspent()
        assert store.charged == 3 * ROW


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    calls = FaultyOs()
    with store_at(tmp_path / "s", calls) as store:
        for number in range(4):
            put(store, number)
        calls.skew_s = 1000
        assert holds(store, 0)
        store.touch([name_of(2)])
        store.keeper.tick()
    with store_at(tmp_path / "s", capacity_bytes=4 * ROW) as store:
        put(store, 10)
        put(store, 11)
        assert [number for number in range(4) if path_of(store, number).exists()] == [0, 2]


def test_buckets_beyond_the_handle_limit(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        store.folders._handles = 3
        for number in range(20):
            assert put(store, number).good
        assert all(holds(store, number) for number in range(20))
        assert len(store.folders._buckets) == 3
    assert not [fd for fd in _fds() if str(tmp_path) in os.readlink(f"/proc/self/fd/{fd}")]


def test_a_chunk_that_was_not_seen_is_not_replaced(tmp_path: Path) -> None:
    """A file system that says "nothing there" of what is there costs one write and no chunk."""
    calls = FaultyOs()
    with store_at(tmp_path / "s", calls) as store:
        assert put(store, 1).answer is Answer.DONE
        before, held = path_of(store, 1).stat(), store.room.held
        plan = calls.plan("there", lambda function, args, kwargs: False)
        assert put(store, 1).answer is Answer.PRESENT
        assert plan.hits == 1
        calls.calm()
        after = path_of(store, 1).stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert store.room.held == held
        assert temporaries(tmp_path / "s") == []
        assert holds(store, 1)


def test_lookups_after_a_miss_see_the_next_hit_and_the_next_flaw(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        put(store, 2)
        put(store, 4)
        path_of(store, 4).chmod(0o644)
        names = [name_of(number) for number in range(1, 6)]
        assert store.look(names) == [False, True, False, False, False]
        assert store.counts["flaw"] == 1
        assert not path_of(store, 4).exists()

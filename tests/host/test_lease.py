# SPDX-License-Identifier: Apache-2.0
"""The gate and the sweep by themselves: what is told, what is waited for, who may come between."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from kvsafe.host import GateError, HostRegion, RegionError, RegionShape, lease, region
from kvsafe.host.lease import (
    GateTimeout,
    hold,
    is_last_holder,
    region_gate,
    region_prefix,
    sweep_dead_regions,
    unlink_if_same,
)


def _file(shm: Path, name: str) -> Path:
    path = shm / f"{region_prefix()}{name}.rows"
    path.touch(0o600)
    return path


def test_a_sweep_tells_what_it_removed_and_nothing_else(shm: Path) -> None:
    dead, alive, link = _file(shm, "dead"), _file(shm, "alive"), shm / f"{region_prefix()}l.rows"
    link.symlink_to(shm / "anything")
    (shm / f"{region_prefix()}folder.rows").mkdir()
    other = shm / f"{region_prefix()}other"
    other.touch()
    foreign = shm / "kvsafe-nobody-x.rows"
    foreign.touch()
    fd = os.open(alive, os.O_RDWR)
    hold(fd)
    assert sweep_dead_regions(shm) == [dead.name]
    left = sorted(os.listdir(shm))
    assert dead.name not in left and len(left) == 5
    os.close(fd)
    assert sweep_dead_regions(shm) == [alive.name]
    assert sweep_dead_regions(shm) == []


def test_a_file_that_another_process_removed_first_is_no_error(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(shm, "a")

    def removed_by_another(fd: int) -> bool:
        path.unlink(missing_ok=True)
        return True

    monkeypatch.setattr(lease, "is_last_holder", removed_by_another)
    assert sweep_dead_regions(shm) == [path.name]


def test_a_name_that_vanishes_while_it_is_looked_at_is_no_error(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(shm, "a")
    fd = os.open(path, os.O_RDWR)
    real = os.lstat

    def vanishing(name: Path) -> os.stat_result:
        found = real(name)
        path.unlink()
        return found

    monkeypatch.setattr(os, "lstat", vanishing)
    unlink_if_same(path, fd)
    monkeypatch.undo()
    unlink_if_same(path, fd)
    again = _file(shm, "a")
    unlink_if_same(path, fd)
    assert again.exists(), "another file under the same name"
    os.close(fd)


def test_a_file_that_cannot_be_removed_was_not(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(shm, "a")

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert sweep_dead_regions(shm) == []
    assert sweep_dead_regions(shm) == [path.name]


def test_who_waits_at_the_gate_sleeps(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    real = time.sleep

    def nap(seconds: float) -> None:
        naps.append(seconds)
        real(seconds)

    monkeypatch.setattr(time, "sleep", nap)
    with region_gate(shm):
        assert naps == [], "nobody was in front of it"
        with pytest.raises(GateTimeout, match="has held this lock for 0 s"), region_gate(shm, 0.05):
            pass
    assert naps and set(naps) == {0.01}
    with region_gate(shm, 0):
        pass


def test_the_last_holder_is_told_from_the_others(shm: Path) -> None:
    path = _file(shm, "a")
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    hold(first)
    hold(second)
    assert is_last_holder(first) is False
    os.close(first)
    assert is_last_holder(second) is True
    os.close(second)


def test_the_numbers_of_linux_and_of_the_region() -> None:
    # asm-generic/mman-common.h; Python has had no name for it for long.
    assert region._MADV_POPULATE_WRITE == 23
    assert region._FRONT.size <= region._EPOCH_AT < region.PAGE and region._EPOCH_AT % 8 == 0
    assert lease.GATE_WAIT_S == 30.0


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_refused_region_leaves_no_descriptor_open(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = RegionShape(3, 8192, 2)
    before = _descriptors()
    made = HostRegion.open("a", shape, shm)
    held = _descriptors()
    with pytest.raises(RegionError, match="another shape"):
        HostRegion.open("a", RegionShape(2, 8192, 2), shm)
    with monkeypatch.context() as patch:
        patch.setattr(region, "is_own_file", lambda fd: False)
        with pytest.raises(RegionError, match="not a file of this user"):
            HostRegion.open("a", shape, shm)
    with monkeypatch.context() as patch:
        patch.setattr(lease, "is_own_file", lambda fd: False)
        with pytest.raises(GateError, match="not a file of this user"):
            HostRegion.open("a", shape, shm)
        assert sweep_dead_regions(shm) == []
    assert _descriptors() == held
    made.close()
    assert _descriptors() == before
    assert sweep_dead_regions(shm) == []
    assert _descriptors() == before


def test_memory_that_is_just_enough_is_enough(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = RegionShape(3, 8192, 2)
    real = list(os.statvfs(shm))

    def free(size: int) -> None:
        # Unit of blocks, then blocks in all, free, and free to this user.
        values = [*real]
        values[1], values[2:5] = 1, [10 * size, size, size]
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))

    free(shape.total_bytes - 1)
    with pytest.raises(RegionError, match=f"has {shape.total_bytes - 1} bytes free"):
        HostRegion.open("a", shape, shm)
    free(shape.total_bytes)
    HostRegion.open("a", shape, shm).close()


def test_a_forgotten_name_is_free_for_the_next(shm: Path) -> None:
    shape = RegionShape(3, 8192, 2)
    first = HostRegion.open("a", shape, shm)
    first.row(0)[:1] = b"\x07"
    first.forget_name()
    assert not first.path.exists()
    assert bytes(first.row(0)[:1]) == b"\x07"
    second = HostRegion.open("a", shape, shm)
    assert second.created and bytes(second.row(0)[:1]) == b"\0"
    # The first one no longer owns the name, and does not take it away.
    first.forget_name()
    first.close()
    assert second.path.exists()
    second.close()
    assert not second.path.exists()


@pytest.mark.parametrize("length", [1, 2, 4096 - 36])
def test_a_registration_of_every_possible_length_is_read(shm: Path, length: int) -> None:
    made = HostRegion.open("a", RegionShape(1, 4096, 2), shm)
    document = bytes(range(256)) * 16
    made.register_worker(1, document[:length])
    assert made.registration(1) == document[:length]
    assert made.registration(0) is None
    made.close()


def test_a_registration_does_not_reach_into_the_next_page(shm: Path) -> None:
    made = HostRegion.open("a", RegionShape(1, 4096, 2), shm)
    for length, fine in ((4096 - 36, True), (4096 - 35, False)):
        body = bytes(made.memory[4096 + 36 : 4096 + 36 + length])
        digest = hashlib.sha256(body).digest()
        made.memory[4096 : 4096 + 36] = length.to_bytes(4, "little") + digest
        assert (made.registration(0) is not None) is fine
    empty = bytes(4) + hashlib.sha256(b"").digest()
    made.memory[4096 : 4096 + 36] = empty
    assert made.registration(0) is None
    made.close()

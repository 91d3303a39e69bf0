# SPDX-License-Identifier: Apache-2.0
"""Regions between real processes: made, joined, left, killed, swept, and never mistaken."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsafe.host import HostRegion, RegionShape, lease
from kvsafe.host.lease import region_prefix
from tests.host.processes import Child, ChildError, regions

SHAPE = RegionShape(3, 8192, 2)
Start = Callable[[], Child]


def test_workers_join_what_the_first_process_made(shm: Path, child: Start) -> None:
    first, second = child(), child()
    assert first.open("a", SHAPE) is True
    assert second.open("a", SHAPE) is False
    first.do("write", row=1, value=7)
    assert second.do("read", row=1) == 7
    assert second.do("read", row=0) == second.do("read", row=2) == 0
    generation = first.do("allocate", row=2)
    assert generation > 0
    assert second.do("generation", row=2) == generation
    first.do("announce", epoch=300)
    assert second.do("epoch") == 300
    assert len(regions(shm)) == 1


def test_of_many_that_come_at_once_one_makes_it(shm: Path, child: Start) -> None:
    children = [child() for _ in range(5)]
    (shm / f"{region_prefix()}stale.rows").write_bytes(b"")
    for one in children:
        one.tell("open", launch="a", shape=[3, 8192, 2])
    assert sorted(one.answer() for one in children) == [False] * 4 + [True]
    children[3].do("write", row=2, value=6)
    assert [one.do("read", row=2) for one in children] == [6] * 5
    for one in children:
        one.tell("close")
    for one in children:
        one.answer()
    assert regions(shm) == []


def test_the_last_process_removes_the_file(shm: Path, child: Start) -> None:
    first, second = child(), child()
    first.open("a", SHAPE)
    second.open("a", SHAPE)
    first.do("close")
    first.do("close")
    assert len(regions(shm)) == 1
    second.do("close")
    assert regions(shm) == []


def test_what_a_killed_engine_left_is_swept_at_the_next_start(shm: Path, child: Start) -> None:
    dead, worker, later = child(), child(), child()
    dead.open("a", SHAPE)
    worker.open("a", SHAPE)
    dead.kill()
    worker.kill()
    assert len(regions(shm)) == 1
    assert later.open("b", SHAPE) is True
    assert len(regions(shm)) == 1
    later.do("close")
    assert regions(shm) == []


def test_a_region_lives_while_one_worker_lives(shm: Path, child: Start) -> None:
    creator, worker, other = child(), child(), child()
    creator.open("a", SHAPE)
    worker.open("a", SHAPE)
    worker.do("write", row=0, value=9)
    creator.kill()
    other.open("b", SHAPE)
    assert other.do("sweep") == []
    assert len(regions(shm)) == 2
    assert worker.do("read", row=0) == 9
    late = child()
    assert late.open("a", SHAPE) is False
    assert late.do("read", row=0) == 9
    worker.kill()
    late.kill()
    assert len(other.do("sweep")) == 1


def test_a_restart_of_the_same_launch_after_a_kill_gets_fresh_memory(
    shm: Path, child: Start
) -> None:
    first = child()
    first.open("a", SHAPE)
    first.do("write", row=0, value=9)
    first.do("allocate", row=0)
    first.kill()
    second = child()
    assert second.open("a", SHAPE) is True
    assert (second.do("read", row=0), second.do("generation", row=0)) == (0, 0)


def test_two_launches_live_side_by_side(shm: Path, child: Start) -> None:
    left, right = child(), child()
    assert left.open("a", SHAPE) and right.open("b", SHAPE)
    left.do("write", row=0, value=1)
    right.do("write", row=0, value=2)
    assert (left.do("read", row=0), right.do("read", row=0)) == (1, 2)
    left.do("close")
    assert len(regions(shm)) == 1
    assert right.do("read", row=0) == 2


@pytest.mark.parametrize(
    "shape", [RegionShape(4, 8192, 2), RegionShape(3, 12288, 2), RegionShape(3, 8192, 1)]
)
def test_another_shape_does_not_join(shm: Path, child: Start, shape: RegionShape) -> None:
    first, second = child(), child()
    first.open("a", SHAPE)
    with pytest.raises(ChildError, match=r"RegionError.*another shape.*same configuration"):
        second.open("a", shape)
    assert len(regions(shm)) == 1
    assert second.open("a", SHAPE) is False


def test_after_its_name_is_forgotten_memory_goes_with_the_processes(
    shm: Path, child: Start
) -> None:
    first, second = child(), child()
    free = os.statvfs(shm).f_bfree
    big = RegionShape(8, 1 << 20, 1)
    first.open("a", big)
    second.open("a", big)
    first.do("forget")
    assert regions(shm) == []
    first.do("write", row=7, value=3)
    assert second.do("read", row=7) == 3
    assert os.statvfs(shm).f_bfree <= free - 2048 + 64
    first.kill()
    assert second.do("read", row=7) == 3
    second.kill()
    assert os.statvfs(shm).f_bfree > free - 1024


def test_a_forgotten_region_does_not_remove_its_successor(shm: Path, child: Start) -> None:
    first, second = child(), child()
    first.open("a", SHAPE)
    first.do("forget")
    assert second.open("a", SHAPE) is True
    second.do("write", row=0, value=5)
    first.do("forget")
    first.do("close")
    assert len(regions(shm)) == 1
    third = child()
    assert third.open("a", SHAPE) is False
    assert third.do("read", row=0) == 5


def test_a_program_that_a_process_started_does_not_keep_its_region(shm: Path, child: Start) -> None:
    first, later = child(), child()
    first.open("a", SHAPE)
    pid = first.do("fork", exec=True)
    try:
        first.kill()
        later.open("b", SHAPE)
        assert len(regions(shm)) == 1
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_fork_of_a_process_keeps_its_region(shm: Path, child: Start) -> None:
    first, later = child(), child()
    first.open("a", SHAPE)
    pid = first.do("fork", exec=False)
    try:
        first.kill()
        later.open("b", SHAPE)
        assert len(regions(shm)) == 2
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_gate_that_is_held_is_waited_for_and_then_given_up(shm: Path, child: Start) -> None:
    holder = child()
    holder.do("gate")
    with (
        pytest.raises(lease.GateTimeout, match="another process has held this lock"),
        lease.region_gate(shm, wait_s=0.05),
    ):
        pass
    holder.kill()
    with lease.region_gate(shm, wait_s=0.05):
        pass
    HostRegion.open("a", SHAPE, shm).close()


def test_closing_never_fails_on_a_gate_that_is_held(
    shm: Path, child: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = HostRegion.open("a", SHAPE, shm)
    holder = child()
    holder.do("gate")
    monkeypatch.setattr("kvsafe.host.lease.region_gate.__wrapped__.__defaults__", (0.05,))
    region.close()
    assert len(regions(shm)) == 1
    holder.kill()
    HostRegion.open("b", SHAPE, shm).close()
    assert regions(shm) == []

# SPDX-License-Identifier: Apache-2.0
"""F10, F26: several processes on one folder, some of them killed with SIGKILL."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvsafe.tiers import Answer
from tests.tidy.tree import ROOT
from tests.tiers.faults import FaultyOs, Stall, stalled
from tests.tiers.stores import (
    ROW,
    get,
    holds,
    name_of,
    path_of,
    put,
    row_of,
    store_at,
    temporaries,
    used,
)

KILLS = 30
NAMES = 40


class Writer:
    """One `writer_process`."""

    def __init__(self, root: Path, capacity: int, seed: int, rounds: int) -> None:
        words = [str(root), str(capacity), str(seed), str(NAMES), str(rounds)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tiers.writer_process", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> None:
        """Wait until it works."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.communicate()

    def end(self) -> dict[str, int]:
        """Tell it to stop and wait for its end; its counts."""
        out, _ = self.process.communicate(timeout=100)
        assert self.process.returncode == 0
        counts: dict[str, int] = json.loads(out.splitlines()[-1])
        return counts


def _all_right(root: Path) -> int:
    """Every chunk file on the disk is whole and right; how many there are."""
    wanted = {row_of(number) for number in range(NAMES)}
    files = list((root / "objects").rglob("*.chunk"))
    assert all(path.read_bytes() in wanted for path in files)
    return len(files)


def _at_a_moment(writers: list[Writer], root: Path) -> int:
    """Bytes in the store while everybody stands still.

    A walk among running writers would see a file and, after it was evicted or undone, also
    the one that took its room. The pause lets them run longer than they stand: without it a slow
    machine gives them no time at all.
    """
    time.sleep(0.02)
    stopped = [writer.process.pid for writer in writers if writer.process.poll() is None]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    for pid in stopped:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    try:
        return used(root)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def test_three_processes_at_random_under_a_quota(tmp_path: Path) -> None:
    root, capacity = tmp_path / "s", 16 * ROW
    writers = [Writer(root, capacity, seed, 300) for seed in range(3)]
    for writer in writers:
        writer.ready()
    most = 0
    for _ in range(40):
        present = _at_a_moment(writers, root)
        assert present <= capacity
        most = max(most, present)
    counts = [writer.end() for writer in writers]
    assert most >= capacity // 2
    assert sum(one.get("put done", 0) for one in counts) > 50
    assert sum(one.get("get done", 0) for one in counts) > 50
    assert sum(one.get("refused", 0) for one in counts) > 5
    assert _all_right(root) > 0
    assert temporaries(root) == []
    with store_at(root, capacity_bytes=capacity) as store:
        assert used(root) <= store.charged <= capacity


def test_killed_writers(tmp_path: Path) -> None:
    """Each kill leaves at most one temporary, no wrong chunk, and an account not too low."""
    root, capacity = tmp_path / "s", 24 * ROW
    rng = random.Random(7)
    with store_at(root, capacity_bytes=capacity) as living:
        for kill in range(KILLS):
            writer = Writer(root, capacity, kill, 0)
            writer.ready()
            time.sleep(rng.random() * 0.05)
            writer.kill()
            assert used(root) <= min(capacity, living.charged)
            assert len(temporaries(root)) <= kill + 1
            _all_right(root)
        assert len(list((root / "leases").iterdir())) <= 2
    with store_at(root, capacity_bytes=capacity) as store:
        assert temporaries(root) == []
        assert [path.name for path in (root / "leases").iterdir()] == [store.lease.name]
        assert used(root) <= store.charged <= capacity
        assert all(holds(store, number) or number >= 0 for number in range(NAMES))
        for number in range(100, 124):
            assert put(store, number).answer is Answer.DONE
        assert used(root) <= capacity


def test_a_living_writers_temporary_is_never_touched(tmp_path: Path) -> None:
    calls, stall = FaultyOs(), Stall()
    with store_at(tmp_path / "s", calls) as writer, store_at(tmp_path / "s") as other:
        calls.only_threads = ("stuck",)
        calls.plan("publish", stalled(stall), 1, 1)
        answers: list[Answer] = []
        thread = threading.Thread(
            target=lambda: answers.append(put(writer, 1).answer), name="stuck"
        )
        thread.start()
        assert stall.entered.wait(10)
        assert len(temporaries(tmp_path / "s")) == 1
        for _ in range(2):
            other.keeper.recount()
        assert len(temporaries(tmp_path / "s")) == 1
        assert other.charged >= ROW
        stall.let_go.set()
        thread.join()
        assert answers == [Answer.DONE]
        assert holds(other, 1)


def test_two_writers_of_one_name(tmp_path: Path) -> None:
    calls, stall = FaultyOs(), Stall()
    with store_at(tmp_path / "s", calls) as slow, store_at(tmp_path / "s") as quick:
        calls.only_threads = ("slow",)
        calls.plan("publish", stalled(stall), 1, 1)
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(put(slow, 1).answer), name="slow")
        thread.start()
        assert stall.entered.wait(10)
        assert put(quick, 1).answer is Answer.DONE
        inode = path_of(quick, 1).stat().st_ino
        stall.let_go.set()
        thread.join()
        assert answers == [Answer.PRESENT]
        assert path_of(quick, 1).stat().st_ino == inode
        assert temporaries(tmp_path / "s") == []
        assert holds(slow, 1)


def test_an_eviction_while_it_is_read(tmp_path: Path) -> None:
    """A reader that has the file open gets the whole chunk, whatever happens to the name."""
    calls = FaultyOs()
    with store_at(tmp_path / "s", calls) as reader, store_at(tmp_path / "s") as other:
        put(other, 1)

        def evicted(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            other.discard(name_of(1))
            fd, buffers, offset = args
            return os.preadv(fd, buffers, offset)

        calls.only_threads = ("MainThread",)
        calls.plan("read", evicted, 1, 1)
        outcome, data = get(reader, 1)
        # The first read of this thread is the reader's own: its bytes are whole.
        assert outcome.good
        assert data == row_of(1)
        assert not holds(other, 1)


@pytest.mark.parametrize("seed", range(2))
def test_temporary_names_do_not_come_from_the_seeded_random(tmp_path: Path, seed: int) -> None:
    """Finding H: engines seed the global random alike; names must differ all the same."""
    names = set()
    for _ in range(2):
        random.seed(seed)
        with store_at(tmp_path / "s") as store:
            names.add(store.lease.temporary())
    assert len(names) == 2

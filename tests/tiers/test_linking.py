# SPDX-License-Identifier: Apache-2.0
"""File systems that have no rename without replacing: publishing is a link and an unlink."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvsafe.tiers import Answer, calls
from tests.tiers.faults import FULL, FaultyOs, failing
from tests.tiers.stores import get, holds, name_of, path_of, put, quarantined, store_at, temporaries


@pytest.fixture(autouse=True)
def no_rename_noreplace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `renameat2` says on such a file system."""
    monkeypatch.setattr(calls, "_rename_noreplace", lambda *_: False)


def test_chunks_are_stored_and_come_back(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        assert not store.folders.atomic
        assert put(store, 1).answer is Answer.DONE
        assert path_of(store, 1).stat().st_nlink == 1
        assert temporaries(tmp_path / "s") == []
    with store_at(tmp_path / "s") as store:
        assert holds(store, 1)


def test_who_comes_second_finds_it_present(tmp_path: Path) -> None:
    """Both have looked before either published; nothing good is replaced."""
    with store_at(tmp_path / "s") as first, store_at(tmp_path / "s") as second:
        second._stands = lambda *_: False  # type: ignore[method-assign]
        assert put(first, 1).answer is Answer.DONE
        inode = path_of(first, 1).stat().st_ino
        assert put(second, 1).answer is Answer.PRESENT
        assert path_of(first, 1).stat().st_ino == inode
        assert temporaries(tmp_path / "s") == []


def test_two_names_for_a_moment_are_no_flaw_and_for_long_they_are(tmp_path: Path) -> None:
    faulty = FaultyOs()
    with store_at(tmp_path / "s", faulty) as store:
        put(store, 1)
        os.link(path_of(store, 1), path_of(store, 1).with_name(".other-1-1"))
        assert store.look([name_of(1)]) == [True]
        faulty.skew_s = 3600
        assert store.look([name_of(1)]) == [False]
        assert [path.name.split(".")[0] for path in quarantined(tmp_path / "s")]


def test_a_writer_that_died_between_link_and_unlink(tmp_path: Path) -> None:
    """Its chunk is whole; the second name goes with the sweep, and the chunk is served."""
    with store_at(tmp_path / "s") as store:
        put(store, 1)
        left = path_of(store, 1).with_name(".1-00000000000000ab-1")
        os.link(path_of(store, 1), left)
        assert get(store, 1)[0].answer is Answer.DONE
        store.keeper.recount()
        assert store.keeper.wait_counted(2)
        assert not left.exists()
        assert holds(store, 1)
        assert path_of(store, 1).stat().st_nlink == 1


@pytest.mark.parametrize("code", [*FULL, errno.EMLINK, errno.EIO])
def test_a_link_that_fails_leaves_nothing(tmp_path: Path, code: int) -> None:
    faulty = FaultyOs()
    with store_at(tmp_path / "s", faulty) as store:
        faulty.plan("publish", failing(code), 1, 1)
        assert not put(store, 1).good
        assert temporaries(tmp_path / "s") == []
        assert not path_of(store, 1).exists()
        assert put(store, 1).answer is Answer.DONE

# SPDX-License-Identifier: Apache-2.0
"""Short versions of the fault campaigns, and for each a seeded fault that it has to find.

The long versions are `python -m fuzz.campaigns.NAME`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fuzz.campaigns import calls, crowd, full, kills, power
from fuzz.campaigns.aftermath import opened, temporaries
from kvsafe.tiers import ChunkStore, Os
from kvsafe.tiers.folders import Folders
from kvsafe.tiers.leases import DeadWriters
from kvsafe.tiers.ledger import Ledger, Limits
from kvsafe.tiers.storing import Storing
from tests.tiers.stores import MEMORY


@contextmanager
def seeded(owner: Any, name: str, instead: Any) -> Iterator[None]:
    """A fault in the store, in this process and those forked from it."""
    with patch.object(owner, name, instead):
        yield


def test_kills() -> None:
    found, met = kills.campaign(30, seed=1, base=MEMORY)
    assert found.faults == []
    assert met["killed"] > 20
    assert found.chunks > 50


def test_kills_find_leftovers_that_stay() -> None:
    with seeded(DeadWriters, "clear", lambda self, folder, temporary: True):
        found, _ = kills.campaign(25, seed=2, base=MEMORY)
    assert found.leftover


@pytest.mark.parametrize("young", [False, True], ids=["a day old", "young"])
def test_power(young: bool) -> None:
    found, met = power.campaign(120, seed=1, base=MEMORY, young=young)
    assert found.faults == []
    assert found.looks == met["states"] > 60
    # Without a sync something is refused, else the model loses nothing.
    assert met["refused with sync none"] > 0


def test_power_finds_a_sync_that_does_nothing() -> None:
    with seeded(Os, "fdatasync", lambda self, fd: None):
        found, _ = power.campaign(60, seed=2, base=MEMORY)
    assert found.phantom


def test_power_finds_a_young_root_that_is_not_synced() -> None:
    with seeded(Folders, "settle", lambda self: None):
        found, _ = power.campaign(120, seed=1, base=MEMORY, young=True)
    assert found.lost


def test_calls() -> None:
    found, met = calls.campaign(0.015, seed=1, base=MEMORY)
    assert found.faults == []
    assert met["faults"] > 50
    assert met["stuck calls"] > 0


def test_calls_find_a_file_that_is_given_up_for_an_error() -> None:
    def hasty(self: ChunkStore, name: bytes, bucket: str, file: str, error: OSError) -> Any:
        return self._unfit(name, bucket, file, self.folders.flaw_of("x", 1, 2), [])

    [get] = [one for one in calls.OPERATIONS if one.name == "get"]
    with seeded(ChunkStore, "_read_error", hasty), seeded(calls, "OPERATIONS", (get,)):
        found, _ = calls.campaign(0.5, seed=1, base=MEMORY, parts=("calls",))
    assert found.lost


def test_crowd() -> None:
    found, met = crowd.campaign(2.0, writers=3, seed=1, base=MEMORY)
    assert found.faults == []
    assert met["put done"] > 0
    assert met["get done"] > 0


def test_a_crowd_finds_room_that_is_not_paid_for() -> None:
    grant = Ledger.grant

    def generous(self: Ledger, lease: Any, want: int, unspent: Any, *rest: Any) -> bool:
        return grant(self, lease, want, unspent, Limits(1 << 40, 0))

    with seeded(Ledger, "grant", generous):
        found, _ = crowd.campaign(2.0, writers=2, seed=2, base=MEMORY)
    assert found.account


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small tmpfs; skipped where this user may not mount one."""
    with full.small_disk("tmpfs", tmp_path) as point:
        if point is None:
            pytest.skip("no right to mount a tmpfs")
        yield point


def test_full_disks() -> None:
    found, met = full.campaign(1, seed=1, kinds=("tmpfs",))
    assert found.faults == []
    if "no right to mount, tmpfs" not in met:
        assert met["no room, tmpfs"] > 0
        assert met["done, tmpfs"] > 100


def test_a_full_disk_finds_what_is_left_lying(disk: Path) -> None:
    def forgetful(self: Storing, folder: int, temporary: str, outcome: Any, written: bool) -> Any:
        self._room.give_back(self._charge)
        return outcome

    with seeded(Storing, "undo", forgetful):
        stored, answers = full.writers(disk / "s") if _made(disk) else (set(), {})
    assert stored
    assert answers["NO_ROOM"]
    assert temporaries(disk / "s")


def _made(disk: Path) -> bool:
    opened(disk / "s", full.HUGE).close()
    return True

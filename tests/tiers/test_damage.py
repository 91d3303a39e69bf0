# SPDX-License-Identifier: Apache-2.0
"""F13, F11: what cannot be a chunk is moved aside with its reason; what cannot be told stays."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvsafe.tiers import Answer, ChunkStore
from tests.tiers.faults import TRANSIENT, FaultyOs, failing, failing_after, short
from tests.tiers.stores import (
    ROW,
    get,
    holds,
    name_of,
    path_of,
    put,
    quarantined,
    row_of,
    store_at,
)

FLAW = 1202


@dataclass(frozen=True)
class Refused:
    """A verdict of a judge."""

    number: int = 1001

    def __str__(self) -> str:
        return "the payload is not what its writer tagged"


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "kept").write_text("x")


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(path: Path) -> None:
    good = path.parent / "good"
    path.rename(good)
    path.symlink_to(good)


def as_dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def as_socket(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path must be short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def as_hard_link(path: Path) -> None:
    os.link(path, path.parent / "second")


def resize(change: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size + change)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "directory": as_directory,
    "fifo": as_fifo,
    "link": as_link,
    "dangling link": as_dangling,
    "socket": as_socket,
    "hard link": as_hard_link,
    "shorter": resize(-1),
    "longer": resize(1),
    "a page longer": resize(4096),
    "empty": resize(-ROW),
    "mode": lambda path: path.chmod(0o644),
}


@pytest.mark.parametrize("door", ["look", "get", "put"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_a_chunk_is_moved_aside(tmp_path: Path, damage: str, door: str) -> None:
    told: list[tuple[bytes, str, bool]] = []
    with store_at(tmp_path / "s", flaw_number=FLAW) as store:
        store.on_flaw = lambda name, flaw, moved: told.append((name, flaw.field, moved))
        put(store, 1)
        put(store, 2)
        DAMAGES[damage](path_of(store, 1))
        assert _refused_by(store, door)
        assert [name for name, _, _ in told] == [name_of(1)]
        assert told[0][2]
        [moved] = quarantined(tmp_path / "s")
        assert moved.name.startswith(f"{FLAW}-{name_of(1).hex()}")
        if door != "put":
            assert not os.path.lexists(path_of(store, 1))
            assert put(store, 1).answer is Answer.DONE
        assert holds(store, 1)
        assert holds(store, 2)
        assert len(told) == 1


def _refused_by(store: ChunkStore, door: str) -> bool:
    if door == "look":
        return store.look([name_of(1), name_of(2)]) == [False, True]
    if door == "get":
        return get(store, 1)[0].answer is Answer.REFUSED
    return bool(put(store, 1).answer is Answer.DONE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        put(store, 1)
        os.chown(path_of(store, 1), 12345, -1)
        assert get(store, 1)[0].answer is Answer.REFUSED
        assert len(quarantined(tmp_path / "s")) == 1


def test_the_judge_refuses_with_its_number_and_the_next_store_heals(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        put(store, 1)
        outcome, _ = get(store, 1, lambda row: Refused() if bytes(row) == row_of(1) else None)
        assert (outcome.answer, outcome.quarantined) == (Answer.REFUSED, True)
        [moved] = quarantined(tmp_path / "s")
        assert moved.name.startswith("1001-")
        assert moved.read_bytes() == row_of(1)
        assert os.getxattr(moved, "user.kvsafe.refusal").decode() == str(Refused())
        assert put(store, 1).answer is Answer.DONE
        assert get(store, 1, lambda row: None)[0].answer is Answer.DONE


@pytest.mark.parametrize("policy", ["remove", "keep"])
def test_the_other_policies(tmp_path: Path, policy: str) -> None:
    with store_at(tmp_path / "s", quarantine=policy) as store:
        put(store, 1)
        outcome, _ = get(store, 1, lambda row: Refused())
        assert outcome.answer is Answer.REFUSED
        assert quarantined(tmp_path / "s") == []
        assert path_of(store, 1).exists() == (policy == "keep")
        assert outcome.quarantined == (policy == "remove")


def test_a_newer_file_of_another_process_is_put_back(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as one, store_at(tmp_path / "s") as other:
        put(one, 1)
        buffer = memoryview(bytearray(ROW))
        assert one.get(name_of(1), buffer).good
        # While `one` still thinks about what it read, `other` refuses it and stores it anew.
        assert other.get(name_of(1), buffer, lambda row: Refused()).quarantined
        assert put(other, 1).answer is Answer.DONE
        assert not one.quarantine(name_of(1), 1001, "late")
        assert holds(one, 1)
        assert len(quarantined(tmp_path / "s")) == 1
        assert one.quarantine(name_of(1), 1001, "in time")


@pytest.mark.parametrize("code", TRANSIENT)
@pytest.mark.parametrize("what", ["open", "fstat", "read", "close", "stat"])
def test_an_error_that_says_nothing_keeps_the_file(tmp_path: Path, what: str, code: int) -> None:
    calls = FaultyOs()
    with store_at(tmp_path / "s", calls) as store:
        put(store, 1)
        calls.only_threads = ("MainThread",)
        plan = calls.plan(what, failing_after(code) if what == "close" else failing(code), 1, 1)
        if what == "stat":
            assert store.look([name_of(1)]) == [False]
        else:
            assert get(store, 1)[0].answer is Answer.UNREACHABLE
        assert plan.hits == 1
        assert quarantined(tmp_path / "s") == []
        assert holds(store, 1)


def test_short_reads_and_writes_go_on(tmp_path: Path) -> None:
    calls = FaultyOs()
    with store_at(tmp_path / "s", calls) as store:
        calls.only_threads = ("MainThread",)
        calls.plan("write", short(1000))
        calls.plan("read", short(700))
        for number in range(2):
            assert put(store, number).answer is Answer.DONE
            assert holds(store, number)
        calls.calm()
        assert holds(store, 0)


def _cut(path: Path) -> None:
    os.truncate(path, 100)


def _write_into(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"something else")


def _on_first_read(calls: FaultyOs, change: Callable[[], object]) -> None:
    def act(function: Callable[..., int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        change()
        return function(*args, **kwargs)

    calls.only_threads = ("MainThread",)
    calls.plan("read", act, 1, 1)


@pytest.mark.parametrize("change", [_cut, _write_into])
def test_a_file_that_is_changed_while_it_is_read_goes_with_its_refusal(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Its time of writing is another one now, and it still is the file that was refused."""
    calls = FaultyOs()
    with store_at(tmp_path / "s", calls, flaw_number=FLAW) as store:
        put(store, 1)
        path = path_of(store, 1)

        def changed() -> None:
            change(path)
            os.utime(path, ns=(1, 1))

        _on_first_read(calls, changed)
        outcome, _ = get(store, 1, lambda row: None if bytes(row) == row_of(1) else Refused())
        assert (outcome.answer, outcome.quarantined) == (Answer.REFUSED, True)
        assert len(quarantined(tmp_path / "s")) == 1
        assert not path.exists()
        # Control: another file of this name, stored meanwhile, is left alone (below), and heals.
        assert put(store, 1).answer is Answer.DONE
        assert holds(store, 1)


def test_a_file_that_is_cut_and_stored_anew_while_it_is_read_stays(tmp_path: Path) -> None:
    calls = FaultyOs()
    with (
        store_at(tmp_path / "s", calls, flaw_number=FLAW) as store,
        store_at(tmp_path / "s") as other,
    ):
        put(store, 1)

        def changed() -> None:
            _cut(path_of(store, 1))
            assert put(other, 1).answer is Answer.DONE  # moves the cut one, and stores

        _on_first_read(calls, changed)
        outcome, _ = get(store, 1)
        assert (outcome.answer, outcome.quarantined) == (Answer.REFUSED, False)
        assert holds(store, 1)


def test_a_file_that_is_evicted_once_it_is_open_is_a_miss(tmp_path: Path) -> None:
    """It has no name any more, which is no flaw of it."""
    calls = FaultyOs()
    told: list[object] = []
    with store_at(tmp_path / "s", calls, flaw_number=FLAW) as store:
        store.on_flaw = lambda *flaw: told.append(flaw)
        put(store, 1)

        def evicted(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
            path_of(store, 1).unlink(missing_ok=True)
            return function(*args, **kwargs)

        calls.only_threads = ("MainThread",)
        calls.plan("fstat", evicted, 1, 1)
        assert get(store, 1)[0].answer is Answer.MISSING
        assert told == []
        assert quarantined(tmp_path / "s") == []
        assert put(store, 1).answer is Answer.DONE
        assert holds(store, 1)


@pytest.mark.parametrize("code", [errno.EIO, errno.EINTR, errno.ENOSPC])
@pytest.mark.parametrize("door", ["look", "get", "judge", "put"])
def test_an_error_of_close_beside_a_flaw_is_no_exception(
    tmp_path: Path, door: str, code: int
) -> None:
    """Each close that refusing makes, in turn."""
    hits = 0
    for place in range(1, 20):
        calls = FaultyOs()
        root = tmp_path / f"s{place}"
        with store_at(root, calls) as store:
            put(store, 1)
            if door != "judge":
                path_of(store, 1).chmod(0o644)
            calls.only_threads = ("MainThread",)
            plan = calls.plan("close", failing_after(code), place, 1)
            if door == "judge":
                assert not get(store, 1, lambda row: Refused())[0].good
            elif door == "look":
                assert store.look([name_of(1)]) == [False]
            elif door == "get":
                assert not get(store, 1)[0].good
            else:
                assert put(store, 1).answer in Answer
            calls.calm()
            hits += plan.hits
            assert put(store, 1).good
            assert holds(store, 1)
        if not plan.hits:
            break
    assert hits


def test_zero_filled_after_a_power_loss_is_for_the_judge(tmp_path: Path) -> None:
    """F16: right length, no bytes. The store cannot tell; whoever opens the row does."""
    with store_at(tmp_path / "s") as store:
        put(store, 1)
        os.truncate(path_of(store, 1), 0)
        os.truncate(path_of(store, 1), ROW)
        outcome, _ = get(store, 1, lambda row: Refused() if not any(row) else None)
        assert outcome.answer is Answer.REFUSED
        assert put(store, 1).answer is Answer.DONE
        assert holds(store, 1)


def test_a_bucket_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        put(store, 1)
        bucket = path_of(store, 1).parent
    bucket.rename(tmp_path / "elsewhere")
    bucket.symlink_to(tmp_path / "elsewhere")
    with store_at(tmp_path / "s") as store:
        assert store.look([name_of(1)]) == [False]
        assert not get(store, 1)[0].good
        assert not put(store, 1).good


def test_a_bucket_that_is_removed_is_made_again(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        put(store, 1)
        path_of(store, 1).unlink()
        path_of(store, 1).parent.rmdir()
        assert not holds(store, 1)
        put(store, 1)
        assert put(store, 1).good
        assert holds(store, 1)

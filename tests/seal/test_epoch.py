# SPDX-License-Identifier: Apache-2.0
"""The epoch on disk: it only goes up, for every process and thread, or it is refused."""

import hmac
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsafe.seal import epoch as module
from kvsafe.seal.epoch import EPOCH_FILE_LIMIT, MAX_EPOCH, EpochError, EpochFile

ROOT = Path(__file__).resolve().parents[2]


def mac(message: bytes) -> bytes:
    return hmac.digest(b"a key for tests", message, "sha256")


def other_mac(message: bytes) -> bytes:
    return hmac.digest(b"another key", message, "sha256")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "epoch.json"


def test_first_use_is_zero_and_private(path: Path) -> None:
    assert EpochFile(path, mac).read() == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert EpochFile(path, mac).read() == 0


def test_raise_goes_up_by_one_and_stays(path: Path) -> None:
    epoch = EpochFile(path, mac)
    assert [epoch.raise_epoch("weights"), epoch.raise_epoch("adapter a")] == [1, 2]
    assert epoch.read() == epoch.poll() == EpochFile(path, mac).read() == 2
    assert json.loads(path.read_text())["body"]["reason"] == "adapter a"
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "epoch.json",
        "epoch.json.lock",
        "epoch.json.used",
    ]


def test_raise_on_first_use(path: Path) -> None:
    assert EpochFile(path, mac).raise_epoch("x") == 1


@pytest.mark.parametrize("reason", ["", "a\nb\x1b[0m", "\ud800", "x" * 10_000, "é\N{SNOWMAN}"])
def test_any_reason_is_written_short_and_printable(path: Path, reason: str) -> None:
    assert EpochFile(path, mac).raise_epoch(reason) == 1
    written = json.loads(path.read_text())["body"]["reason"]
    assert written.isprintable()
    assert len(written) == min(len(reason), 200)
    assert EpochFile(path, mac).read() == 1


# --- several processes and threads ---------------------------------------------------------------

RAISER = """
import hmac, sys
from pathlib import Path
from kvsafe.seal.epoch import EpochFile
epoch = EpochFile(Path(sys.argv[1]), lambda m: hmac.digest(b"a key for tests", m, "sha256"))
sys.stdin.read(1)
print(*[epoch.raise_epoch("race") for _ in range(5)])
"""


def test_racing_processes_get_different_numbers(path: Path) -> None:
    command = [sys.executable, "-c", RAISER, str(path)]
    started = [
        subprocess.Popen(
            command, text=True, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(4)
    ]
    for runner in started:
        assert runner.stdin is not None
        runner.stdin.write("x")
        runner.stdin.flush()
    numbers = [[int(n) for n in r.communicate(timeout=60)[0].split()] for r in started]
    assert sorted(n for own in numbers for n in own) == list(range(1, 21))
    assert all(own == sorted(own) for own in numbers)
    assert EpochFile(path, mac).read() == 20


def test_threads_see_it_only_rise(path: Path) -> None:
    epoch = EpochFile(path, mac)
    problems: list[object] = []

    def work(raises: bool) -> None:
        last = 0
        for _ in range(20):
            now = epoch.raise_epoch("thread") if raises else epoch.read()
            if now < last:
                problems.append((last, now))
            last = now

    threads = [threading.Thread(target=work, args=(number < 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert epoch.read() == 40


def test_poll_sees_another_process_and_reads_only_then(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = EpochFile(path, mac), EpochFile(path, mac)
    here.read()
    assert here.read() == here.poll() == 0
    reads: list[int] = []
    real = EpochFile.read

    def counted(self: EpochFile) -> int:
        reads.append(1)
        return real(self)

    monkeypatch.setattr(EpochFile, "read", counted)
    assert here.poll() == 0
    assert reads == []
    there.raise_epoch("elsewhere")
    assert here.poll() == 1
    assert reads == [1]
    assert here.poll() == 1
    assert reads == [1]


# --- refusals ------------------------------------------------------------------------------------


def test_rollback_within_a_process_is_refused(path: Path) -> None:
    epoch = EpochFile(path, mac)
    epoch.raise_epoch("one")
    old = path.read_bytes()
    assert epoch.raise_epoch("two") == 2
    new = path.read_bytes()
    path.write_bytes(old)
    for call in (epoch.read, epoch.poll, lambda: epoch.raise_epoch("three")):
        with pytest.raises(EpochError, match="rolled back to 1"):
            call()
    path.write_bytes(new)
    assert epoch.read() == epoch.poll() == 2
    assert epoch.raise_epoch("three") == 3


@pytest.mark.parametrize("used", ["read", "raise"])
def test_missing_after_use_is_refused(path: Path, used: str) -> None:
    epoch = EpochFile(path, mac)
    assert (epoch.read() if used == "read" else epoch.raise_epoch("x")) in (0, 1)
    path.unlink()
    for one in (epoch, EpochFile(path, mac)):
        for call in (one.read, one.poll, lambda one=one: one.raise_epoch("y")):
            with pytest.raises(EpochError, match="missing although"):
                call()


def test_whole_folder_removed_is_seen_by_who_knew_better(path: Path) -> None:
    epoch = EpochFile(path, mac)
    epoch.raise_epoch("x")
    shutil.rmtree(path.parent)
    with pytest.raises(EpochError, match="missing although"):
        epoch.read()
    assert EpochFile(path, mac).read() == 0


def test_crash_before_the_mark_heals(path: Path) -> None:
    EpochFile(path, mac).raise_epoch("x")
    mark = path.with_name("epoch.json.used")
    mark.unlink()
    assert EpochFile(path, mac).read() == 1
    assert mark.exists()


def test_another_key_is_refused(path: Path) -> None:
    EpochFile(path, mac).raise_epoch("x")
    with pytest.raises(EpochError, match="tag is wrong"):
        EpochFile(path, other_mac).read()
    assert EpochFile(path, mac).read() == 1


def test_another_files_epoch_is_refused(path: Path) -> None:
    first, second = EpochFile(path, mac), EpochFile(path.with_name("second.json"), mac)
    first.raise_epoch("x")
    second.read()
    path.with_name("second.json").write_bytes(path.read_bytes())
    with pytest.raises(EpochError, match="tag is wrong"):
        second.read()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"tag":', '"more":1,"tag":'),
        ('"epoch":1', '"more":1,"epoch":1'),
        ('"epoch":1', '"epoch":"1"'),
        ('"epoch":1', '"epoch":1.0'),
    ],
)
def test_a_file_of_another_form_is_refused(path: Path, old: str, new: str) -> None:
    """Whatever its tag is: what is not understood whole is not believed in part."""
    EpochFile(path, mac).raise_epoch("x")
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(EpochError, match="not an epoch file"):
        EpochFile(path, mac).read()
    path.write_text(text)
    assert EpochFile(path, mac).read() == 1


def test_a_forged_number_is_refused(path: Path) -> None:
    epoch = EpochFile(path, mac)
    epoch.raise_epoch("x")
    path.write_text(path.read_text().replace('"epoch":1', '"epoch":9'))
    with pytest.raises(EpochError, match="tag is wrong"):
        epoch.read()


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 4000, b"\xff", b"x" * (EPOCH_FILE_LIMIT + 1)])
def test_damaged_files_are_refused_and_kept(path: Path, data: bytes) -> None:
    epoch = EpochFile(path, mac)
    epoch.read()
    path.write_bytes(data)
    for call in (epoch.read, lambda: epoch.raise_epoch("x")):
        with pytest.raises(EpochError):
            call()
    assert path.read_bytes() == data


@given(st.integers(0, 400), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_any_changed_byte_is_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, change: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "flips" / "epoch.json"
    whole = _good_bytes(path)
    data = bytearray(whole)
    # The last byte is the newline; JSON white space means nothing.
    data[place % (len(data) - 1)] ^= change
    path.write_bytes(data)
    with pytest.raises(EpochError):
        EpochFile(path, mac).read()
    path.write_bytes(whole)
    assert EpochFile(path, mac).read() >= 1


def _good_bytes(path: Path) -> bytes:
    EpochFile(path, mac).raise_epoch("x")
    return path.read_bytes()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_file_that_others_open_is_refused(path: Path, mode: int) -> None:
    epoch = EpochFile(path, mac)
    epoch.read()
    path.chmod(mode)
    with pytest.raises(EpochError, match="chmod 600"):
        epoch.read()
    path.chmod(0o600)
    assert epoch.read() == 0


def test_symlink_and_folder_are_refused(path: Path, tmp_path: Path) -> None:
    EpochFile(path, mac).read()
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(EpochError, match="symbolic link"):
        EpochFile(path, mac).read()
    path.unlink()
    path.mkdir()
    with pytest.raises(EpochError, match="not a regular file"):
        EpochFile(path, mac).read()


@pytest.mark.parametrize("name", ["rename", "fsync", "unlink"])
def test_failed_write_never_lowers_it(
    path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = EpochFile(path, mac)
    epoch.raise_epoch("x")

    def full(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, name, full)
    with pytest.raises(EpochError, match="Read-only file system"):
        epoch.raise_epoch("y")
    monkeypatch.undo()
    assert epoch.read() >= 1
    assert epoch.raise_epoch("z") >= 2


def test_unusable_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EpochError, match="cannot be used"):
        EpochFile(tmp_path / "file" / "epoch", mac).read()


def test_a_mac_that_is_none_is_refused(path: Path) -> None:
    with pytest.raises(EpochError, match="real MAC"):
        EpochFile(path, lambda _: b"").read()


def test_the_last_epoch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EPOCH", 1)
    epoch = EpochFile(path, mac)
    assert epoch.raise_epoch("x") == 1
    with pytest.raises(EpochError, match="no higher epoch"):
        epoch.raise_epoch("y")
    assert epoch.read() == 1
    assert MAX_EPOCH == 2**63 - 1

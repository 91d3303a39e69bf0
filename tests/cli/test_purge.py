# SPDX-License-Identifier: Apache-2.0
"""`kvsafe purge`: exactly what was chosen goes, nothing without `--yes`; the account is right."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvsafe.cli import UsageError
from kvsafe.cli.purge.choice import seconds_of
from kvsafe.cli.purge.hand import StoreHand
from kvsafe.engine.rows.epochs import PRIVATE_EPOCH
from kvsafe.seal.keyring import key_id_of
from kvsafe.tiers.outcome import FileId
from tests.cli.shelf import Caller, Shelf, flip
from tests.seal.rows import EPOCH, OLD_SECRET, SECRET, World, identity
from tests.tiers.faults import FaultyOs, failing
from tests.tiers.stores import quarantined, store_at, used

DAY = 86400
PRIVATE = PRIVATE_EPOCH | 5


def age(path: Path, seconds: float) -> None:
    """Make a file look as if it was written that long ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def mixed(shelf: Shelf) -> dict[str, Path]:
    """One chunk of each sort in one store, by name."""
    worlds = {
        "plain": (World(), EPOCH),
        "old": (World(), EPOCH),
        "revoked": (World(), EPOCH - 2),
        "private": (World(), PRIVATE),
        "tenant": (World(document=identity(namespace="tenant")), EPOCH),
        "retired key": (World(secrets=(OLD_SECRET,)), EPOCH),
    }
    paths = {}
    for number, (what, (world, epoch)) in enumerate(worlds.items(), 1):
        shelf.world = world
        shelf.put(number, epoch=epoch)
        paths[what] = shelf.path(number, epoch)
    shelf.world = World()
    age(paths["old"], 40 * DAY)
    return paths


def there(paths: dict[str, Path]) -> set[str]:
    """The sorts that are left."""
    return {what for what, path in paths.items() if path.exists()}


ALL = {"plain", "old", "revoked", "private", "tenant", "retired key"}
TENANT = World(document=identity(namespace="tenant")).setting.identity_digest.hex()
CHOICES: list[tuple[list[str], set[str]]] = [
    (["--older-than", "30d"], {"old"}),
    (["--older-than", "50d"], set()),
    (["--epoch-below", str(EPOCH)], {"revoked"}),
    (["--epoch-below", str(EPOCH + 1)], ALL - {"private"}),
    (["--private-epochs"], {"private"}),
    (["--private-epochs", "--epoch-below", str(EPOCH)], {"private", "revoked"}),
    (["--namespace", "tenant"], {"tenant"}),
    (["--namespace", "nobody"], set()),
    (["--key-id", key_id_of(OLD_SECRET).hex()], {"retired key"}),
    (["--key-id", key_id_of(SECRET).hex(), "--older-than", "1h"], {"old"}),
    (["--identity", TENANT], {"tenant"}),
    (["--identity", TENANT[:8]], {"tenant"}),
    (["--identity", TENANT, "--epoch-below", str(EPOCH)], set()),
    (["--unreadable"], set()),
]


@pytest.mark.parametrize(("options", "gone"), CHOICES, ids=lambda value: " ".join(sorted(value)))
def test_exactly_the_chosen_ones_go(
    options: list[str], gone: set[str], shelf: Shelf, call: Caller
) -> None:
    paths = mixed(shelf)
    code, document = call.json("purge", shelf.root, *options)
    assert (code, document["chosen"], document["removed"]) == (0, len(gone), 0)
    assert document["chosen_bytes"] == 8192 * len(gone)
    assert there(paths) == ALL
    code, document = call.json("purge", shelf.root, *options, "--yes")
    assert (code, document["removed"]) == (0, len(gone))
    assert there(paths) == ALL - gone


def test_a_dry_run_touches_nothing_and_says_so(shelf: Shelf, call: Caller) -> None:
    paths = mixed(shelf)
    before = {path: path.stat() for path in sorted(shelf.root.rglob("*"))}
    code, text = call.text("purge", shelf.root, "--older-than", "30d")
    assert code == 0
    assert "1 files, 8.0 KiB to remove; 5 stay" in text
    assert "add --yes" in text
    assert {path: path.stat() for path in sorted(shelf.root.rglob("*"))} == before
    text = call.text("purge", shelf.root, "--older-than", "30d", "--yes")[1]
    assert "1 files, 8.0 KiB removed" in text
    assert "40,960 bytes are charged to the store now" in text
    assert there(paths) == ALL - {"old"}


def test_the_account_is_right_also_for_an_engine_that_is_there(shelf: Shelf, call: Caller) -> None:
    with store_at(shelf.root, capacity_bytes=64 * 8192) as store:
        for number in range(1, 17):
            store.put(shelf.name(number), memoryview(shelf.row(number)))
        for number in range(1, 11):
            age(shelf.path(number), DAY)
        lease = shelf.root / "leases" / store.lease.name
        temporary = shelf.path(16).parent / store.lease.temporary()
        temporary.write_bytes(b"half a row")
        age(temporary, DAY)
        code, document = call.json("purge", shelf.root, "--older-than", "1h", "--yes")
        assert (code, document["removed"], document["kept"]) == (0, 10, 6)
        assert lease.exists()
        assert temporary.read_bytes() == b"half a row"
        temporary.unlink()
        assert used(shelf.root) == 6 * 8192
        assert 6 * 8192 <= store.charged <= 6 * 8192 + store.room.grant_bytes
        for number in range(20, 60):
            assert store.put(shelf.name(number), memoryview(shelf.row(number))).good
    assert [path.name for path in (shelf.root / "leases").iterdir()] == []


def test_what_cannot_be_read_stays_unless_it_is_meant(shelf: Shelf, call: Caller) -> None:
    shelf.put(1, 2, 3, 4)
    shelf.path(1).write_bytes(b"no header")
    shelf.path(2).unlink()
    os.mkfifo(shelf.path(2), 0o600)
    shelf.path(3).unlink()
    shelf.path(3).mkdir()
    for number in (1, 2, 4):
        age(shelf.path(number), DAY)
    strange = shelf.root / "objects" / "notes.txt"
    strange.write_text("somebody's")
    ask: tuple[Any, ...] = ("purge", shelf.root, "--older-than", "1h", "--yes")
    code, document = call.json(*ask)
    assert (code, document["removed"], document["left_unreadable"]) == (0, 1, 2)
    assert (shelf.path(1).exists(), shelf.path(4).exists()) == (True, False)
    young = call.json("purge", shelf.root, "--older-than", "2d", "--unreadable", "--yes")[1]
    assert young["removed"] == 0
    code, document = call.json(*ask, "--unreadable")
    assert (code, document["removed"], document["left_elsewhere"]) == (0, 2, 1)
    assert not os.path.lexists(shelf.path(1)) and not os.path.lexists(shelf.path(2))
    assert shelf.path(3).is_dir()
    assert strange.exists()


def test_the_quarantine_only_if_it_is_named(shelf: Shelf, call: Caller) -> None:
    shelf.put(1, 2, 3)
    for number in (1, 2):
        flip(shelf.path(number), 4096)
    call.text("verify", shelf.root, "--state-dir", shelf.state, "--quarantine")
    assert len(quarantined(shelf.root)) == 2
    age(quarantined(shelf.root)[0], DAY)
    age(shelf.path(3), DAY)
    ask: tuple[Any, ...] = ("purge", shelf.root, "--older-than", "1h", "--yes")
    assert call.json(*ask, "--quarantine")[1]["removed"] == 1
    assert len(quarantined(shelf.root)) == 1
    assert shelf.path(3).exists()
    age(quarantined(shelf.root)[0], DAY)
    assert call.json(*ask)[1]["removed"] == 1
    assert len(quarantined(shelf.root)) == 1
    assert not shelf.path(3).exists()
    quarantined(shelf.root)[0].write_bytes(b"")
    age(quarantined(shelf.root)[0], DAY)
    assert (
        call.json("purge", shelf.root, "--quarantine", "--epoch-below", 99, "--yes")[1]["removed"]
        == 0
    )
    assert call.json(*ask, "--quarantine")[1]["removed"] == 1


def test_a_tree_of_vllm(shelf: Shelf, call: Caller) -> None:
    shelf.put_vllm(1, 2)
    age(shelf.vllm_path(1), DAY)
    lost = shelf.vllm_root / "mine.bin"
    lost.write_bytes(shelf.row(3))
    age(lost, DAY)
    half = shelf.vllm_path(1).with_suffix(".bin_123.tmp")
    half.write_bytes(shelf.row(1))
    age(half, DAY)
    code, document = call.json("purge", shelf.vllm_root, "--older-than", "1h", "--yes")
    assert (code, document["removed"], document["left_elsewhere"]) == (0, 1, 1)
    assert not shelf.vllm_path(1).exists()
    assert shelf.vllm_path(2).exists() and lost.exists() and half.exists()


def test_a_file_that_was_written_anew_stays(shelf: Shelf) -> None:
    shelf.put(1)
    seen = FileId.of(shelf.path(1).stat())
    bucket, file = shelf.path(1).parent.name, shelf.path(1).name
    shelf.path(1).unlink()
    shelf.path(1).write_bytes(shelf.row(1))
    with StoreHand(str(shelf.root)) as hand:
        assert not hand.remove(bucket, file, seen)
        assert shelf.path(1).exists()
        assert hand.remove(bucket, file, FileId.of(shelf.path(1).stat()))
        assert not hand.remove(bucket, file, seen)


@pytest.mark.parametrize("call", ["flock", "read", "write"])
def test_the_lease_is_let_go_of_also_when_the_account_fails(call: str, shelf: Shelf) -> None:
    """While this process goes on, whoever counts must be able to clear what it has left."""
    shelf.put(1)
    leases = shelf.root / "leases"
    open_before = len(os.listdir("/proc/self/fd"))
    calls = FaultyOs()
    with StoreHand(str(shelf.root), calls):
        assert len(list(leases.iterdir())) == 1
        calls.plan(call, failing(errno.EIO))
    assert len(list(leases.iterdir())) == 1
    assert len(os.listdir("/proc/self/fd")) == open_before
    calls.calm()
    with StoreHand(str(shelf.root), calls) as hand:
        assert hand.recount()
        assert len(list(leases.iterdir())) == 1  # its own
    assert list(leases.iterdir()) == []


@pytest.mark.parametrize("what", ["Keeper", "Room", "Quarantine"])
def test_a_hand_that_cannot_be_made_holds_nothing(
    what: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.put(1)
    open_before = len(os.listdir("/proc/self/fd"))

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(f"kvsafe.cli.purge.hand.{what}", fail)
        with pytest.raises(UsageError, match="cannot be used"):
            StoreHand(str(shelf.root))
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert list((shelf.root / "leases").iterdir()) == []


def test_an_account_that_cannot_be_read_is_said(shelf: Shelf) -> None:
    shelf.put(1)
    calls = FaultyOs()
    with StoreHand(str(shelf.root), calls) as hand:
        assert hand.charged is not None
        calls.plan("read", failing(errno.EIO))
        assert hand.charged is None


def test_a_run_that_was_stopped_leaves_a_right_account(
    shelf: Shelf, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.put(*range(1, 11))
    remove, calls = StoreHand.remove, []

    def stop_at_fourth(hand: StoreHand, bucket: str, file: str, seen: FileId) -> bool:
        calls.append(file)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return remove(hand, bucket, file, seen)

    with monkeypatch.context() as patch:
        patch.setattr(StoreHand, "remove", stop_at_fourth)
        code, document = call.json("purge", shelf.root, "--older-than", "0s", "--yes")
    assert (code, document["finished"], document["removed"]) == (1, False, 3)
    with StoreHand(str(shelf.root)) as hand:
        assert hand.charged == used(shelf.root) == 7 * 8192
    code, document = call.json("purge", shelf.root, "--older-than", "0s", "--yes")
    assert (code, document["finished"], document["removed"]) == (0, True, 7)


def test_what_cannot_be_removed_is_told(
    shelf: Shelf, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.put_vllm(1)
    age(shelf.vllm_path(1), DAY)

    def unlink(name: str, *, dir_fd: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        code, document = call.json("purge", shelf.vllm_root, "--older-than", "1h", "--yes")
    assert (code, document["removed"]) == (1, 0)
    assert document["failed"] == {"Operation not permitted": 1}
    assert call.json("purge", shelf.vllm_root, "--older-than", "1h", "--yes")[0] == 0


def test_wrong_requests_name_the_way_out(shelf: Shelf, call: Caller) -> None:
    shelf.put(1)
    assert "--older-than" in call.misuse("purge", shelf.root)
    assert "30d" in call.misuse("purge", shelf.root, "--older-than", "30")
    assert "16 hex digits" in call.misuse("purge", shelf.root, "--key-id", "abcd")
    assert "8 to 64" in call.misuse("purge", shelf.root, "--identity", "abc")
    assert "2**63" in call.misuse("purge", shelf.root, "--epoch-below", str(1 << 63))
    assert "A-Z" in call.misuse("purge", shelf.root, "--namespace", "../x")
    assert shelf.path(1).exists()
    shelf.root.chmod(0o777)
    said = call.misuse("purge", shelf.root, "--older-than", "0s", "--yes")
    assert "chmod 0700" in said
    assert shelf.path(1).exists()


def test_ages() -> None:
    assert [seconds_of(text) for text in ("5s", "2m", "3h", "1d", "2w")] == [
        5, 120, 10800, DAY, 14 * DAY,
    ]  # fmt: skip
    for text in ("", "5", "-5s", "5y", "1.5h", "5 s", "9999999999s"):
        with pytest.raises(UsageError):
            seconds_of(text)

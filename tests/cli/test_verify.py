# SPDX-License-Identifier: Apache-2.0
"""`kvsafe verify`: every chunk opened, the refused counted by number and, if asked, moved aside."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsafe.cli import UsageError
from kvsafe.cli.inspect.judge import Judge
from kvsafe.cli.inspect.keys import Epochs, Keys
from kvsafe.cli.inspect.reading import Reader
from kvsafe.cli.inspect.screen import Bar
from kvsafe.cli.inspect.tree import Role, Tree
from kvsafe.cli.verify.aside import MOVED, open_aside
from kvsafe.cli.verify.resume import Memory
from kvsafe.cli.verify.work import examine_one
from kvsafe.seal.suites import Suite
from tests.cli.shelf import Caller, Shelf, flip, other_state
from tests.seal.rows import EPOCH, World
from tests.tiers.stores import quarantined, store_at


def damage_some(shelf: Shelf, path_of: Callable[[int], Path]) -> dict[str, int]:
    """Damage chunks 2 to 5; returns the counts that are to be found."""
    flip(path_of(2), 4096)
    flip(path_of(3), 4097)
    flip(path_of(4), 200)
    path_of(5).unlink()
    path_of(5).symlink_to("/dev/zero")
    return {"401": 1, "1001": 2, "1202": 1}


def ledger(shelf: Shelf) -> bytes:
    """The store's account as it stands in the file."""
    return (shelf.root / "ledger").read_bytes()


def test_all_good_and_then_some_damaged(shelf: Shelf, call: Caller) -> None:
    shelf.put(*range(1, 9))
    ask = ("verify", shelf.root, "--state-dir", shelf.state)
    code, document = call.json(*ask, "--jobs", 3)
    assert (code, document["finished"], document["good"], document["files"]) == (0, True, 8, 8)
    assert document["bytes"] == 8 * 8192
    wanted = damage_some(shelf, shelf.path)
    code, document = call.json(*ask, "--jobs", 3)
    assert (code, document["good"], document["refused"]) == (1, 4, 4)
    assert document["refused_by_number"] == wanted
    assert {item["number"] for item in document["refused_files"]} == {401, 1001, 1202}
    code, text = call.text(*ask)
    assert code == 1
    assert f"objects/{shelf.path(2).parent.name}/{shelf.path(2).name}: writer[0].tag" in text
    assert "the payload is not what its writer tagged" in text
    assert quarantined(shelf.root) == []


def test_refused_files_are_moved_as_the_tier_moves_them(shelf: Shelf, call: Caller) -> None:
    shelf.put(*range(1, 9))
    damage_some(shelf, shelf.path)
    before = ledger(shelf)
    ask = ("verify", shelf.root, "--state-dir", shelf.state)
    code, document = call.json(*ask, "--quarantine")
    assert (code, document["aside"]) == (1, {MOVED: 4})
    moved = {path.name.rpartition(".")[0]: path for path in quarantined(shelf.root)}
    assert set(moved) == {
        f"1001-{shelf.path(2).name}",
        f"1001-{shelf.path(3).name}",
        f"401-{shelf.path(4).name}",
        f"1202-{shelf.path(5).name}",
    }
    note = os.getxattr(moved[f"401-{shelf.path(4).name}"], "user.kvsafe.refusal")
    assert note.startswith(b"refusal 401 at step 4: ")
    assert ledger(shelf) == before
    assert list((shelf.root / "leases").iterdir()) == []
    assert call.json(*ask)[0] == 0
    with store_at(shelf.root) as store:
        assert store.look([shelf.name(n) for n in range(1, 9)]) == [True] + [False] * 4 + [True] * 3
        # The notes on quarantined files may take a block of their own.
        assert 7 * 8192 <= store.charged <= 8 * 8192


def test_a_tree_of_vllm_has_its_own_way(shelf: Shelf, call: Caller) -> None:
    shelf.put_vllm(*range(1, 9))
    wanted = damage_some(shelf, shelf.vllm_path)
    lost = shelf.vllm_root / "notes" / "0123456789abcdef.bin"
    lost.parent.mkdir()
    lost.write_bytes(b"not of the tier")
    ask = ("verify", shelf.vllm_root, "--state-dir", shelf.state)
    code, document = call.json(*ask, "--quarantine")
    assert (code, document["refused_by_number"]) == (1, {**wanted, "101": 1})
    assert [path.name for path in quarantined(shelf.vllm_root)] == sorted(
        [
            f"1001-{shelf.vllm_path(2).name}",
            f"1001-{shelf.vllm_path(3).name}",
            f"401-{shelf.vllm_path(4).name}",
            f"1202-{shelf.vllm_path(5).name}",
        ]
    )
    assert lost.exists()
    assert (shelf.vllm_root / "kvsafe-quarantine").stat().st_mode & 0o777 == 0o700
    shelf.put_vllm(2)
    flip(shelf.vllm_path(2), 4096)
    call.json(*ask, "--quarantine")
    assert len(quarantined(shelf.vllm_root)) == 5


def test_the_wrong_key_moves_nothing(shelf: Shelf, call: Caller, tmp_path: Path) -> None:
    shelf.put(1, 2)
    other = other_state(tmp_path / "other")
    code, document = call.json("verify", shelf.root, "--state-dir", other, "--quarantine")
    assert (code, document["refused_by_number"]) == (1, {"204": 2})
    assert quarantined(shelf.root) == []
    assert shelf.path(1).exists()
    assert call.json("verify", shelf.root, "--state-dir", shelf.state, "--quarantine")[0] == 0


def test_another_epoch_is_no_damage(shelf: Shelf, call: Caller) -> None:
    shelf.put(1)
    shelf.put(2, epoch=EPOCH - 1)
    ask = ("verify", shelf.root, "--state-dir", shelf.state, "--quarantine")
    code, document = call.json(*ask)
    assert (code, document["good"], document["stale"]) == (0, 1, 1)
    assert shelf.path(2).exists()


@pytest.mark.parametrize("kvsafe_fs", [True, False])
def test_a_file_that_was_exchanged_meanwhile_stays(shelf: Shelf, kvsafe_fs: bool) -> None:
    shelf.put(1, 2)
    shelf.put_vllm(1, 2)
    path_of = shelf.path if kvsafe_fs else shelf.vllm_path
    for number in (1, 2):
        flip(path_of(number), 4096)
    keys = Keys({Suite.BLAKE3_KEYED: shelf.world.keyring}, (Suite.BLAKE3_KEYED,))
    with Tree(str(shelf.root if kvsafe_fs else shelf.vllm_root)) as tree:
        reader = Reader(Judge(keys, Epochs(None, keys)), owner=tree.owner)
        entries = {e.parts[-1]: e for e in tree.entries() if e.role is Role.CHUNK}
        found = {name: examine_one(tree, reader, entry) for name, entry in entries.items()}
        path_of(1).unlink()
        path_of(1).write_bytes(shelf.row(1))  # the engine stored it anew
        path_of(1).chmod(0o600)
        aside = open_aside(tree)
        try:
            said = {
                number: aside.move(entries[path_of(number).name], found[path_of(number).name])
                for number in (1, 2)
            }
        finally:
            aside.close()
    assert said[2] == MOVED
    assert said[1].startswith("left: ")
    assert path_of(1).read_bytes() == shelf.row(1)
    assert not path_of(2).exists()


def test_an_engine_may_store_and_evict_meanwhile(shelf: Shelf, call: Caller) -> None:
    shelf.put(*range(1, 30))
    stop = threading.Event()
    with store_at(shelf.root, capacity_bytes=32 * 8192) as store:
        (shelf.root / "objects" / "0ab").mkdir(mode=0o700, exist_ok=True)
        temporary = shelf.root / "objects" / "0ab" / store.lease.temporary()
        temporary.write_bytes(b"half a row")
        lease = shelf.root / "leases" / store.lease.name

        def serve() -> None:
            number = 100
            while not stop.wait(0.001):
                store.put(shelf.name(number), memoryview(shelf.row(number)))
                number += 1

        engine = threading.Thread(target=serve)
        engine.start()
        try:
            for _ in range(3):
                ask = ("verify", shelf.root, "--state-dir", shelf.state, "--quarantine")
                code, document = call.json(*ask)
                assert (code, document["refused"], document["unread"]) == (0, 0, 0)
        finally:
            stop.set()
            engine.join()
        assert lease.exists()
        assert temporary.read_bytes() == b"half a row"
        temporary.unlink()


def test_looking_does_not_count_as_use(shelf: Shelf, call: Caller) -> None:
    shelf.put(1)
    os.utime(shelf.path(1), (1000, 2000))
    call.text("verify", shelf.root, "--state-dir", shelf.state)
    assert shelf.path(1).stat().st_atime == 1000


# ---- resuming ---------------------------------------------------------------------------


def test_what_was_good_is_skipped_until_it_changes(
    shelf: Shelf, call: Caller, tmp_path: Path
) -> None:
    shelf.put(1, 2, 3)
    flip(shelf.path(3), 4096)
    memory = tmp_path / "memory"
    ask = ("verify", shelf.root, "--state-dir", shelf.state, "--resume", memory)
    found = call.json(*ask)[1]
    assert (found["good"], found["refused"], found["skipped"]) == (2, 1, 0)
    code, found = call.json(*ask)
    assert (code, found["good"], found["refused"], found["skipped"]) == (1, 0, 1, 2)
    row = bytearray(shelf.row(1))
    row[5000] ^= 1
    shelf.path(1).write_bytes(row)
    found = call.json(*ask)[1]
    assert (found["refused"], found["skipped"]) == (2, 1)
    assert memory.stat().st_mode & 0o777 == 0o600
    assert b".chunk" not in memory.read_bytes()


class Interrupted(Bar):
    """A bar that somebody's Ctrl-C hits after a few files."""

    shows = 0

    def show(self, what: str, done: int, total: int, size: int) -> None:
        """Raise once, at the fourth file."""
        Interrupted.shows += 1
        if Interrupted.shows == 4:
            raise KeyboardInterrupt


def test_a_run_that_was_stopped_goes_on(
    shelf: Shelf, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.put(*range(1, 11))
    ask = ("verify", shelf.root, "--state-dir", shelf.state, "--resume", tmp_path / "memory")
    with monkeypatch.context() as patch:
        patch.setattr("kvsafe.cli.verify.Bar", Interrupted)
        code, text = call.text(*ask)
    assert code == 1
    assert "stopped before the end" in text
    code, found = call.json(*ask)
    assert (code, found["finished"]) == (0, True)
    assert found["skipped"] >= 3
    assert found["skipped"] + found["good"] == 10


def test_a_cut_record_is_forgotten(shelf: Shelf, call: Caller, tmp_path: Path) -> None:
    shelf.put(1, 2)
    memory = tmp_path / "memory"
    ask = ("verify", shelf.root, "--state-dir", shelf.state, "--resume", memory)
    call.text(*ask)
    os.truncate(memory, memory.stat().st_size - 3)
    found = call.json(*ask)[1]
    assert (found["skipped"], found["good"]) == (1, 1)
    assert call.json(*ask)[1]["skipped"] == 2


def test_a_memory_that_cannot_be_trusted_is_refused(
    shelf: Shelf, call: Caller, tmp_path: Path
) -> None:
    shelf.put(1)
    memory = tmp_path / "memory"
    ask: tuple[Any, ...] = ("verify", shelf.root, "--state-dir", shelf.state, "--resume")
    assert call.text(*ask, memory)[0] == 0
    other = other_state(tmp_path / "other")
    said = call.misuse("verify", shelf.root, "--state-dir", other, "--resume", memory)
    assert "other keys" in said
    assert "inside the store" in call.misuse(*ask, shelf.root / "memory")
    link = tmp_path / "link"
    link.symlink_to(memory)
    assert "symbolic" in call.misuse(*ask, link)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "not a regular file" in call.misuse(*ask, fifo)
    held = Keys({Suite.BLAKE3_KEYED: shelf.world.keyring}, (Suite.BLAKE3_KEYED,))
    with Memory(str(tmp_path / "held"), str(shelf.root), held), pytest.raises(UsageError):
        Memory(str(tmp_path / "held"), str(shelf.root), held)
    Memory(str(tmp_path / "held"), str(shelf.root), held).__exit__(None, None, None)


# ---- requests ---------------------------------------------------------------------------


def test_an_unkeyed_store_must_be_asked_for(tmp_path: Path, call: Caller) -> None:
    shelf = Shelf(tmp_path, World(Suite.BLAKE3))
    shelf.put(1)
    ask = ("verify", shelf.root, "--state-dir", shelf.state)
    assert call.json(*ask)[1]["refused_by_number"] == {"202": 1}
    assert call.json(*ask, "--suite", "blake3")[0] == 0
    assert call.json("verify", shelf.root, "--suite", "blake3")[0] == 0


def test_wrong_requests_name_the_way_out(shelf: Shelf, call: Caller) -> None:
    shelf.put(1)
    assert "name --state-dir" in call.misuse("verify", shelf.root)
    assert "root_dir" in call.misuse("verify", shelf.folder / "absent", "--state-dir", shelf.state)
    assert "1 to 256" in call.misuse("verify", shelf.root, "--jobs", "-1")
    shelf.root.chmod(0o777)
    ask = ("verify", shelf.root, "--state-dir", shelf.state)
    assert call.json(*ask)[0] == 0
    assert "chmod 0700" in call.misuse(*ask, "--quarantine")


def test_a_folder_that_cannot_be_listed_is_told(
    shelf: Shelf, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.put(1, 2)
    closed = shelf.path(1).parent.name
    real = os.scandir

    def scandir(fd: int) -> Any:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(f"/{closed}"):
            raise PermissionError(13, "Permission denied")
        return real(fd)

    ask = ("verify", shelf.root, "--state-dir", shelf.state)
    assert call.json(*ask)[0] == 0
    monkeypatch.setattr(os, "scandir", scandir)
    code, document = call.json(*ask)
    assert code == 1
    assert document["unread_by_reason"] == {f"folder objects/{closed}: Permission denied": 1}
    code, document = call.json("purge", shelf.root, "--older-than", "1d")
    assert (code, document["failed"]) == (1, {})
    assert document["not_looked_at"] == {f"folder objects/{closed}: Permission denied": 1}
    assert "not looked at: folder" in call.text("purge", shelf.root, "--older-than", "1d")[1]

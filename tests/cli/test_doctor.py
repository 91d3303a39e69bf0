# SPDX-License-Identifier: Apache-2.0
"""`kvsafe doctor`: what is wrong is found before an engine starts, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvsafe.cli.doctor.contents import examine_contents
from kvsafe.cli.doctor.disk import (
    Store,
    examine_store,
    examine_way,
    filesystem_of,
    judge_filesystem,
    judge_space,
)
from kvsafe.cli.doctor.engine import (
    examine_hashing,
    examine_plugin,
    examine_user,
    judge_version,
)
from kvsafe.cli.doctor.finding import Finding, Level, bad, finding_lines
from kvsafe.cli.doctor.machine import examine_clock, examine_limits, judge_memory
from kvsafe.cli.doctor.speed import examine_opening, examine_suite, judge_suite
from kvsafe.cli.doctor.state import State, examine_state
from kvsafe.engine.config import PROVEN_VLLM_VERSIONS
from kvsafe.seal.epoch import EpochFile
from kvsafe.seal.suites import Suite
from kvsafe.tiers.batch import Batch
from tests.cli.shelf import NAMESPACE, Caller, Shelf, flip, other_state
from tests.seal.rows import EPOCH, World
from tests.tiers.faults import FaultyOs, failing

GIB = 1 << 30


def config(shelf: Shelf, **changes: Any) -> dict[str, Any]:
    """A configuration with which an engine would start; `changes` to its extra part."""
    tier = {"type": "kvsafe-fs", "root_dir": str(shelf.root), "capacity_bytes": "8MiB"}
    extra = {
        "cpu_bytes_to_use": "1MiB",
        "state_dir": str(shelf.state),
        "namespace": NAMESPACE,
        "suite": shelf.world.suite.label,
        "secondary_tiers": [tier],
        **changes,
    }
    return {
        "kv_connector": "KVSafeConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def bads(document: Any) -> list[str]:
    """Names of what is bad."""
    return [item["name"] for item in document["findings"] if item["level"] == "bad"]


def found(document: Any, name: str, level: str) -> str:
    """Texts and ways out of all findings of this name and level."""
    chosen = [i for i in document["findings"] if (i["name"], i["level"]) == (name, level)]
    return " ".join(f"{item['text']} {item['todo']}" for item in chosen)


@pytest.fixture
def ready(shelf: Shelf) -> Shelf:
    """A shelf whose store is there."""
    shelf.put(1)
    return shelf


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder, with mode and time of writing."""
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns if path.is_file() else 0)
        for path in folder.rglob("*")
    }


def test_a_good_installation_is_good(ready: Shelf, call: Caller) -> None:
    before = tree(ready.folder)
    code, document = call.json("doctor", "--config", json.dumps(config(ready)))
    assert (code, document["ok"], bads(document)) == (0, True, [])
    assert f"active {ready.world.keyring.active.key_id.hex()}" in found(document, "key", "ok")
    assert f"{EPOCH} in namespace" in found(document, "epoch", "ok")
    store = found(document, f"store {ready.root}", "ok")
    for part in ("of this user", "capacity 8.0 MiB, ", "synced in", "never replace", "locks hold"):
        assert part in store
    assert tree(ready.folder) == before
    code, text = call.text("doctor", "--config", json.dumps(config(ready)))
    assert code == 0
    assert text.startswith("ok           python")
    assert " 0 bad, " in text.splitlines()[-1]


def test_how_small_rows_go_is_told(
    ready: Shelf, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, name = json.dumps(config(ready)), f"store {ready.root}"
    monkeypatch.setattr(Batch, "load", lambda: object())
    _, document = call.json("doctor", "--config", given)
    assert "small rows go many in one call" in found(document, name, "ok")
    monkeypatch.setattr(Batch, "load", lambda: None)
    code, document = call.json("doctor", "--config", given)
    assert code == 0
    assert "install a C compiler" in found(document, name, "warn")


def test_before_the_first_start_nothing_is_made(tmp_path: Path, call: Caller) -> None:
    made = {
        "cpu_bytes_to_use": 1 << 20,
        "state_dir": str(tmp_path / "a" / "state"),
        "secondary_tiers": [
            {"type": "kvsafe-fs", "root_dir": str(tmp_path / "b"), "capacity_bytes": 1 << 23}
        ],
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(made))
    code, document = call.json("doctor", "--config", path)
    assert (code, bads(document)) == (0, [])
    assert "made (0700)" in found(document, "state_dir", "ok")
    assert "mkdir -m 700" in found(document, f"store {tmp_path / 'b'}", "not checked")
    assert [item.name for item in tmp_path.iterdir()] == ["config.json"]


def test_without_a_configuration_it_says_what_it_did_not_see(ready: Shelf, call: Caller) -> None:
    document = call.json("doctor")[1]
    assert found(document, "configuration", "not checked")
    ask = ("doctor", "--state-dir", ready.state, "--root", ready.root)
    code, document = call.json(*ask)
    assert (code, bads(document)) == (0, [])
    assert "locks hold" in found(document, f"store {ready.root}", "ok")
    assert "not there yet" in found(document, "epoch", "ok")


def test_a_tier_that_is_no_folder_is_named(ready: Shelf, call: Caller) -> None:
    given = config(ready, allow_unproven_tier=True)
    tiers = given["kv_connector_extra_config"]["secondary_tiers"]
    document = call.json("doctor", "--config", json.dumps(given))[1]
    assert not found(document, "tier obj", "not checked")
    tiers.append({"type": "obj"})
    document = call.json("doctor", "--config", json.dumps(given))[1]
    assert "not looked at" in found(document, "tier obj", "not checked")


Edit = Callable[[dict[str, Any]], None]


def _outer(**changes: object) -> Edit:
    return lambda given: given.update(changes)


def _extra(**changes: object) -> Edit:
    return lambda given: given["kv_connector_extra_config"].update(changes)


def _tier(**changes: object) -> Edit:
    return lambda given: given["kv_connector_extra_config"]["secondary_tiers"][0].update(changes)


WRONG: dict[str, tuple[Edit, str, str]] = {
    "an outer key": (_outer(kv_rolle=1), "'kv_rolle'", "did you mean kv_role?"),
    "ours outside": (_outer(state_dir="/x"), "'state_dir'", "kv_connector_extra_config"),
    "another connector": (_outer(kv_connector="OffloadingConnector"), "kv_connector", "KVSafe"),
    "no role": (_outer(kv_role=None), "kv_role", "kv_both"),
    "a policy": (_outer(kv_load_failure_policy="x"), "kv_load_failure_policy", "recompute"),
    "an unknown key": (_extra(state_dirr="/x"), "state_dirr", "did you mean state_dir?"),
    "a size": (_extra(cpu_bytes_to_use="8G"), "cpu_bytes_to_use", "GiB"),
    "a key in it": (_extra(secret="abc"), "secret", "key_file"),
    "a tier's key": (_tier(capacity="1GiB"), "secondary_tiers[0].capacity", "capacity_bytes"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_configuration_is_named(what: str, ready: Shelf, call: Caller) -> None:
    edit, key, todo = WRONG[what]
    given = config(ready)
    assert call.json("doctor", "--config", json.dumps(given))[0] == 0
    edit(given)
    code, document = call.json("doctor", "--config", json.dumps(given))
    assert code == 1
    assert key in bads(document)
    assert todo in found(document, key, "bad")
    assert "abc" not in json.dumps(document["findings"])


def test_what_is_given_up_is_warned_of(ready: Shelf, call: Caller) -> None:
    given = config(ready, allow_weak_block_hash=True, secondary_tiers=[], suite="blake3")
    del given["kv_load_failure_policy"]
    code, document = call.json("doctor", "--config", json.dumps(given))
    warned = {item["name"] for item in document["findings"] if item["level"] == "warn"}
    assert {"allow_weak_block_hash", "suite blake3", "kv_load_failure_policy"} <= warned
    assert "secondary_tiers" in warned
    assert bads(document) == ["epoch"]  # the epoch file is of a keyed suite
    assert code == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("/nonexistent/config", "No such file"),
        ('{"a": 1, "a": 2}', "stands twice"),
        ('{"kv_connector_extra_config": []}', "no object"),
        ("{" * 100_000, "not JSON"),
        ('{"a":' * 100_000, "not JSON"),
        ("/dev/zero", "not a regular file"),
    ],
    ids=["cut", "absent", "twice", "list", "braces", "nested", "device"],
)
def test_what_is_no_configuration_is_misuse(text: str, said: str, call: Caller) -> None:
    assert said in call.misuse("doctor", "--config", text)


def test_config_and_places_exclude_one_another(ready: Shelf, call: Caller) -> None:
    said = call.misuse("doctor", "--config", json.dumps(config(ready)), "--root", "/x")
    assert "leave the other options out" in said


# ---- key, epoch, folders ------------------------------------------------------------------


def _key_mode(shelf: Shelf) -> None:
    (shelf.state / "keys.json").chmod(0o644)


def _key_text(shelf: Shelf) -> None:
    (shelf.state / "keys.json").write_text("{}")


def _state_mode(shelf: Shelf) -> None:
    shelf.state.chmod(0o777)


def _epoch_lost(shelf: Shelf) -> None:
    (shelf.state / f"epoch-{NAMESPACE}.json").unlink()


def _epoch_forged(shelf: Shelf) -> None:
    path = shelf.state / f"epoch-{NAMESPACE}.json"
    path.write_bytes(path.read_bytes().replace(b'"epoch":7', b'"epoch":6'))


def _root_mode(shelf: Shelf) -> None:
    shelf.root.chmod(0o777)


def _root_link(shelf: Shelf) -> None:
    shelf.root.rename(shelf.folder / "elsewhere")
    shelf.root.symlink_to("elsewhere")


def _root_file(shelf: Shelf) -> None:
    shelf.root.rename(shelf.folder / "elsewhere")
    shelf.root.write_bytes(b"")


PLACES: list[tuple[Callable[[Shelf], None], str, str]] = [
    (_key_mode, "key", "chmod 600"),
    (_key_text, "key", "Restore it"),
    (_state_mode, "state_dir", "chmod go-w"),
    (_epoch_lost, "epoch", "restore the state folder"),
    (_epoch_forged, "epoch", "tag is wrong"),
    (_root_mode, "store", "chmod 0700"),
    (_root_link, "store", "not a link"),
    (_root_file, "store", "cannot be opened as a folder"),
]


@pytest.mark.parametrize(
    ("harm", "name", "todo"), PLACES, ids=[harm.__name__ for harm, _, _ in PLACES]
)
def test_what_cannot_be_trusted_is_found(
    harm: Callable[[Shelf], None], name: str, todo: str, ready: Shelf, call: Caller
) -> None:
    assert call.json("doctor", "--config", json.dumps(config(ready)))[0] == 0
    harm(ready)
    code, document = call.json("doctor", "--config", json.dumps(config(ready)))
    name = f"store {ready.root}" if name == "store" else name
    assert code == 1
    assert name in bads(document)
    assert todo in found(document, name, "bad")


def test_keys_in_the_store_are_found(tmp_path: Path, call: Caller) -> None:
    root = tmp_path / "store"
    root.mkdir(mode=0o700)
    state = other_state(root / "state")
    code, document = call.json("doctor", "--state-dir", state, "--root", root)
    assert code == 1
    assert "one in the other" in found(document, "key file", "bad")


def test_an_epoch_file_that_engines_share_is_looked_at(ready: Shelf, call: Caller) -> None:
    own = ready.state / f"epoch-{NAMESPACE}.json"
    folder = ready.folder / "epochs"
    given = json.dumps(config(ready, epoch_file=str(folder / own.name)))
    code, document = call.json("doctor", "--config", given)
    assert (code, "not there yet" in found(document, "epoch", "ok")) == (0, True)
    folder.mkdir(mode=0o700)
    for path in (own, own.with_name(f"{own.name}.used")):
        path.rename(folder / path.name)
    code, document = call.json("doctor", "--config", given)
    assert code == 0
    assert f"{EPOCH} in namespace" in found(document, "epoch", "ok")
    folder.chmod(0o777)
    assert call.json("doctor", "--config", given)[0] == 1


def test_a_key_of_the_environment(
    ready: Shelf, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ready.state / f"epoch-{NAMESPACE}.json").unlink()
    (ready.state / f"epoch-{NAMESPACE}.json.used").unlink()
    given = json.dumps(config(ready, key_env="THE_KEY"))
    assert call.json("doctor", "--config", given)[0] == 1
    monkeypatch.setenv("THE_KEY", "00112233445566778899aabbccddeeff" * 2)
    code, document = call.json("doctor", "--config", given)
    assert code == 0
    assert "variable THE_KEY" in found(document, "key", "ok")
    assert "00112233" not in json.dumps(document)


# ---- the disk -------------------------------------------------------------------------------


def disk(root: Path, calls: FaultyOs | None = None, **changes: Any) -> list[Finding]:
    """The findings about one store."""
    return list(examine_store(Store(str(root), **changes), calls))


def levels(findings: Iterable[Finding], part: str) -> set[Level]:
    """The levels of all findings that mention `part`."""
    return {item.level for item in findings if part in item.text}


@pytest.mark.parametrize(
    ("call_name", "code", "part", "level", "changes"),
    [
        ("fdatasync", errno.EIO, "sync: ", Level.BAD, {"sync": "data"}),
        ("fdatasync", errno.EINVAL, "sync: ", Level.WARN, {"sync": "none"}),
        ("write", errno.ENOSPC, "cannot be written", Level.BAD, {"sync": "full"}),
        ("write", errno.EDQUOT, "cannot be written: Disk quota", Level.BAD, {"sync": "none"}),
        ("write", errno.EIO, "cannot be written", Level.BAD, {"sync": "none"}),
        ("open", errno.EROFS, "no file can be made", Level.BAD, {}),
        ("flock", errno.ENOLCK, "file locks", Level.BAD, {}),
        ("setxattr", errno.EOPNOTSUPP, "no notes", Level.WARN, {}),
    ],
)
def test_a_disk_that_cannot_is_found(
    call_name: str, code: int, part: str, level: Level, changes: dict[str, Any], tmp_path: Path
) -> None:
    assert not levels(disk(tmp_path, FaultyOs(), **changes), part) & {Level.BAD, Level.WARN}
    calls = FaultyOs()
    calls.plan(call_name, failing(code))
    assert level in levels(disk(tmp_path, calls, **changes), part)
    assert list(tmp_path.iterdir()) == []


def test_a_quota_is_named_where_no_room_is_left(tmp_path: Path) -> None:
    for name, words in (("write", "raise this user's quota"), ("open", "raise this user's quota")):
        calls = FaultyOs()
        calls.plan(name, failing(errno.EDQUOT))
        assert any(words in item.todo for item in disk(tmp_path, calls) if item.level is Level.BAD)


def test_folders_on_the_way_that_others_may_change(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "store"
    root.mkdir(parents=True)
    assert not list(examine_way("x", str(root)))
    (tmp_path / "a").chmod(0o777)
    [finding] = examine_way("x", str(root))
    assert (finding.level, str(tmp_path / "a") in finding.text) == (Level.WARN, True)
    (tmp_path / "a").chmod(0o1777)  # as /tmp: only the owner of a name may change it
    assert not list(examine_way("x", str(root)))
    assert not list(examine_way("x", str(tmp_path / "a" / "not" / "there")))


# ---- what a store holds ----------------------------------------------------------------------


def contents(shelf: Shelf, state: Path | None = None, now: float | None = None) -> list[Finding]:
    """The findings about the chunks of a shelf, for the engine of a state folder."""
    folder = shelf.state if state is None else state
    seen = State(folder, folder / "keys.json", None, Suite.BLAKE3_KEYED, NAMESPACE)
    list(examine_state(seen, {}, []))
    return list(examine_contents(Store(str(shelf.root)), seen, now))


def test_chunks_of_another_key_are_told(ready: Shelf, tmp_path: Path) -> None:
    """F: two engines, one folder, two keys: both start, and neither finds anything."""
    ready.put(2, 3)
    [good] = contents(ready)
    assert (good.level, "3 are of these keys" in good.text) == (Level.OK, True)
    [other] = contents(ready, other_state(tmp_path / "other"))
    assert other.level is Level.WARN
    assert "3 are under keys that are not here" in other.text
    assert ready.world.keyring.active.key_id.hex() in other.text
    assert "one key file" in other.todo
    [none] = contents(ready, tmp_path / "lost")
    assert (none.level, "there is no key" in none.text) == (Level.WARN, True)


def test_chunks_that_no_engine_will_serve_are_told(ready: Shelf) -> None:
    ready.put(2, 3, 4)
    flip(ready.path(2), 300)
    ready.path(3).chmod(0o644)
    ready.world = World(Suite.BLAKE3)
    ready.put(5)
    texts = [item.text for item in contents(ready) if item.level is Level.WARN]
    assert len(texts) == 2
    assert "2 of them are damaged or out of place" in texts[0]
    assert "1 of them are of a suite that is not used: blake3" in texts[1]


def test_chunks_from_the_future_speak_of_the_clock(ready: Shelf) -> None:
    """The clock went back: ages and times to live are wrong, and nothing else says so."""
    written = ready.path(1).stat().st_mtime
    assert all(item.level is Level.OK for item in contents(ready, now=written))
    [late] = [item for item in contents(ready, now=written - 86400) if item.level is Level.WARN]
    assert "later than it is now" in late.text and "clock" in late.todo


def test_few_headers_of_a_large_store_are_enough(ready: Shelf) -> None:
    ready.put(2, 3, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsafe.cli.doctor.contents.SAMPLE", 2)
        [good] = contents(ready)
    assert "of 2 chunks looked at" in good.text


def test_an_empty_store_says_nothing(shelf: Shelf) -> None:
    shelf.put()
    assert contents(shelf) == []


def test_an_epoch_of_another_suite(ready: Shelf, call: Caller) -> None:
    """Such an engine does not start; without a configuration the suite is only presumed."""
    given = json.dumps(config(ready, suite="hmac-sha256"))
    code, document = call.json("doctor", "--config", given)
    assert (code, bads(document)) == (1, ["epoch"])
    assert "is of suite blake3-keyed" in (said := found(document, "epoch", "bad"))
    assert "set suite to that one" in said
    epochs = EpochFile(
        ready.state / "epoch-default.json",
        lambda data: Suite.BLAKE3_KEYED.tag(ready.world.keyring.state_secret, data),
        first=EPOCH,
    )
    epochs.read()
    code, document = call.json("doctor", "--state-dir", ready.state, "--root", ready.root)
    assert bads(document) == []
    assert f"{EPOCH} in namespace default" in found(document, "epoch", "ok")


@pytest.mark.parametrize(("kind", "told"), [("tmpfs", True), ("overlay", True), ("ext4", False)])
def test_a_state_folder_that_does_not_stay(
    kind: str, told: bool, ready: Shelf, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsafe.cli.doctor.state.filesystem_of", lambda path: kind)
    code, document = call.json("doctor", "--config", json.dumps(config(ready)))
    assert code == 0
    assert ("keys and epochs are lost" in found(document, "state_dir", "warn")) is told


@pytest.mark.parametrize(("soft", "level"), [(0, Level.OK), (-1, Level.WARN), (1, Level.WARN)])
def test_core_dumps(soft: int, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, -1))
    [finding] = [item for item in examine_limits(None) if item.name == "core dumps"]
    assert finding.level is level


@pytest.mark.parametrize(("user", "level"), [(0, Level.WARN), (1000, Level.OK)])
def test_root_is_told(user: int, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert examine_user().level is level


def test_locks_that_do_not_hold_are_found(tmp_path: Path) -> None:
    calls = FaultyOs()
    calls.plan("flock", lambda function, args, kwargs: None, times=2)
    assert Level.BAD in levels(disk(tmp_path, calls), "do not hold")


def test_kinds_of_file_systems() -> None:
    said = {kind: judge_filesystem("x", kind).level for kind in ("ext4", "xfs", "btrfs", "zfs")}
    assert set(said.values()) == {Level.OK}
    for kind in ("tmpfs", "nfs4", "cifs", "fuse.sshfs", "overlay", "9p"):
        assert judge_filesystem("x", kind).level is Level.WARN
    assert judge_filesystem("x", None).level is Level.UNKNOWN
    assert filesystem_of("/proc") == "proc"


class Disk:
    """As much of a statvfs result as is looked at: 100 GiB, of which `free` GiB are free."""

    f_frsize = GIB
    f_blocks = 100
    f_files = 1000

    def __init__(self, free: int, inodes: int = 10) -> None:
        self.f_bavail = free
        self.f_favail = inodes


@pytest.mark.parametrize(
    ("free", "used", "capacity", "reserve", "level"),
    [
        (50, 0, 40, 10, Level.OK),
        (50, 0, 41, 10, Level.WARN),
        (50, 10, 50, 10, Level.OK),
        (5, 0, 1, 6, Level.BAD),
        (50, None, 90, 0, Level.OK),
    ],
)
def test_room_on_the_disk(
    free: int, used: int | None, capacity: int, reserve: int, level: Level
) -> None:
    store = Store("/x", capacity=capacity * GIB, reserve=reserve * GIB)
    inside = None if used is None else used * GIB
    room: Any = Disk(free)
    assert [item.level for item in judge_space(store, room, inside)] == [level]
    full: Any = Disk(free, inodes=0)
    assert Level.BAD in {item.level for item in judge_space(store, full, inside)}


def test_a_tier_without_capacity_is_warned_of(tmp_path: Path) -> None:
    assert Level.WARN in levels(disk(tmp_path, kind="fs"), "no capacity")
    assert Level.WARN not in levels(disk(tmp_path, kind="kvsafe-fs", capacity=4096), "capacity")


# ---- engine and machine -----------------------------------------------------------------------


def test_engines() -> None:
    for version in PROVEN_VLLM_VERSIONS:
        assert judge_version("vllm", version, False).level is Level.OK
        assert judge_version("vllm", f"{version}+cu129", False).level is Level.OK
    other = judge_version("vllm", "0.31.9", False)
    assert (other.level, "allow_untested_vllm" in other.todo) == (Level.BAD, True)
    assert judge_version("vllm", "0.31.9", True).level is Level.WARN


def test_plugins_and_seeds() -> None:
    assert examine_plugin({"VLLM_PLUGINS": "kvsafe, other"}) == examine_plugin({})
    assert examine_plugin({"VLLM_PLUGINS": "other"}).level is Level.BAD
    assert examine_plugin({"VLLM_PLUGINS": ""}).level is Level.BAD
    assert examine_hashing({}).level is Level.OK
    assert examine_hashing({"PYTHONHASHSEED": "0"}).level is Level.WARN


def test_memory_and_clock() -> None:
    assert judge_memory("x", GIB, GIB, "there; more").level is Level.OK
    assert judge_memory("x", GIB + 1, GIB, "there; more").level is Level.BAD
    assert judge_memory("x", None, GIB, "there; more").level is Level.OK
    now = 1_800_000_000
    assert examine_clock(now, now).level is Level.OK
    assert examine_clock(now + 1, now).level is Level.BAD
    assert examine_clock(None, 1000).level is Level.BAD


def test_a_suite_that_is_much_slower_here() -> None:
    speeds = {Suite.AES256_GMAC: 20.0, Suite.BLAKE3_KEYED: 5.0, Suite.HMAC_SHA256: 1.5}
    assert judge_suite(Suite.AES256_GMAC, speeds).level is Level.OK
    slow = judge_suite(Suite.BLAKE3_KEYED, speeds)
    assert slow.level is Level.WARN and "aes256-gmac" in slow.todo
    assert judge_suite(Suite.BLAKE3_KEYED, {**speeds, Suite.AES256_GMAC: 9.0}).level is Level.OK
    # What has no key is warned of elsewhere, not for its speed.
    assert judge_suite(Suite.BLAKE3, speeds).level is Level.OK
    assert "aes256-gmac" in examine_suite(Suite.AES256_GMAC).text


def test_rows_that_are_opened_one_by_one() -> None:
    assert examine_opening(Suite.BLAKE3_KEYED).level is Level.OK
    with patch("kvsafe.cli.doctor.speed.native", lambda: object()):
        assert examine_opening(Suite.AES256_GMAC).level is Level.OK
    with patch("kvsafe.cli.doctor.speed.native", lambda: None):
        told = examine_opening(Suite.AES256_GMAC)
    assert told.level is Level.WARN and "compiler" in told.todo


def test_too_many_rows_for_this_machine(ready: Shelf, call: Caller) -> None:
    code, document = call.json(
        "doctor", "--config", json.dumps(config(ready, cpu_bytes_to_use=1 << 50))
    )
    assert code == 1
    assert "shared memory" in bads(document)


def test_lines_are_readable_and_hold_no_control_characters() -> None:
    lines = list(finding_lines([bad("a\x1b[31mname", "x " * 200 + "\r", "do\nthat")], 80))
    assert all(len(line) <= 80 for line in lines)
    assert all(line.isprintable() for line in lines)
    assert "-> do?that" in lines[-1]


def test_no_engine_is_imported(ready: Shelf) -> None:
    script = (
        "import sys\nfrom kvsafe.cli.main import main\n"
        f"main(['doctor', '--config', {json.dumps(config(ready))!r}])\n"
        "print(*{'torch', 'vllm'} & set(sys.modules), 'end')\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={**os.environ},
    )  # fmt: skip
    assert shown.stdout.endswith("\nend\n")

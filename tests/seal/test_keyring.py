# SPDX-License-Identifier: Apache-2.0
"""Keys, rings and the key file: derivation, rotation, races, and what must be refused."""

import base64
import hmac
import json
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsafe.seal import keyfile, private
from kvsafe.seal.keyfile import KeyFileError, from_environment, load_or_create, retire, rotate
from kvsafe.seal.keyring import (
    DEFAULT_SUITE,
    MAX_KEYS,
    UNKEYED_ID,
    Keyring,
    KeyringError,
    SealKey,
    SuiteName,
    derive_subkey,
    key_id_of,
    weakness_of,
)

ROOT = Path(__file__).resolve().parents[2]
SECRET = bytes.fromhex("00a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8f")
OTHER = SECRET[::-1]
NAMES = bytes(x ^ 0x5A for x in SECRET)
SUITES: tuple[SuiteName, ...] = ("aes256-gmac", "blake3-keyed", "hmac-sha256", "blake3")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")


def ring(suite: SuiteName = "blake3-keyed") -> Keyring:
    return Keyring(suite, SealKey.of(SECRET), name_secret=NAMES, older=[SealKey.of(OTHER)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder / "keys.json"


def document(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


# --- keys and subkeys ----------------------------------------------------------------------------


def test_key_id_is_stable_and_one_way() -> None:
    assert key_id_of(SECRET).hex() == "9bf06a9969a326ba"
    assert key_id_of(OTHER) != key_id_of(SECRET)
    assert SealKey.of(SECRET) == SealKey(key_id_of(SECRET), SECRET)


FROZEN = {
    "blake3-keyed": "2a96cf40c2977348",
    "hmac-sha256": "fdf6dcdd7cd4535e",
    "blake3": "cc782eab1967d857",
    "aes256-gmac": "04544ca4b35ba182",
}


def test_subkeys_are_stable() -> None:
    """Frozen: another derivation makes every stored chunk unreadable."""
    found = {suite: derive_subkey(SECRET, suite, "header").hex()[:16] for suite in SUITES}
    assert found == FROZEN


@pytest.mark.parametrize("suite", ["hmac-sha256", "aes256-gmac"])
def test_hmac_subkey_is_hkdf_by_the_book(suite: SuiteName) -> None:
    """RFC 5869 by hand: extract with a zero salt, expand one block."""
    pseudo = hmac.digest(bytes(32), SECRET, "sha256")
    info = f"kvsafe 1 subkey {suite} slice".encode()
    expected = hmac.digest(pseudo, info + b"\x01", "sha256")
    assert derive_subkey(SECRET, suite, "slice") == expected


def test_every_purpose_suite_and_secret_has_its_own_subkey() -> None:
    subkeys = [
        derive_subkey(secret, suite, purpose)
        for secret in (SECRET, OTHER)
        for suite in SUITES
        for purpose in ("header", "slice", "name", "state")
    ]
    assert len(set(subkeys)) == len(subkeys) == 32
    assert {len(subkey) for subkey in subkeys} == {32}
    assert SECRET not in subkeys


@pytest.mark.parametrize(
    "secret",
    [b"", SECRET[:31], SECRET + b"x", bytes(32), b"\xff" * 32, b"ab" * 16, bytes(range(32))],
)
def test_placeholders_are_no_secrets(secret: bytes) -> None:
    assert weakness_of(secret) is not None
    with pytest.raises(KeyringError):
        SealKey.of(secret)


@given(st.binary(min_size=32, max_size=32))
def test_secrets_are_taken_or_named_weak(secret: bytes) -> None:
    if weakness_of(secret) is None:
        assert SealKey.of(secret).key_id != UNKEYED_ID


def test_a_key_id_must_belong_to_its_secret() -> None:
    assert SealKey(key_id_of(SECRET), SECRET).secret == SECRET
    for key_id in (key_id_of(OTHER), UNKEYED_ID, b"short"):
        with pytest.raises(KeyringError):
            SealKey(key_id, SECRET)


def test_nothing_shows_a_secret() -> None:
    keys = ring()
    shown = f"{keys!r} {keys} {keys.active!r} {keys.active}"
    for secret in (SECRET, OTHER, NAMES):
        for text in (secret.hex(), base64.b64encode(secret).decode(), repr(secret)[2:-1]):
            assert text not in shown
    assert keys.active.key_id.hex() in shown
    for thing in (keys, keys.active):
        with pytest.raises(KeyringError):
            pickle.dumps(thing)


# --- rings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", ["aes256-gmac", "blake3-keyed", "hmac-sha256"])
def test_ring_finds_active_and_older_keys(suite: SuiteName) -> None:
    keys = ring(suite)
    assert keys.active == SealKey.of(SECRET)
    assert keys.get(key_id_of(OTHER)) == SealKey.of(OTHER)
    assert keys.key_ids == (key_id_of(SECRET), key_id_of(OTHER))
    assert keys.subkey(keys.active, "slice") == derive_subkey(SECRET, suite, "slice")
    assert keys.name_secret == derive_subkey(NAMES, suite, "name")
    assert keys.state_secret == derive_subkey(NAMES, suite, "state")


def test_ring_knows_no_other_key() -> None:
    assert ring().get(key_id_of(OTHER)) is not None
    for key_id in (UNKEYED_ID, key_id_of(NAMES), b"", b"x" * 100):
        assert ring().get(key_id) is None
    with pytest.raises(KeyringError):
        ring().subkey(SealKey.of(NAMES), "header")


def test_unkeyed_ring_is_public_and_apart() -> None:
    unkeyed = Keyring.unkeyed()
    assert unkeyed.active.key_id == UNKEYED_ID == bytes(8)
    assert unkeyed.get(UNKEYED_ID) is unkeyed.active
    assert unkeyed.get(key_id_of(SECRET)) is None
    assert unkeyed.name_secret == Keyring.unkeyed().name_secret


def test_keyed_and_unkeyed_never_mix() -> None:
    key, unkeyed = SealKey.of(SECRET), Keyring.unkeyed().active
    assert Keyring("hmac-sha256", key, name_secret=NAMES).active == key
    with pytest.raises(KeyringError):
        Keyring("blake3", key, name_secret=NAMES)
    with pytest.raises(KeyringError):
        Keyring("blake3-keyed", unkeyed, name_secret=NAMES)
    with pytest.raises(KeyringError):
        Keyring("blake3-keyed", key, name_secret=NAMES, older=[unkeyed])


def test_misused_rings() -> None:
    key = SealKey.of(SECRET)
    with pytest.raises(KeyringError):
        Keyring("blake3-keyed", key, name_secret=NAMES, older=[key])
    with pytest.raises(KeyringError):
        Keyring("blake3-keyed", key, name_secret=b"short")
    with pytest.raises(KeyringError):
        Keyring("none", key, name_secret=NAMES)  # type: ignore[arg-type]


# --- the key file --------------------------------------------------------------------------------


def test_first_use_makes_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here" / "keys.json"
    keys = load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_or_create(path).active == keys.active
    assert load_or_create(path).name_secret == keys.name_secret
    assert sorted(os.listdir(path.parent)) == ["keys.json", "keys.json.lock"]


def test_two_files_have_two_keys(tmp_path: Path) -> None:
    first, second = (load_or_create(tmp_path / name / "k") for name in ("a", "b"))
    assert first.active != second.active
    assert first.name_secret != second.name_secret


def test_one_file_serves_both_suites(path: Path) -> None:
    blake = load_or_create(path, suite="blake3-keyed")
    sha = load_or_create(path, suite="hmac-sha256")
    assert blake.active == sha.active
    assert blake.subkey(blake.active, "header") != sha.subkey(sha.active, "header")


def test_wide_open_umask_changes_nothing(path: Path) -> None:
    old = os.umask(0)
    try:
        load_or_create(path)
    finally:
        os.umask(old)
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()} == {0o600}


RACER = """
import sys
from pathlib import Path
from kvsafe.seal.keyfile import load_or_create
sys.stdin.read(1)
ring = load_or_create(Path(sys.argv[1]))
print(ring.active.key_id.hex(), ring.name_secret.hex())
"""
ROTATOR = """
import sys
from pathlib import Path
from kvsafe.seal.keyfile import rotate
sys.stdin.read(1)
print(rotate(Path(sys.argv[1])).hex())
"""


def race(script: str, path: Path, runners: int) -> list[str]:
    """Start processes, let all of them come up to the gate, open it, return what each printed."""
    command = [sys.executable, "-c", script, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = [
        subprocess.Popen(command, text=True, cwd=ROOT, **pipes)  # type: ignore[call-overload]
        for _ in range(runners)
    ]
    for runner in started:
        runner.stdin.write("x")
        runner.stdin.flush()
    return [runner.communicate(timeout=60)[0].strip() for runner in started]


def test_racing_processes_agree_on_one_file(tmp_path: Path) -> None:
    path = tmp_path / "state" / "keys.json"
    printed = race(RACER, path, 5)
    assert len(set(printed)) == 1
    assert printed[0].split()[0] == load_or_create(path).active.key_id.hex()


def test_racing_rotations_lose_no_key(path: Path) -> None:
    first = load_or_create(path).active
    printed = race(ROTATOR, path, 4)
    found = {key_id.hex() for key_id in load_or_create(path).key_ids}
    assert found == {first.key_id.hex(), *printed}
    assert len(found) == 5


def test_loser_of_the_race_reads_the_winners_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The winner writes between our look and our lock."""
    winner: list[Keyring] = []
    real_lock = private.PrivateFolder.lock

    def late_lock(self: private.PrivateFolder, name: str) -> Any:
        monkeypatch.setattr(private.PrivateFolder, "lock", real_lock)
        winner.append(load_or_create(path))
        return real_lock(self, name)

    monkeypatch.setattr(private.PrivateFolder, "lock", late_lock)
    assert load_or_create(path).active == winner[0].active


def test_rotation_keeps_old_keys_and_names(path: Path) -> None:
    before = load_or_create(path)
    new_id = rotate(path, note="yearly")
    after = load_or_create(path)
    assert after.active.key_id == new_id != before.active.key_id
    assert after.get(before.active.key_id) == before.active
    assert (after.name_secret, after.state_secret) == (before.name_secret, before.state_secret)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert document(path)["keys"][1]["note"] == "yearly"


def test_retire(path: Path) -> None:
    old = load_or_create(path).active.key_id
    with pytest.raises(KeyFileError, match="active"):
        retire(path, old)
    new = rotate(path)
    with pytest.raises(KeyFileError, match="no key"):
        retire(path, bytes(8))
    retire(path, old)
    assert load_or_create(path).key_ids == (new,)


def test_rotation_needs_a_file_and_room(path: Path) -> None:
    with pytest.raises(KeyFileError, match="does not exist"):
        rotate(path)
    load_or_create(path)
    changed = document(path)
    for number in range(MAX_KEYS - 1):
        secret = bytes(x ^ (number + 1) for x in SECRET)
        changed["keys"].append(entry(secret, active=False))
    write(path, json.dumps(changed))
    assert len(load_or_create(path).key_ids) == MAX_KEYS
    with pytest.raises(KeyFileError, match="Retire"):
        rotate(path)


def test_failed_write_keeps_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_or_create(path).active

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(KeyFileError, match="No space left"):
        rotate(path)
    monkeypatch.undo()
    assert load_or_create(path).active == before
    assert not path.with_name("keys.json.new").exists()
    rotate(path)


def test_left_over_of_a_dead_writer_is_replaced(path: Path) -> None:
    path.with_name("keys.json.new").write_text("half a fi")
    assert load_or_create(path).active == load_or_create(path).active


def test_lock_wait_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_or_create(path)
    monkeypatch.setattr(private, "LOCK_DEADLINE_S", 0.0)
    with (
        private.PrivateFolder(path.parent, KeyFileError, create=False) as folder,
        folder.lock(path.name),
        pytest.raises(KeyFileError, match="still locked"),
    ):
        rotate(path)
    rotate(path)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_private_modes_are_fine(path: Path, mode: int) -> None:
    active = load_or_create(path).active
    path.chmod(mode)
    assert load_or_create(path).active == active


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o660, 0o666, 0o777])
def test_open_modes_are_refused(path: Path, mode: int) -> None:
    load_or_create(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"{mode:04o}") as caught:
        load_or_create(path)
    assert caught.value.path == path
    assert "chmod 600" in str(caught.value)
    with pytest.raises(KeyFileError):
        rotate(path)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_folder_that_others_write_is_refused(path: Path, mode: int) -> None:
    load_or_create(path)
    path.parent.chmod(mode)
    with pytest.raises(KeyFileError, match="folder is writable"):
        load_or_create(path)
    path.parent.chmod(0o755)
    load_or_create(path)


@as_root
def test_files_of_another_user_are_refused(path: Path) -> None:
    load_or_create(path)
    os.chown(path, 12345, 12345)
    with pytest.raises(KeyFileError, match="belongs to user 12345"):
        load_or_create(path)
    os.chown(path, 0, 0)
    os.chown(path.parent, 12345, 12345)
    with pytest.raises(KeyFileError, match="folder belongs to user 12345"):
        load_or_create(path)
    os.chown(path.parent, 0, 0)
    load_or_create(path)


def _symlink(path: Path) -> None:
    real = path.with_name("real.json")
    load_or_create(real)
    path.symlink_to(real)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_symlink, "symbolic link"),
        (lambda path: path.symlink_to("/nonexistent"), "symbolic link"),
        (lambda path: path.mkdir(), "not a regular file"),
        (lambda path: os.mkfifo(path, 0o600), "not a regular file"),
    ],
)
def test_other_kinds_of_file_are_refused(
    path: Path, make: Callable[[Path], object], text: str
) -> None:
    make(path)
    with pytest.raises(KeyFileError, match=text):
        load_or_create(path)


def test_lock_file_is_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    path.with_name("keys.json.lock").symlink_to(victim)
    with pytest.raises(KeyFileError, match="symbolic link"):
        load_or_create(path)
    assert not victim.exists()


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_impossible_paths_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeyFileError):
        load_or_create(tmp_path / name)
    with pytest.raises(KeyFileError):
        load_or_create(tmp_path / name / "keys.json")


def test_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeyFileError, match="cannot be used"):
        load_or_create(tmp_path / "file" / "keys.json")


def entry(secret: bytes, *, active: bool) -> dict[str, object]:
    text = base64.b64encode(secret).decode()
    key_id = key_id_of(secret).hex()
    return {"id": key_id, "secret": text, "created": "", "note": "", "active": active}


def whole(**change: object) -> dict[str, object]:
    name_secret = base64.b64encode(NAMES).decode()
    keys = [entry(SECRET, active=True), entry(OTHER, active=False)]
    name_id = key_id_of(NAMES).hex()
    return {"version": 1, "name_id": name_id, "name_secret": name_secret, "keys": keys, **change}


def write(path: Path, text: str) -> None:
    path.touch(0o600)
    path.chmod(0o600)
    path.write_text(text)


def test_file_written_by_hand(path: Path) -> None:
    write(path, json.dumps(whole()))
    assert load_or_create(path).key_ids == (key_id_of(SECRET), key_id_of(OTHER))


BOTH_ACTIVE = [entry(SECRET, active=True), entry(OTHER, active=True)]
ZEROS = base64.b64encode(bytes(32)).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "{",
        "[]",
        "null",
        "\ud7ff",
        json.dumps(whole())[:-2],
        json.dumps(whole(version=2)),
        json.dumps(whole(version="1")),
        json.dumps(whole(extra=1)),
        json.dumps(whole(keys=[])),
        json.dumps(whole(keys=BOTH_ACTIVE)),
        json.dumps(whole(keys=[entry(SECRET, active=False)])),
        json.dumps(whole(keys=[entry(SECRET, active=True), entry(SECRET, active=False)])),
        json.dumps(whole(keys=[{**entry(SECRET, active=True), "id": key_id_of(OTHER).hex()}])),
        json.dumps(whole(keys=[{**entry(SECRET, active=True), "active": 1}])),
        json.dumps(whole(keys=[{**entry(SECRET, active=True), "secret": "not base64!"}])),
        json.dumps(whole(keys=[{**entry(SECRET, active=True), "secret": "é"}])),
        json.dumps(whole(keys=[entry(bytes(32), active=True)])),
        json.dumps(whole(keys=[entry(SECRET[:16], active=True)])),
        json.dumps(whole(name_secret=ZEROS)),
        json.dumps(whole(name_secret="")),
        json.dumps(whole(name_secret=base64.b64encode(OTHER).decode())),
        json.dumps(whole(name_id="")),
        json.dumps(whole(name_secret=3)),
        "[" * 30000,
        json.dumps(whole()) + " " * keyfile.KEY_FILE_LIMIT,
    ],
)
def test_damaged_files_are_refused_and_left_alone(path: Path, text: str) -> None:
    write(path, text)
    for call in (load_or_create, rotate):
        with pytest.raises(KeyFileError) as caught:
            call(path)
        shown = str(caught.value)
        assert str(path) in shown
        for secret in (SECRET, OTHER, NAMES):
            assert base64.b64encode(secret).decode() not in shown
    assert path.read_text() == text


@given(st.integers(0, 600), st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_any_changed_byte_is_harmless_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, change: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "flips" / "keys.json"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    data = bytearray(json.dumps(whole()).encode())
    data[place % len(data)] ^= change
    write(path, "")
    path.write_bytes(data)
    try:
        keys = load_or_create(path)
    except KeyFileError as error:
        shown = str(error)
        assert base64.b64encode(SECRET).decode() not in shown
    else:
        # A changed note, or one of the two bits that base64 leaves unused.
        assert set(keys.key_ids) == {key_id_of(SECRET), key_id_of(OTHER)}
        assert keys.name_secret == derive_subkey(NAMES, DEFAULT_SUITE, "name")


def test_an_unknown_suite_is_refused_by_its_name() -> None:
    with pytest.raises(KeyringError, match="unknown suite 'md5'"):
        Keyring("md5", SealKey.of(SECRET), name_secret=NAMES)  # type: ignore[arg-type]


# --- the environment -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        SECRET.hex(),
        SECRET.hex().upper(),
        base64.b64encode(SECRET).decode(),
        f" {base64.b64encode(SECRET).decode()}\n",
    ],
)
def test_key_from_the_environment(text: str) -> None:
    keys = from_environment({"KV": text}, "KV")
    assert keys.active == SealKey.of(SECRET)
    assert keys.name_secret == from_environment({"KV": SECRET.hex()}, "KV").name_secret
    assert keys.name_secret != from_environment({"KV": OTHER.hex()}, "KV").name_secret


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        SECRET.hex()[:-2],
        SECRET.hex() + "00",
        SECRET.hex()[:-1] + "g",
        base64.b64encode(SECRET[:31]).decode(),
        base64.b64encode(SECRET + b"x").decode(),
        "00" * 32,
        "ff" * 32,
        ZEROS,
        "correct horse battery staple",
        "é" * 64,
    ],
)
def test_bad_keys_in_the_environment_are_refused(text: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        from_environment({"KV": text}, "KV")
    if text.strip():
        assert text not in str(caught.value)


def test_unset_variable_is_refused_without_repeating_its_name() -> None:
    """The name may be the key itself, put in the wrong place."""
    with pytest.raises(KeyFileError) as caught:
        from_environment({}, SECRET.hex())
    assert SECRET.hex() not in str(caught.value)

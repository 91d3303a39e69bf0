# SPDX-License-Identifier: Apache-2.0
"""Key files, key rings, secrets in the environment, and the epoch file."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.reader import suites
from fuzz.chunks import SECRETS
from fuzz.target import ByteSource, Target, demand
from kvsafe.seal import epoch, keyfile, keyring

_SHM = Path("/dev/shm")  # noqa: S108 - files in memory
_MODES = (0o600, 0o600, 0o600, 0o400, 0o640, 0o604, 0o660, 0o700, 0o000)
_WEAK = (bytes(32), bytes(range(32)), b"\1\2" * 16, b"x" * 31, b"", bytes(range(33)))
_MAC = suites.key_id


def scratch(name: str) -> Path:
    """A new folder, in memory where that is possible.

    In a child it lies in a folder that the parent removes: libFuzzer ends processes unasked.
    """
    home = os.environ.get("KVSAFE_FUZZ_SCRATCH") or (_SHM if _SHM.is_dir() else None)
    return Path(tempfile.mkdtemp(prefix=f"kvsafe-fuzz-{name}-", dir=home))


def mac(message: bytes) -> bytes:
    """The tag of state files here."""
    return suites.tag("blake3-keyed", SECRETS[2], message)


class Keys(Target):
    """Files that hold secrets or the epoch, as they are and as they must not be.

    Oracles: only the documented errors, none of which repeats a secret; a ring is made exactly
    of a file that a second, plain judge of the format calls good; its subkeys are those of the
    specification; the epoch never falls.
    """

    name = "keys"
    max_len = 600
    memory_mib = 64

    def __init__(self) -> None:
        self._folder = scratch("keys")

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def once(self, data: bytes) -> None:
        source = ByteSource(data)
        for path in self._folder.iterdir():
            path.unlink()
        ways: tuple[Callable[[ByteSource], None], ...] = (
            self._file, self._file, self._environment, self._ring, self._epoch, self._changes,
        )  # fmt: skip
        ways[source.below(len(ways))](source)

    def seeds(self) -> list[bytes]:
        return [bytes([way]) + bytes(range(0, 90, step)) for way in range(6) for step in (1, 7)]

    def _file(self, source: ByteSource) -> None:
        """A key file with something wrong in it, or nothing."""
        data = _document(source)
        path, mode = self._folder / "keys.json", source.pick(_MODES)
        path.write_bytes(data)
        path.chmod(mode)
        suite = source.pick(("blake3-keyed", "hmac-sha256", "aes256-gmac"))
        good = mode & 0o077 == 0 and (mode & 0o400 or os.geteuid() == 0) and _is_good(data)
        try:
            ring = keyfile.load_or_create(path, suite=suite)  # type: ignore[arg-type]
        except keyfile.KeyFileError as error:
            _no_secret(str(error), data)
            demand(not good, f"a good file was refused: {error.problem}")
            return
        demand(bool(good), "a file that is not good was taken", "accepted")
        demand(path.read_bytes() == data, "the file was changed")
        _check_ring(ring, data, suite)

    def _environment(self, source: ByteSource) -> None:
        secret = source.pick((*_WEAK, *SECRETS, source.raw(32)))
        text = source.pick(
            (secret.hex(), base64.b64encode(secret).decode(), source.some(80).decode("latin-1"))
        )
        environ = {} if source.rarely() else {"KEY": text}
        try:
            ring = keyfile.from_environment(environ, "KEY")
        except keyfile.KeyFileError as error:
            demand(len(text) < 8 or text not in str(error), "a secret in an error")
            good = bool(environ) and secret in SECRETS and text == secret.hex()
            demand(not good, "a good key was refused")
            return
        read = _plain_secret(environ.get("KEY", "").strip())
        demand(read is not None and not _is_weak(read), "a weak key was taken", "accepted")
        demand(read is not None and ring.active.key_id == _MAC(read), "another key was taken")

    def _ring(self, source: ByteSource) -> None:
        """Rings of any keys: made, or a `KeyringError`."""
        keys = []
        for _ in range(source.below(5)):
            secret = source.pick((*SECRETS, *_WEAK, source.raw(32)))
            try:
                keys.append(keyring.SealKey.of(secret))
            except keyring.KeyringError:
                demand(_is_weak(secret), "a good secret was refused")
        keys += [keyring.Keyring.unkeyed().active] if source.rarely() else []
        suite = source.pick(("blake3-keyed", "hmac-sha256", "blake3", "aes256-gmac", "md5"))
        if not keys:
            return
        ids = [key.key_id for key in keys]
        unkeyed = [key_id == suites.NO_KEY_ID for key_id in ids]
        fits = all(unkeyed) if suite == "blake3" else not any(unkeyed) and suite != "md5"
        sound = fits and len(set(ids)) == len(ids)
        try:
            ring = keyring.Keyring(suite, keys[0], name_secret=SECRETS[0], older=keys[1:])  # type: ignore[arg-type]
        except keyring.KeyringError:
            demand(not sound, "a good ring was refused")
            return
        demand(sound, "keyed and unkeyed, or one key twice, in a ring", "accepted")
        found = source.pick((source.raw(8), *ids))
        demand(
            (ring.get(found) is not None) == (found in ids), "a key under a foreign id", "accepted"
        )

    def _epoch(self, source: ByteSource) -> None:
        """An epoch file read, raised, replaced by an older one, cut or edited."""
        path = self._folder / "epoch-x.json"
        file = epoch.EpochFile(path, mac, first=source.below(3))
        seen, kept = -1, [b""]
        for _ in range(source.below(9)):
            step = source.below(4)
            if step == 3:
                path.write_bytes(_damaged(source, source.pick(kept)))
                path.chmod(0o600)
                continue
            try:
                now = file.raise_epoch("fuzz") if step == 2 else file.read()
            except epoch.EpochError:
                continue
            demand(now >= seen + (step == 2), f"the epoch fell from {seen} to {now}", "accepted")
            # Where blanks stand in the JSON is nobody's business: it is the values that count.
            values = json.loads(path.read_bytes())
            known = (
                seen < 0 or step == 2 or any(data and json.loads(data) == values for data in kept)
            )
            demand(known, "an edited epoch file was taken", "accepted")
            kept.append(path.read_bytes())
            seen = now

    def _changes(self, source: ByteSource) -> None:
        """Rotations and retirements: what is there stays readable, the active one stays."""
        path = self._folder / "keys.json"
        ring = keyfile.load_or_create(path)
        known = [ring.active.key_id]
        for _ in range(source.below(5)):
            try:
                if source.flag():
                    known.append(keyfile.rotate(path, note=source.some(9).decode("latin-1")))
                else:
                    gone = source.pick((*known, source.raw(8)))
                    keyfile.retire(path, gone)
                    known.remove(gone)
            except keyfile.KeyFileError:
                continue
            ring = keyfile.load_or_create(path)
            demand(set(ring.key_ids) == set(known), "another set of keys than was asked for")
            demand(ring.active.key_id == known[-1], "another active key than the newest")


def _document(source: ByteSource) -> bytes:
    """A key file: whole, edited by field, edited by byte, or anything."""
    kind = source.below(8)
    if kind == 7:
        return source.rest()
    document = _good(source.below(4))
    for _ in range(source.below(3)):
        _edit(source, document)
    data = json.dumps(document).encode("utf-8", "surrogatepass")
    return _damaged(source, data) if kind == 6 else data


def _damaged(source: ByteSource, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(source.below(3)):
        at = source.below(len(out) + 1)
        out[at : at + source.below(5)] = source.some(5)
    return bytes(out[: source.pick((len(out), source.below(len(out) + 1)))])


def _good(extra: int) -> dict[str, Any]:
    keys = [_entry(SECRETS[number % 3], number == 0) for number in range(min(1 + extra, 3))]
    name = SECRETS[2]
    return {
        "version": 1, "name_id": _MAC(name).hex(), "name_secret": base64.b64encode(name).decode(),
        "keys": keys,
    }  # fmt: skip


def _entry(secret: bytes, active: bool) -> dict[str, Any]:
    text = base64.b64encode(secret).decode()
    return {
        "id": _MAC(secret).hex(), "secret": text, "created": "now", "note": "", "active": active,
    }  # fmt: skip


def _edit(source: ByteSource, document: dict[str, Any]) -> None:
    weak = source.pick(_WEAK)
    entry = _entry(source.pick((weak, *SECRETS)), source.flag())
    values: tuple[Any, ...] = (
        None, 1, 2, True, "", "A" * 44, base64.b64encode(weak).decode(), [], [entry],
        _MAC(weak).hex(), "\ud800", [entry] * 65, 1.0, SECRETS[0].hex(),
    )  # fmt: skip
    keys = document.get("keys")
    inner = isinstance(keys, list) and keys and source.flag()
    place: Any = source.pick(keys) if inner and isinstance(keys, list) else document
    if not isinstance(place, dict):
        return
    name = source.pick((*place, "more"))
    what = source.below(4)
    if what == 0:
        place.pop(name, None)
    elif what == 1 and isinstance(keys, list):
        keys.append(entry)
    elif what == 2 and isinstance(place.get("active"), bool):
        place["active"] = not place["active"]
    else:
        place[name] = source.pick(values)


def _is_good(data: bytes) -> bool:
    """The format of a key file, judged once more and plainly."""
    try:
        document = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
        json.dumps(document, ensure_ascii=False).encode()  # no lone surrogates
        return _judged(document, len(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _judged(document: Any, size: int) -> bool:
    keys, texts = document["keys"], ("id", "secret", "created", "note")
    entries = [(k["id"], _plain_secret64(k["secret"]), k["active"]) for k in keys]
    name = _plain_secret64(document["name_secret"])
    shape = document.keys() == _good(0).keys() and all(
        k.keys() == _good(0)["keys"][0].keys() and all(type(k[n]) is str for n in texts)
        for k in keys
    )
    flags = all(type(active) is bool for _, _, active in entries)
    ids = [key_id for key_id, _, _ in entries]
    right = all(not _is_weak(s) and _MAC(s).hex() == i for i, s, _ in entries)
    named = not _is_weak(name) and document["name_id"] == _MAC(name).hex()
    version = type(document["version"]) is int and document["version"] == 1
    number = sum(active for _, _, active in entries) == 1 and len(set(ids)) == len(ids) <= 64
    return shape and flags and right and named and version and number and size <= 65536


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _plain_secret64(text: Any) -> bytes:
    if type(text) is not str:
        raise TypeError
    return base64.b64decode(text.encode("ascii"), validate=True)


def _plain_secret(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text) if len(text) == 64 else _plain_secret64(text)
    except ValueError:
        pass
    try:
        return _plain_secret64(text)
    except (ValueError, TypeError):
        return None


def _is_weak(secret: bytes) -> bool:
    steps = {(secret[n + 1] - secret[n]) % 256 for n in range(len(secret) - 1)}
    return len(secret) != 32 or len(set(secret)) < 8 or len(steps) == 1


def _no_secret(text: str, data: bytes) -> None:
    for secret in SECRETS:
        for form in (secret.hex(), base64.b64encode(secret).decode()):
            demand(form not in text, "a secret in an error")
    demand(len(text) < 4096, "an error without a bound", "memory")


def _check_ring(ring: keyring.Keyring, data: bytes, suite: str) -> None:
    """Every subkey is the one of the specification, and the active key is the active one."""
    keys = json.loads(data)["keys"]
    active = next(entry["id"] for entry in keys if entry["active"])
    demand(ring.active.key_id.hex() == active, "another active key than the file says")
    demand(len(ring.key_ids) == len(keys), "another number of keys than the file holds")
    for entry in keys:
        secret = base64.b64decode(entry["secret"])
        key = ring.get(bytes.fromhex(entry["id"]))
        if key is None:
            demand(False, "a key of the file is not in the ring")
            return
        for purpose in ("header", "slice"):
            right = suites.subkey(suite, secret, purpose)
            demand(ring.subkey(key, purpose) == right, f"another {purpose} subkey")

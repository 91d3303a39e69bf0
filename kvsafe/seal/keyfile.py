# SPDX-License-Identifier: Apache-2.0
"""Where secrets come from: the key file, or one environment variable.

The key file is JSON, mode 0600, in a folder that nobody else can write, outside every store.
Processes that start at the same time agree on one file; each change replaces the whole file at
once. No error and no log line holds a secret: errors name the path, what is wrong and the way out.
"""

import base64
import binascii
import contextlib
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from kvsafe.seal.keyring import (
    DEFAULT_SUITE,
    MAX_KEYS,
    SECRET_BYTES,
    Keyring,
    SealKey,
    SuiteName,
    key_id_of,
    name_secret_from,
    weakness_of,
)
from kvsafe.seal.private import PrivateFolder, StateFileError

KEY_FILE_VERSION: Final = 1
KEY_FILE_LIMIT: Final = 64 * 1024
"""Largest key file that is read, in bytes."""


class KeyFileError(StateFileError):
    """The key file, or the key in the environment, was refused."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    secret: str
    created: str
    note: str
    active: bool

    def __repr__(self) -> str:
        return f"_Entry({len(self.id)} characters of id)"


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    name_id: str
    name_secret: str
    keys: list[_Entry]

    def __repr__(self) -> str:
        return f"_Document({len(self.keys)} keys)"


def load_or_create(path: Path, *, suite: SuiteName = DEFAULT_SUITE) -> Keyring:
    """Read the key file at `path` as a ring for `suite`; make one with a fresh key on first use.

    Of several processes that find none, one writes it and all of them read that one. Raises
    `KeyFileError` when it cannot be trusted (mode, owner, kind, contents) or cannot be written.
    """
    with PrivateFolder(path.parent, KeyFileError, create=True) as folder:
        data = folder.read(path.name, KEY_FILE_LIMIT)
        if data is None:
            with folder.lock(path.name):
                if not folder.exists(path.name):
                    folder.replace(path.name, _encode(_new_document()))
            data = folder.read(path.name, KEY_FILE_LIMIT)
    if data is None:
        raise KeyFileError(path, "vanished while it was being read", "Start again.")
    return _ring(path, _decode(path, data), suite)


def rotate(path: Path, *, note: str = "") -> bytes:
    """Add a fresh active key, keep the old ones readable; return the new 8-byte key id.

    Processes that run see it when they load the file again. Raises `KeyFileError`, also when the
    file is full: then `retire` what no stored chunk needs any more.
    """
    with _changing(path) as document:
        if len(document.keys) >= MAX_KEYS:
            raise KeyFileError(path, f"already holds {MAX_KEYS} keys", "Retire older ones first.")
        for entry in document.keys:
            entry.active = False
        fresh = _new_entry(note)
        document.keys.append(fresh)
    return bytes.fromhex(fresh.id)


def retire(path: Path, key_id: bytes) -> None:
    """Take an older key out of the file: chunks sealed with it are refused from then on.

    Raises `KeyFileError` when the key is the active one or not there.
    """
    with _changing(path) as document:
        found = [entry for entry in document.keys if entry.id == key_id.hex()]
        if not found:
            raise KeyFileError(path, f"has no key {key_id.hex()}", "Check the id.")
        if found[0].active:
            raise KeyFileError(path, f"key {key_id.hex()} is the active one", "Rotate first.")
        document.keys.remove(found[0])


def from_environment(
    environ: Mapping[str, str], name: str, *, suite: SuiteName = DEFAULT_SUITE
) -> Keyring:
    """Make a ring of the one secret in variable `name`: 32 bytes as base64 or as 64 hex digits.

    The name secret is derived from it, so that another value makes every stored object unfindable.
    Raises `KeyFileError` when it is unset, malformed, short or a placeholder.
    """
    shown = Path("environment") / (name if name in environ else "(unset)")
    text = environ.get(name, "").strip()
    way_out = "Set it to 32 random bytes, as base64 or hex, in the environment of every process."
    if not text:
        raise KeyFileError(shown, "the variable that key_env names is unset or empty", way_out)
    secret = _decode_text(text)
    if secret is None:
        raise KeyFileError(shown, "holds neither 64 hex digits nor base64 of 32 bytes", way_out)
    weakness = weakness_of(secret)
    if weakness is not None:
        raise KeyFileError(shown, f"is no secret: {weakness}", way_out)
    return Keyring(suite, SealKey.of(secret), name_secret=name_secret_from(secret))


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[_Document]:
    """Yield the checked document under the lock; write it back when the body did not raise."""
    with PrivateFolder(path.parent, KeyFileError, create=False) as folder, folder.lock(path.name):
        data = folder.read(path.name, KEY_FILE_LIMIT)
        if data is None:
            raise KeyFileError(path, "does not exist", "It is made on the first start.")
        document = _decode(path, data)
        _ring(path, document, DEFAULT_SUITE)
        yield document
        _ring(path, document, DEFAULT_SUITE)
        folder.replace(path.name, _encode(document))


def _new_secret() -> bytes:
    while True:
        secret = secrets.token_bytes(SECRET_BYTES)
        if weakness_of(secret) is None:
            return secret


def _new_entry(note: str) -> _Entry:
    key = SealKey.of(_new_secret())
    created = datetime.now(UTC).isoformat(timespec="seconds")
    text = base64.b64encode(key.secret).decode()
    return _Entry(key.key_id.hex(), text, created, note[:200], active=True)


def _new_document() -> _Document:
    secret = _new_secret()
    name_id, text = key_id_of(secret).hex(), base64.b64encode(secret).decode()
    return _Document(KEY_FILE_VERSION, name_id, text, [_new_entry("made on first use")])


def _encode(document: _Document) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _decode(path: Path, data: bytes) -> _Document:
    way_out = "Restore it from a copy. A new one makes every stored chunk unreadable."
    if not data.strip():
        raise KeyFileError(path, "is empty", way_out)
    try:
        document = msgspec.json.decode(data, type=_Document, strict=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # The decoder's own text may quote the file.
        raise KeyFileError(path, "is damaged: not the JSON of a key file", way_out) from None
    if document.version != KEY_FILE_VERSION:
        raise KeyFileError(path, f"has not version {KEY_FILE_VERSION}", "Use the kvsafe it is of.")
    return document


def _ring(path: Path, document: _Document, suite: SuiteName) -> Keyring:
    """Check the document and turn it into a ring. Raises `KeyFileError`."""
    entries = document.keys
    way_out = "Restore it from a copy, or correct it by hand."
    active = [entry for entry in entries if entry.active]
    if len(active) != 1:
        raise KeyFileError(path, f"has {len(active)} active keys, not one", way_out)
    if len(entries) > MAX_KEYS or len({entry.id for entry in entries}) != len(entries):
        raise KeyFileError(path, f"has the same key twice, or more than {MAX_KEYS}", way_out)
    name_secret = _secret(path, "name_secret", document.name_secret)
    if key_id_of(name_secret).hex() != document.name_id:
        raise KeyFileError(path, "name_id is not the id of name_secret", way_out)
    keys = {entry.id: _key(path, place, entry) for place, entry in enumerate(entries)}
    current = keys.pop(active[0].id)
    return Keyring(suite, current, name_secret=name_secret, older=keys.values())


def _key(path: Path, place: int, entry: _Entry) -> SealKey:
    key = SealKey.of(_secret(path, f"keys[{place}].secret", entry.secret))
    if key.key_id.hex() != entry.id:
        raise KeyFileError(
            path, f"keys[{place}].id is not the id of its secret", "Restore it from a copy."
        )
    return key


def _secret(path: Path, where: str, text: str) -> bytes:
    secret = _decode_base64(text)
    weakness = "it is not base64" if secret is None else weakness_of(secret)
    if secret is None or weakness is not None:
        raise KeyFileError(path, f"{where} is no secret: {weakness}", "Restore it from a copy.")
    return secret


def _decode_text(text: str) -> bytes | None:
    if len(text) == 2 * SECRET_BYTES:
        with contextlib.suppress(ValueError):
            return bytes.fromhex(text)
    return _decode_base64(text)


def _decode_base64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None

# SPDX-License-Identifier: Apache-2.0
"""Where secrets come from: the key file, or one environment variable.

The key file is JSON, mode 0600, in a folder that nobody else can write, outside every store.
Processes that start at the same time agree on one file; each change replaces the whole file at
once. No error and no log line holds a secret: errors name the path, what is wrong and the way out.
"""

import base64
import binascii
import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn, Self

import msgspec

from kvsafe.seal.keyring import (
    MAX_KEYS,
    SECRET_BYTES,
    Keyring,
    SealKey,
    SuiteName,
    key_id_of,
    name_secret_from,
    weakness_of,
)

KEY_FILE_VERSION: Final = 1
KEY_FILE_LIMIT: Final = 64 * 1024
"""Largest key file that is read, in bytes."""
LOCK_DEADLINE_S: Final = 10.0
"""Longest wait for another process that is changing the same file, in seconds."""

_LOCK_POLL_S: Final = 0.005
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class StateFileError(Exception):
    """One of our private files cannot be trusted or changed: the path, the problem, the way out."""

    def __init__(self, path: Path, problem: str, way_out: str) -> None:
        super().__init__(f"{path}: {problem}. {way_out}")
        self.path = path
        self.problem = problem
        self.way_out = way_out


class KeyFileError(StateFileError):
    """The key file, or the key in the environment, was refused."""


class PrivateFolder:
    """A folder only its owner can write, held open; names in it are opened relative to it.

    Holding the descriptor means that what was checked is what is used, whatever happens to the
    path meanwhile. Every failure is raised as the `error` type given.
    """

    def __init__(self, path: Path, error: type[StateFileError], *, create: bool) -> None:
        """Open `path`; with `create` make it (0700) and its parents when missing."""
        self.path = path
        self._error = error
        try:
            if create:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as exc:
            self._fail(path, exc)
        try:
            self._check(os.fstat(self._fd))
        except StateFileError:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def exists(self, name: str) -> bool:
        """Whether anything, of any kind, has this name."""
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as exc:
            self._fail(self.path / name, exc)
        return True

    def read(self, name: str, limit: int) -> bytes | None:
        """Read a private regular file of at most `limit` bytes; None when there is none."""
        path = self.path / name
        try:
            fd = os.open(name, _READ_FLAGS, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            self._fail(path, exc)
        try:
            check_private(path, os.fstat(fd), self._error)
            data = _read_all(fd, limit + 1)
        except OSError as exc:
            self._fail(path, exc)
        finally:
            os.close(fd)
        if len(data) > limit:
            raise self._error(path, f"larger than {limit} bytes", "It is not a file of ours.")
        return data

    def replace(self, name: str, data: bytes) -> None:
        """Put `data` (0600) under `name` at once and durably. The caller holds `lock(name)`."""
        new = f"{name}.new"
        try:
            # Only a writer that died while it held the lock can have left one.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new, dir_fd=self._fd)
            try:
                self._write(new, data)
                os.rename(new, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(new, dir_fd=self._fd)
                raise
            os.fsync(self._fd)
        except OSError as exc:
            self._fail(self.path / name, exc)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Keep others, threads too, from changing `name`; waits `LOCK_DEADLINE_S` at most."""
        path = self.path / f"{name}.lock"
        try:
            fd = os.open(path.name, _LOCK_FLAGS, 0o600, dir_fd=self._fd)
        except OSError as exc:
            self._fail(path, exc)
        try:
            check_private(path, os.fstat(fd), self._error)
            self._wait_for_lock(fd, path)
            yield
        finally:
            os.close(fd)

    def _wait_for_lock(self, fd: int, path: Path) -> None:
        deadline = time.monotonic() + LOCK_DEADLINE_S
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise self._error(
                        path,
                        f"still locked by another process after {LOCK_DEADLINE_S:g} s",
                        "Find the process that holds it.",
                    ) from None
            except OSError as exc:
                self._fail(path, exc)
            time.sleep(_LOCK_POLL_S)

    def _write(self, name: str, data: bytes) -> None:
        fd = os.open(name, _CREATE_FLAGS, 0o600, dir_fd=self._fd)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)

    def _check(self, info: os.stat_result) -> None:
        mode = stat.S_IMODE(info.st_mode)
        if mode & 0o022:
            raise self._error(
                self.path,
                f"the folder is writable by group or others (mode {mode:04o})",
                "Run chmod go-w on it, or name a file in another folder.",
            )
        if info.st_uid not in (os.geteuid(), 0):
            raise self._error(
                self.path,
                f"the folder belongs to user {info.st_uid}, this process runs as {os.geteuid()}",
                "Name a file in a folder of your own.",
            )

    def _fail(self, path: Path, exc: OSError | ValueError) -> NoReturn:
        if isinstance(exc, OSError) and exc.errno == errno.ELOOP:
            raise self._error(path, "is a symbolic link", "Name the file itself.") from None
        reason = getattr(exc, "strerror", None) or type(exc).__name__
        raise self._error(
            path, f"cannot be used ({reason})", "Check the path, its owner and the space left."
        ) from None


def check_private(path: Path, info: os.stat_result, error: type[StateFileError]) -> None:
    """Raise `error` unless `info` is a regular file of this user that nobody else can open."""
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISREG(info.st_mode):
        raise error(path, "is not a regular file", "Name a regular file.")
    if mode & 0o077:
        raise error(path, f"others may open it (mode {mode:04o})", "Run chmod 600 on it.")
    if info.st_uid != os.geteuid():
        raise error(
            path,
            f"belongs to user {info.st_uid}, this process runs as {os.geteuid()}",
            "Run chown on it, or run as its owner.",
        )


def _read_all(fd: int, limit: int) -> bytes:
    data = b""
    while len(data) < limit and (part := os.read(fd, limit - len(data))):
        data += part
    return data


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


def load_or_create(path: Path, *, suite: SuiteName = "blake3-keyed") -> Keyring:
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
    environ: Mapping[str, str], name: str, *, suite: SuiteName = "blake3-keyed"
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
        _ring(path, document, "blake3-keyed")
        yield document
        _ring(path, document, "blake3-keyed")
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

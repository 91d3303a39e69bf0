# SPDX-License-Identifier: Apache-2.0
"""What was verified before, so that a run that was stopped goes on where it was.

A file of 16-byte records, one per file that was good: a keyed tag over its path, length,
time of writing and inode. So the file tells nothing, and nobody without the key can add a
record. A file that is changed afterwards has another length, time or inode and is verified
again; a change that puts all of them back is what a run without `--resume` is for.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from kvsafe.cli import UsageError
from kvsafe.cli.inspect.keys import Keys
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.suites import Suite

__all__ = ["Memory"]

MAX_RECORDS = 2_000_000
"""Most records that are held (some 170 MB); files beyond are verified again."""

_MAGIC = b"KVSVFY1\n"
_RECORD = 16
_HEAD = len(_MAGIC) + 32
_FLUSH = 256
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Memory:
    """The records of one file, for one root and one set of keys."""

    def __init__(self, path: str, root: str, keys: Keys) -> None:
        """Raises `UsageError` for a file inside the root, of other keys, in use, or not ours."""
        self._path = Path(os.path.abspath(path))
        if os.path.realpath(self._path).startswith(os.path.realpath(root).rstrip("/") + "/"):
            raise UsageError(f"--resume {path}: lies inside the store; name a file outside")
        ring = next(iter(keys.rings.values()), None) or Keyring.unkeyed()
        self._secret, self._root = ring.state_secret, root
        self._fd = self._open()
        try:
            self._known = self._load(self._tag(_terms(keys)))
        except BaseException:
            os.close(self._fd)
            raise
        self._new: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.flush()
        finally:
            os.close(self._fd)

    def _open(self) -> int:
        try:
            fd = os.open(self._path, _FLAGS, 0o600)
        except OSError as exc:
            raise UsageError(f"--resume {self._path}: {exc.strerror}") from None
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                raise UsageError(f"--resume {self._path}: not a regular file of this user")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as exc:
            os.close(fd)
            if isinstance(exc, BlockingIOError):
                raise UsageError(f"--resume {self._path}: another run is using it") from None
            raise
        return fd

    def _load(self, terms: bytes) -> set[bytes]:
        head = _MAGIC + terms
        found = os.pread(self._fd, _HEAD, 0)
        if not found:
            os.pwrite(self._fd, head, 0)
            self._end = _HEAD
            return set()
        if found != head:
            raise UsageError(
                f"--resume {self._path}: made with other keys or suites, or no file of this "
                "command; remove it, or name another"
            )
        size = os.fstat(self._fd).st_size
        # A record that was cut when a run was killed is written over.
        self._end = _HEAD + (size - _HEAD) // _RECORD * _RECORD
        known: set[bytes] = set()
        at = _HEAD
        while at < self._end and len(known) < MAX_RECORDS:
            part = os.pread(self._fd, min(_RECORD << 12, self._end - at), at)
            known.update(part[n : n + _RECORD] for n in range(0, len(part), _RECORD))
            at += len(part) or self._end
        return known

    def _tag(self, message: bytes) -> bytes:
        return Suite.BLAKE3_KEYED.tag(self._secret, b"kvsafe 1 verified\0" + message)

    def _record(self, path: str, info: os.stat_result) -> bytes:
        facts = f"{info.st_size} {info.st_mtime_ns} {info.st_ino}"
        text = f"{self._root}\0{path}\0{facts}"
        return self._tag(text.encode("utf-8", "surrogateescape"))[:_RECORD]

    def knows(self, path: str, info: os.stat_result) -> bool:
        """Whether this very file was good before."""
        return self._record(path, info) in self._known

    def note(self, path: str, info: os.stat_result) -> None:
        """Remember a file that is good."""
        self._new.append(self._record(path, info))
        if len(self._new) >= _FLUSH:
            self.flush()

    def flush(self) -> None:
        """Write what was noted."""
        data = b"".join(self._new)
        if data:
            self._end += os.pwrite(self._fd, data, self._end)
        self._new = []


def _terms(keys: Keys) -> bytes:
    names = ",".join(sorted(suite.label for suite in keys.accepted))
    ids = {key_id.hex() for ring in keys.rings.values() for key_id in ring.key_ids}
    return f"{names} {','.join(sorted(ids))}".encode()

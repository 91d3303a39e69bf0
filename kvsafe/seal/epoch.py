# SPDX-License-Identifier: Apache-2.0
"""The epoch on disk: it goes up when weights or adapters change, and never down.

One small tagged JSON file per state folder, shared by every process on the machine. A raise is
read, plus one, replace, all under a lock: two processes that raise at once get two numbers.

What the tag cannot show is an old copy of the whole folder put back while nobody runs. Within one
process a lower number is refused; a missing file is refused once the folder was used.
"""

import hmac
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from kvsafe.seal.private import PrivateFolder, StateFileError

EPOCH_FILE_VERSION: Final = 1
EPOCH_FILE_LIMIT: Final = 4096
"""Largest epoch file that is read, in bytes."""
MAX_EPOCH: Final = (1 << 63) - 1
MAX_REASON: Final = 200

Mac = Callable[[bytes], bytes]
"""Tag of a short message: at least 16 bytes (keyed with the ring's `state_secret`)."""

_MIN_TAG_BYTES: Final = 16
_RESTORE: Final = "Restore the state folder, or clear both the folder and every tier's store."


class EpochError(StateFileError):
    """The epoch is unknown (damaged, missing, rolled back) or could not be raised.

    Nothing stored can be trusted to be current until it is known: the caller offers no hits.
    """


class _Body(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    version: int
    epoch: int
    reason: str
    raised: str


class _Document(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    body: _Body
    tag: str


_Signature = tuple[int, int, int, int, int]


class EpochFile:
    """The epoch kept at `path`. Threads may share one; processes share the file."""

    def __init__(self, path: Path, mac: Mac, *, first: int = 0) -> None:
        """`mac` tags the file; the folder is made (0700) on the first read.

        `first` is the number that a folder begins with. The time in seconds makes a folder that
        was lost and made anew begin above whatever the lost one had reached.
        """
        if not 0 <= first < MAX_EPOCH:
            raise ValueError(f"an epoch cannot begin at {first}")
        self._first = first
        self._path = path
        self._mac = mac
        self._guard = threading.Lock()
        self._seen = 0
        self._signature: _Signature | None = None

    def read(self) -> int:
        """Return the epoch as it is on disk; the first use of a folder starts it at 0.

        Raises `EpochError` when the file is damaged, not ours, missing after use, or lower than
        this process has seen.
        """
        # Both before the read: a raise that comes between must not look like a roll-back, nor hide
        # behind the signature of a file that was never read.
        with self._guard:
            floor = self._seen
        signature = self._stat()
        with PrivateFolder(self._path.parent, EpochError, create=True) as folder:
            data = folder.read(self._path.name, EPOCH_FILE_LIMIT)
            if data is None:
                with folder.lock(self._path.name):
                    epoch = self._begin(folder)
            else:
                epoch = self._check(data)
                self._mark(folder)
        return self._note(epoch, floor, signature)

    def raise_epoch(self, reason: str) -> int:
        """Make the epoch one higher, durably, and return it.

        `reason` is for people (cut at 200 characters). Raises `EpochError` when it cannot be read
        or written; after a failed write the number on disk may or may not have gone up, never down.
        """
        with self._guard:
            floor = self._seen
        with (
            PrivateFolder(self._path.parent, EpochError, create=True) as folder,
            folder.lock(self._path.name),
        ):
            current = self._floored(self._begin(folder), floor)
            if current >= MAX_EPOCH:
                raise EpochError(self._path, "no higher epoch is left", _RESTORE)
            folder.replace(self._path.name, self._encode(current + 1, reason))
        return self._note(current + 1, floor, None)

    def poll(self) -> int:
        """Return the epoch, reading the file only when its stat says that it was replaced.

        Costs one stat otherwise. A raise by another process shows at the next poll, barring two
        raises within one clock tick of the file system that also reuse the inode. Raises
        `EpochError` as `read` does.
        """
        with self._guard:
            known, seen = self._signature, self._seen
        if known is not None and known == self._stat():
            return seen
        return self.read()

    def _begin(self, folder: PrivateFolder) -> int:
        """Read the epoch under the lock; write 0 if this folder never held one."""
        data = folder.read(self._path.name, EPOCH_FILE_LIMIT)
        if data is not None:
            epoch = self._check(data)
        elif folder.exists(self._used_name) or self._seen > 0:
            raise EpochError(self._path, "is missing although it was used before", _RESTORE)
        else:
            epoch = self._first
            folder.replace(self._path.name, self._encode(epoch, "first use"))
        self._mark(folder, locked=True)
        return epoch

    def _mark(self, folder: PrivateFolder, *, locked: bool = False) -> None:
        """Leave a mark, after the epoch file is there, that tells "never used" from "removed"."""
        if folder.exists(self._used_name):
            return
        if locked:
            folder.replace(self._used_name, b"")
            return
        with folder.lock(self._path.name):
            folder.replace(self._used_name, b"")

    @property
    def _used_name(self) -> str:
        return f"{self._path.name}.used"

    def _encode(self, epoch: int, reason: str) -> bytes:
        raised = datetime.now(UTC).isoformat(timespec="seconds")
        clean = "".join(c if c.isprintable() else "?" for c in reason[:MAX_REASON])
        body = _Body(EPOCH_FILE_VERSION, epoch, clean, raised)
        return msgspec.json.encode(_Document(body, self._tag(body).hex())) + b"\n"

    def _tag(self, body: _Body) -> bytes:
        # The name is under the tag: one epoch file does not pass for another of the same key.
        name = self._path.name.encode("utf-8", "surrogateescape")
        tag = self._mac(b"kvsafe 1 epoch\0" + name + b"\0" + msgspec.json.encode(body))
        if len(tag) < _MIN_TAG_BYTES:
            raise EpochError(self._path, f"its tag has {len(tag)} bytes", "Use a real MAC.")
        return tag

    def _check(self, data: bytes) -> int:
        """Return the epoch of a file's bytes; raises `EpochError` unless the tag is right."""
        try:
            document = msgspec.json.decode(data, type=_Document, strict=True)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise EpochError(self._path, "is damaged: not an epoch file", _RESTORE) from None
        body = document.body
        expected = self._tag(body).hex().encode()
        if not hmac.compare_digest(expected, document.tag.encode("utf-8", "surrogatepass")):
            problem = "is damaged or was written under another key or suite: its tag is wrong"
            raise EpochError(self._path, problem, _RESTORE)
        if body.version != EPOCH_FILE_VERSION or not 0 <= body.epoch <= MAX_EPOCH:
            raise EpochError(self._path, "holds another version or no epoch", _RESTORE)
        return body.epoch

    def _floored(self, epoch: int, floor: int) -> int:
        if epoch < floor:
            problem = f"was rolled back to {epoch}; this process has seen {floor}"
            raise EpochError(self._path, problem, _RESTORE)
        return epoch

    def _note(self, epoch: int, floor: int, signature: _Signature | None) -> int:
        """Remember what was read; return the highest known, so that no thread sees it fall."""
        self._floored(epoch, floor)
        with self._guard:
            self._seen = max(self._seen, epoch)
            self._signature = signature if epoch == self._seen else None
            return self._seen

    def _stat(self) -> _Signature | None:
        try:
            info = self._path.lstat()
        except OSError:
            return None
        return (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns, info.st_size)

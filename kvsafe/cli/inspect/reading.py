# SPDX-License-Identifier: Apache-2.0
"""Files that may be hostile, read within bounds: no link followed, no FIFO waited for.

A file is looked at before it is opened and again after, only regular files are read, and
never more of them than their header has earned: first a page, then the header, and the
payload only if the header is right.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import mmap
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvsafe.cli.inspect.judge import Judge, Place, Verdict, place_of
from kvsafe.seal.layout import PAGE_BYTES
from kvsafe.seal.opening import read_claims
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.tiers.outcome import GONE, FileId

__all__ = ["MAX_ROW_BYTES", "Buffers", "Depth", "Examined", "Reader"]

MAX_ROW_BYTES = 512 << 20
"""Longest file that is read whole, unless the caller says otherwise."""

_REGULAR = "a regular file"
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
}
_PIECE = 4 << 20
_PUBLISHING_S = 60.0
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Depth(enum.Enum):
    """How much of a file is read."""

    HEADER = "header"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Examined:
    """One file after a look.

    Attributes:
        info: what the file system says about it; None if that could not be asked.
        verdict: None if the bytes could not be read.
        trouble: why not, in words; empty if they could.
        gone: it was removed meanwhile, which is no trouble while an engine runs.
    """

    info: os.stat_result | None
    verdict: Verdict | None = None
    trouble: str = ""
    gone: bool = False

    @property
    def word(self) -> str:
        """`good`, `stale`, `unproven`, `refused`, `unread` or `gone`."""
        if self.verdict is not None:
            return self.verdict.word
        return "gone" if self.gone else "unread"

    @property
    def file(self) -> FileId | None:
        """Which file it was."""
        return None if self.info is None else FileId.of(self.info)


class Buffers:
    """One private buffer per thread, as long as the longest row it has met.

    The memory of a buffer is touched only where something is read into it, so a long file
    with a wrong header costs a page.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self, size: int) -> memoryview:
        """`size` bytes (uint8), at least one page behind them; what they hold is arbitrary."""
        held: memoryview | None = getattr(self._local, "view", None)
        if held is None or len(held) < size:
            length = max(PAGE_BYTES, size)
            held = memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            self._local.view = held
        return held[:size]


class Reader:
    """Examines files with one judge. Thread-safe.

    `owner`: user number of a `kvsafe-fs` store, whose files must be as the store makes them
    (owner, mode, one name); None for files of which only the bytes are asked.
    """

    def __init__(
        self, judge: Judge, *, owner: int | None = None, max_row_bytes: int = MAX_ROW_BYTES
    ) -> None:
        self._judge = judge
        self._owner = owner
        self._max = max_row_bytes
        self._buffers = Buffers()

    def examine(self, folder: int, parts: Sequence[str], depth: Depth) -> Examined:
        """Look at the file `parts[-1]` in an open folder. Never raises for what it finds."""
        name = parts[-1]
        info = None
        try:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if (refusal := self._unfit(info)) is not None:
                return Examined(info, Verdict(refusal))
            with _opened(folder, name) as fd:
                info = os.fstat(fd)
                if (refusal := self._unfit(info)) is not None:
                    return Examined(info, Verdict(refusal))
                return self._read(fd, info, place_of(parts), depth)
        except Exception as exc:  # also what a library raises that is none of these
            return _trouble(info, exc)

    def _read(self, fd: int, info: os.stat_result, place: Place | None, depth: Depth) -> Examined:
        size = info.st_size
        if size > self._max:
            said = f"{size} bytes, more than the {self._max} that are read (see --max-row)"
            return Examined(info, trouble=said)
        with self._buffers.get(size) as row:
            first = min(size, PAGE_BYTES)
            read = _fill(fd, row, 0, first)
            claims = read_claims(row[:first], size)
            if isinstance(claims, Refusal):
                return Examined(info, Verdict(claims)) if read else _cut(info)
            fixed, _ = claims
            whole = read and _fill(fd, row, first, fixed.header_bytes)
            if not whole:
                return _cut(info)
            verdict = self._judge.header(row, place)
            if depth is Depth.WHOLE and verdict.refusal is None and verdict.proven:
                if not _fill(fd, row, fixed.header_bytes, size):
                    return _cut(info)
                verdict = self._judge.row(row, verdict)
            return Examined(info, verdict)

    def _unfit(self, info: os.stat_result) -> Refusal | None:
        """Why this cannot be a chunk file, whatever it holds."""
        kind = RefusalKind.TIER_OBJECT
        if not stat.S_ISREG(info.st_mode):
            what = _KINDS.get(stat.S_IFMT(info.st_mode), "something else")
            return Refusal.of(kind, "file type", _REGULAR, what)
        if self._owner is None:
            return None
        if info.st_uid != self._owner:
            return Refusal.of(kind, "file owner", self._owner, info.st_uid)
        if info.st_mode & 0o077:
            return Refusal.of(kind, "file mode", "0600", f"{stat.S_IMODE(info.st_mode):04o}")
        # Two names are what publishing looks like for a moment on some file systems.
        young = info.st_nlink == 2 and time.time() - info.st_ctime < _PUBLISHING_S
        if info.st_nlink > 1 and not young:
            return Refusal.of(kind, "file links", 1, info.st_nlink)
        return None


@contextlib.contextmanager
def _opened(folder: int, name: str) -> Iterator[int]:
    # Recency is the time of access: looking must not make a chunk look used.
    try:
        fd = os.open(name, _FLAGS | os.O_NOATIME, dir_fd=folder)
    except PermissionError:
        fd = os.open(name, _FLAGS, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _fill(fd: int, row: memoryview, start: int, end: int) -> bool:
    """Read `start .. end` of the file into the same place of `row`; False if it is shorter."""
    while start < end:
        with row[start : min(end, start + _PIECE)] as part:
            came = os.preadv(fd, [part], start)
        if came <= 0:
            return False
        start += came
    return True


def _cut(info: os.stat_result) -> Examined:
    found = Refusal.of(RefusalKind.TIER_OBJECT, "file bytes", info.st_size, "fewer while reading")
    return Examined(info, Verdict(found))


def _trouble(info: os.stat_result | None, exc: Exception) -> Examined:
    if isinstance(exc, OSError):
        if exc.errno in GONE:
            return Examined(info, gone=True)
        if exc.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            # Exchanged for a link or a socket between look and open.
            code = errno.errorcode[exc.errno]
            kind = RefusalKind.TIER_OBJECT
            return Examined(info, Verdict(Refusal.of(kind, "file type", _REGULAR, code)))
        return Examined(info, trouble=exc.strerror or type(exc).__name__)
    return Examined(info, trouble=f"cannot be read: {type(exc).__name__}")

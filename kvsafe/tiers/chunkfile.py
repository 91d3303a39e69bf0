# SPDX-License-Identifier: Apache-2.0
"""One chunk file: written whole under a temporary name and published, or read whole."""

import os
from collections.abc import Callable
from typing import Literal

from kvsafe.tiers.buffers import page_aligned
from kvsafe.tiers.calls import Os
from kvsafe.tiers.folders import Folders
from kvsafe.tiers.outcome import Flaw

Sync = Literal["none", "data", "full"]
DIRECT_ALIGN = 4096


class Truncated(Exception):
    """The file ended before its length: it was cut while it was read."""


class Writer:
    """Writes chunk files. Thread-safe."""

    def __init__(self, calls: Os, folders: Folders, sync: Sync, direct: bool) -> None:
        self._calls = calls
        self._folders = folders
        self._sync = sync
        self.settles = sync == "full"
        self._direct = direct

    def write(self, bucket: int, temporary: str, row: memoryview) -> None:
        """Write the whole row under a temporary name and sync it as set. Raises `OSError`."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        if self._direct and page_aligned(row):
            flags |= os.O_DIRECT
        fd = self._calls.open(bucket, temporary, flags)
        try:
            self._fill(fd, row)
            if self._sync != "none":
                self._calls.fdatasync(fd)
        except BaseException:
            self._calls.release(fd)
            raise
        # An error of close is an error of the write: some file systems tell it only here.
        self._calls.close(fd)

    def _fill(self, fd: int, row: memoryview) -> None:
        done = self._calls.write(fd, row, 0)
        while 0 < done < len(row):
            if done % DIRECT_ALIGN:
                self._calls.plain(fd)
            with row[done:] as rest:
                taken = self._calls.write(fd, rest, done)
            done = done + taken if taken > 0 else 0
        if done <= 0:
            raise OSError(5, "a write took no bytes")

    def publish(self, bucket: int, temporary: str, name: str) -> None:
        """Give the file its name; `FileExistsError` if there is one already."""
        self._calls.publish(bucket, temporary, bucket, name)

    def settle(self, bucket: int) -> None:
        """Make the names of what was published in a bucket survive, if that is set."""
        if self.settles:
            self._calls.fsync(bucket)

    def settle_buckets(self) -> None:
        """Make the names of buckets survive, if that is set: after `settle` of each."""
        if self.settles:
            self._calls.fsync(self._folders.objects)
            self._folders.settle()


class Reader:
    """Reads chunk files. Thread-safe."""

    def __init__(self, calls: Os, folders: Folders, direct: bool) -> None:
        self._calls = calls
        self._folders = folders
        self._direct = direct

    def read(
        self,
        bucket: str,
        name: str,
        into: memoryview,
        admit: Callable[[int, os.stat_result], Flaw | None],
    ) -> Flaw | None:
        """Fill `into` with the whole file, or say why it cannot be a chunk.

        `admit` looks at the open file first; what it returns ends the read. Raises `OSError`
        and `Truncated`.
        """
        with self._folders.bucket(bucket) as folder:
            fd = self._open(folder, name, self._direct and page_aligned(into))
        try:
            flaw = admit(fd, self._calls.fstat(fd))
            if flaw is None:
                self._fill(fd, into)
            return flaw
        finally:
            self._calls.close(fd)

    def _open(self, folder: int, name: str, direct: bool) -> int:
        if direct:
            try:
                return self._calls.open(folder, name, os.O_RDONLY | os.O_DIRECT)
            except OSError as exc:
                if exc.errno != 22:  # EINVAL: not something that can be read directly
                    raise
        return self._calls.open(folder, name, os.O_RDONLY)

    def _fill(self, fd: int, into: memoryview) -> None:
        done = self._calls.read(fd, into, 0)
        while 0 < done < len(into):
            if done % DIRECT_ALIGN:
                self._calls.plain(fd)
            with into[done:] as rest:
                came = self._calls.read(fd, rest, done)
            done = done + came if came > 0 else 0
        if done <= 0:
            raise Truncated

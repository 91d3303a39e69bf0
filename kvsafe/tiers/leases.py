# SPDX-License-Identifier: Apache-2.0
"""Which writers of a store are alive: each holds a lock on its own lease file.

The kernel drops a lock however its process ends, kill -9 included. A lease that can be
locked belongs to nobody: its temporaries are removed, then the lease. One that cannot be
locked is alive and its temporaries are never touched. The file holds one number: the bytes
that its writer may still write (see `ledger.py`).
"""

import fcntl
import os
import secrets
import struct

from kvsafe.tiers.calls import Os
from kvsafe.tiers.folders import Folders

_HELD = struct.Struct("<Q")


class Lease:
    """This process as a writer of one store."""

    def __init__(self, calls: Os, folders: Folders) -> None:
        self._calls = calls
        self._folders = folders
        self._count = 0
        self.held = 0
        self.name, self._fd = self._take()

    def _take(self) -> tuple[str, int]:
        while True:
            # os.urandom, not the global random: engines seed that one alike.
            name = f"{os.getpid():x}-{secrets.token_hex(8)}"
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
            fd = self._calls.open(self._folders.leases, name, flags)
            try:
                self._calls.flock(fd, fcntl.LOCK_EX)
                if self._calls.fstat(fd).st_nlink:
                    self._calls.write(fd, memoryview(_HELD.pack(0)), 0)
                    return name, fd
            except BlockingIOError:
                pass  # swept between open and lock: take another
            except BaseException:
                self._calls.close(fd)
                raise
            self._calls.close(fd)

    def temporary(self) -> str:
        """A name for a file being written, unique among all writers and over restarts."""
        self._count += 1
        return f"{self.name}-{self._count:x}-{secrets.token_hex(4)}"

    def note_held(self, held: int) -> None:
        """Write how many bytes this writer may still write (inside the ledger's lock)."""
        self._calls.write(self._fd, memoryview(_HELD.pack(held)), 0)
        self.held = held

    def close(self) -> None:
        """End the lease; nothing may be in flight."""
        try:
            self._calls.unlink(self._folders.leases, self.name)
        finally:
            self._calls.close(self._fd)


def read_held(calls: Os, folders: Folders, name: str) -> int:
    """The number in a lease file (0 if it is gone or damaged)."""
    try:
        fd = calls.open(folders.leases, name, os.O_RDONLY)
    except OSError:
        return 0
    try:
        buffer = bytearray(_HELD.size)
        if calls.read(fd, memoryview(buffer), 0) != _HELD.size:
            return 0
        return int(_HELD.unpack(buffer)[0])
    finally:
        calls.close(fd)


def held_by_all(calls: Os, folders: Folders) -> int:
    """The bytes that all writers together may still write (inside the ledger's lock)."""
    return sum(read_held(calls, folders, name) for name in _names(calls, folders, folders.leases))


def sweep(calls: Os, folders: Folders, own: str) -> int:
    """Remove dead leases and what they were writing; returns how many temporaries went."""
    removed = 0
    for name in _names(calls, folders, folders.leases):
        if name != own:
            removed += _sweep_one(calls, folders, name)
    known = set(_names(calls, folders, folders.leases))
    for name in _names(calls, folders, folders.temporary):
        # Written by nobody who has a lease, and a lease is taken before the first file.
        if _lease_of(name) not in known and not name.startswith("probe-"):
            removed += _drop(calls, folders.temporary, name)
    return removed


def _sweep_one(calls: Os, folders: Folders, name: str) -> int:
    try:
        fd = calls.open(folders.leases, name, os.O_RDWR)
    except OSError:
        return 0
    try:
        calls.flock(fd, fcntl.LOCK_EX)
    except OSError:
        calls.close(fd)
        return 0
    try:
        theirs = _names(calls, folders, folders.temporary)
        theirs = [left for left in theirs if _lease_of(left) == name]
        removed = sum(_drop(calls, folders.temporary, left) for left in theirs)
        if removed == len(theirs):
            # Else the lease stays: its bytes are accounted for until they are gone.
            _drop(calls, folders.leases, name)
        return removed
    finally:
        calls.close(fd)


def _lease_of(temporary: str) -> str:
    return "-".join(temporary.split("-")[:2])


def _drop(calls: Os, folder: int, name: str) -> int:
    try:
        calls.unlink(folder, name)
    except OSError:
        return 0
    return 1


def _names(calls: Os, folders: Folders, folder: int) -> list[str]:
    fd = folders.reopen(folder)
    try:
        return [name for name, _ in calls.listing(fd)]
    finally:
        calls.close(fd)

# SPDX-License-Identifier: Apache-2.0
"""Which writers of a store are alive: each holds a lock on its own lease file.

The kernel drops a lock however its process ends, kill -9 included. A lease that can be
locked belongs to nobody: its temporaries are removed, then the lease. One that cannot be
locked is alive and its temporaries are never touched. The file holds one number: the bytes
that its writer may still write (see `ledger.py`).
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
from collections.abc import Collection

from kvsafe.tiers.calls import Os
from kvsafe.tiers.folders import PROBE, Folders
from kvsafe.tiers.naming import HIDDEN
from kvsafe.tiers.outcome import FULL, GONE

_HELD = struct.Struct("<Q")
_ATTEMPTS = 8


class Lease:
    """This process as a writer of one store."""

    def __init__(self, calls: Os, folders: Folders) -> None:
        self._calls = calls
        self._folders = folders
        self._counting = threading.Lock()
        self._next = 1
        self.held = 0
        self.name, self._fd = "", -1
        try:
            self._take()
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            # Loads need no lease; the first grant takes it, when there is space again.

    def _take(self) -> None:
        for _ in range(_ATTEMPTS):
            # os.urandom, not the global random: engines seed that one alike.
            name = f"{os.getpid():x}-{secrets.token_hex(8)}"
            fd = self._calls.open(self._folders.leases, name, os.O_CREAT | os.O_EXCL | os.O_RDWR)
            try:
                self._calls.flock(fd, fcntl.LOCK_EX)
                if self._calls.fstat(fd).st_nlink:
                    self._write(fd, 0)
                    self.name, self._fd = name, fd
                    return
            except BlockingIOError:
                pass  # swept between open and lock: take another
            except BaseException:
                with contextlib.suppress(OSError):
                    self._calls.unlink(self._folders.leases, name)
                self._calls.release(fd)
                raise
            self._calls.release(fd)
        raise OSError(errno.EAGAIN, "every new lease was swept")

    def _write(self, fd: int, held: int) -> None:
        if self._calls.write(fd, memoryview(_HELD.pack(held)), 0) != _HELD.size:
            raise OSError(errno.EIO, "the lease was not written whole")

    def temporary(self) -> str:
        """A name for a file being written: unique, as the name of the lease is."""
        before, number = self.temporaries(1)
        return f"{before}{number:x}"

    def temporaries(self, count: int) -> tuple[str, int]:
        """How `count` such names begin, and the first of the numbers that follow, in hex."""
        with self._counting:
            first, self._next = self._next, self._next + count
        return f"{HIDDEN}{self.name}-", first

    def note_held(self, held: int) -> None:
        """Write how many bytes this writer may still write (inside the ledger's lock)."""
        if held and self._fd < 0:
            self._take()
        if self._fd >= 0:
            self._write(self._fd, held)
        self.held = held

    def close(self, *, clean: bool) -> None:
        """End the lease, if it has not ended. Never raises.

        If something was left behind, or the file cannot be removed, it stays for whoever sweeps.
        """
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if clean:
            with contextlib.suppress(OSError):
                self._calls.unlink(self._folders.leases, self.name)
        self._calls.release(fd)


def read_held(calls: Os, folders: Folders, name: str) -> int:
    """The number in a lease file: 0 if it is gone, or empty since it is new.

    Raises `OSError` where it cannot be told: with a number that is too low a count would
    leave out what its writer is writing.
    """
    try:
        fd = calls.open(folders.leases, name, os.O_RDONLY)
    except OSError as exc:
        if exc.errno in (*GONE, errno.ELOOP):  # a link is nobody's lease
            return 0
        raise
    try:
        buffer = bytearray(_HELD.size)
        came = calls.read(fd, memoryview(buffer), 0)
        if came not in (0, _HELD.size):
            raise OSError(errno.EIO, "a lease that is not whole")
        return int(_HELD.unpack(buffer)[0])
    finally:
        calls.release(fd)


def held_by_all(calls: Os, folders: Folders, without: Collection[str] = ()) -> int:
    """The bytes that all writers together may still write (inside the ledger's lock)."""
    names = [name for name, _ in folders.listing(folders.leases) if name not in without]
    return sum(read_held(calls, folders, name) for name in names)


def sweep_probes(calls: Os, folders: Folders) -> int:
    """Remove what killed starts have left in the root; one that lives holds a lock on its own.

    Never raises: what stays is swept by the next count. Returns how many went.
    """
    swept = 0
    with contextlib.suppress(OSError):
        for name, info in folders.listing(folders.root):
            if name.startswith(PROBE) and stat.S_ISREG(info.st_mode):
                swept += _sweep_probe(calls, folders.root, name)
    return swept


def _sweep_probe(calls: Os, root: int, name: str) -> bool:
    try:
        fd = calls.open(root, name, os.O_RDWR)
    except OSError:
        return False
    try:
        calls.flock(fd, fcntl.LOCK_EX)
        calls.unlink(root, name)
    except OSError:
        return False
    finally:
        calls.release(fd)
    return True


class DeadWriters:
    """Leases whose writers have ended, locked by us while what they left is removed."""

    def __init__(self, calls: Os, folders: Folders, own: str) -> None:
        self._calls = calls
        self._folders = folders
        self._own = own
        self._locked: dict[str, int] = {}
        self._stays: set[str] = set()
        self.removed = 0
        for name, _ in folders.listing(folders.leases):
            if name != own and (fd := self._lock(name)) is not None:
                self._locked[name] = fd

    @property
    def names(self) -> Collection[str]:
        """The dead leases."""
        return self._locked.keys()

    def _lock(self, name: str) -> int | None:
        try:
            fd = self._calls.open(self._folders.leases, name, os.O_RDWR)
        except OSError:
            return None
        try:
            self._calls.flock(fd, fcntl.LOCK_EX)
        except OSError:
            self._calls.release(fd)
            return None
        return fd

    def clear(self, folder: int, temporary: str) -> bool:
        """Remove a file that was being written, if its writer is dead. False if it stays.

        A file of a living writer is paid for by its grant; one that could not be removed
        is not, and has to be counted.
        """
        lease = "-".join(temporary.removeprefix(HIDDEN).split("-")[:2])
        if lease not in self._locked and self._is_there(lease):
            return True
        try:
            self._calls.unlink(folder, temporary)
        except FileNotFoundError:
            return True
        except OSError:
            self._stays.add(lease)
            return False
        self.removed += 1
        return True

    def _is_there(self, lease: str) -> bool:
        if lease == self._own:
            return True
        try:
            self._calls.stat(self._folders.leases, lease)
        except FileNotFoundError:
            return False
        return True

    def close(self, *, complete: bool) -> None:
        """Let go; after a complete pass over the store, remove the leases as well."""
        for name, fd in self._locked.items():
            if complete and name not in self._stays:
                with contextlib.suppress(OSError):
                    self._calls.unlink(self._folders.leases, name)
            self._calls.release(fd)
        self._locked = {}

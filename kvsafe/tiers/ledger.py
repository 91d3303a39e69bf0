# SPDX-License-Identifier: Apache-2.0
"""The shared account of bytes of one store: one small file, locked for each change.

`charged` is never less than what the folder holds, at any moment and after any crash:

- Room is granted before a byte is written; a grant is charged at once, in full.
- Removed bytes are uncharged after the file is gone.
- A count (`begin_count`, `end_count`) finds what is there. What may have been written while
  it ran was paid from grants that were held when it began or given since, so the sum of
  the three is a bound from above, and the lower of the two bounds is kept.
- A removal from before the end of a count is not uncharged after it: the count may not have
  seen the file any more. `epoch` tells.

So a crash leaves the account too high, never too low, and the next count lowers it. What
counts as one file's bytes is its length rounded up to whole pages, never less than its
allocated blocks when it was counted.
"""

import contextlib
import fcntl
import os
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from kvsafe.tiers.calls import Os
from kvsafe.tiers.folders import Folders
from kvsafe.tiers.leases import Lease, held_by_all
from kvsafe.tiers.outcome import FULL

_RECORD = struct.Struct("<8s16sQQQQQ")
_CRC = struct.Struct("<I")
_MAGIC = b"KVSFSL01"
_LIMIT = 1 << 62
_POLL_S = 0.0005
_UNLOCK_TRIES = 3
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class LedgerBusy(OSError):
    """The account could not be locked in time, or cannot be read."""


@dataclass(slots=True)
class Account:
    """What the file says. `known` is 0 until a count has ended in this boot."""

    boot: bytes = field(default_factory=lambda: bytes(16))
    known: int = 0
    charged: int = 0
    held: int = 0
    granted: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class CountBegun:
    """What a count has to remember from its beginning."""

    held: int
    granted: int


class Ledger:
    """The account of one store, as one process sees it. Thread-safe."""

    def __init__(self, calls: Os, folders: Folders, wait_s: float) -> None:
        self._calls = calls
        self._folders = folders
        self._wait_s = wait_s
        self._mutex = threading.Lock()
        self._fd = -1
        self._boot = boot_id()
        self._joined = False
        try:
            with self._locked():
                pass  # the first change joins
        except OSError as exc:
            if exc.errno not in FULL:
                self.close()
                raise
            # Loads need no account; the first change that can be written joins.

    def peek(self) -> Account:
        """The account as it is, unlocked: for numbers on a page, and for `epoch`."""
        return self._read()

    def grant(
        self,
        lease: Lease,
        want: int,
        unspent: Callable[[], int],
        limits: "Limits",
        within_s: float | None = None,
    ) -> bool:
        """Charge `want` bytes if they fit under the capacity and above the reserve.

        `unspent` tells what the writer may still write; it is asked inside the lock, which is
        waited for `within_s` (None: as it is set). Raises `OSError`.
        """
        with self._locked(within_s) as account:
            others = account.held - min(account.held, lease.held)
            own = unspent() + want
            if not account.known or account.charged + want > limits.capacity:
                return False
            free = free_bytes(self._calls, self._folders)
            if limits.reserve and free - others - own < limits.reserve:
                return False
            account.held = others + own
            account.charged += want
            account.granted += want
            # The lease first: if we die here, the sum over leases is too high, never too low.
            lease.note_held(own)
            return True

    def settle(self, lease: Lease, unspent: Callable[[], int], returned: int = 0) -> None:
        """Note what the writer still holds, and take back what it returns."""
        with self._locked() as account:
            own = unspent()
            account.held = account.held - min(account.held, lease.held) + own
            account.charged -= min(account.charged, returned)
            lease.note_held(own)

    def removed(self, amount: int, epoch: int) -> bool:
        """Uncharge bytes of removed files, unless a count has ended since `epoch` was read."""
        with self._locked() as account:
            if account.epoch != epoch:
                return False
            account.charged -= min(account.charged, amount)
            return True

    def begin_count(self, dead: Collection[str] = ()) -> CountBegun:
        """Before the first folder is listed. What `dead` writers held is found or removed."""
        with self._locked() as account:
            account.held = held_by_all(self._calls, self._folders, dead)
            return CountBegun(account.held, account.granted)

    def end_count(self, begun: CountBegun, found: int) -> Account:
        """After the last folder was listed; `found` bytes were there."""
        with self._locked() as account:
            if account.granted < begun.granted:
                return account  # the file was lost meanwhile: count again
            bound = found + begun.held + (account.granted - begun.granted)
            account.charged = min(account.charged, bound) if account.known else bound
            account.known = 1
            account.epoch += 1
            return account

    @contextlib.contextmanager
    def _locked(self, within_s: float | None = None) -> Iterator[Account]:
        wait_s = self._wait_s if within_s is None else min(within_s, self._wait_s)
        if not self._mutex.acquire(timeout=wait_s):
            raise LedgerBusy("another thread holds the ledger")
        try:
            self._lock_file(wait_s)
            try:
                account = self._read()
                yield account
                self._write(account)
                self._joined = True
            finally:
                self._unlock_file()
        finally:
            self._mutex.release()

    def _lock_file(self, wait_s: float) -> None:
        if self._fd < 0:
            if self._joined:
                raise LedgerBusy("the ledger is closed")
            self._fd = self._calls.open(self._folders.root, "ledger", os.O_CREAT | os.O_RDWR)
        deadline = self._calls.clock() + wait_s
        while True:
            try:
                self._calls.flock(self._fd, fcntl.LOCK_EX)
                return
            except BlockingIOError:
                if self._calls.clock() > deadline:
                    raise LedgerBusy("another process holds the ledger") from None
                time.sleep(_POLL_S)
            except OSError:
                self._unlock_file()  # it may be locked all the same
                raise

    def _unlock_file(self) -> None:
        """Never raises: the change is made. A lock that stays goes with the next change."""
        for _ in range(_UNLOCK_TRIES):
            with contextlib.suppress(OSError):
                self._calls.flock(self._fd, fcntl.LOCK_UN)
                return

    def _read(self) -> Account:
        buffer = bytearray(_RECORD.size + _CRC.size)
        if not self._filled(memoryview(buffer)):
            return Account(boot=self._boot, epoch=secrets.randbelow(1 << 32))
        record, crc = bytes(buffer[: _RECORD.size]), _CRC.unpack(buffer[_RECORD.size :])[0]
        magic, boot, known, *numbers = _RECORD.unpack(record)
        if magic != _MAGIC or crc != zlib.crc32(record) or max(numbers) > _LIMIT:
            return Account(boot=self._boot, epoch=secrets.randbelow(1 << 32))
        if not self._joined and boot != self._boot:
            # After a power loss the file may say less than the folder holds.
            boot, known = self._boot, 0
        return Account(boot, known, *numbers)

    def _filled(self, into: memoryview) -> bool:
        """Read as much as `into` holds. False where the file is shorter, or there is none yet."""
        done = 0
        while self._fd >= 0 and done < len(into):
            came = self._calls.read(self._fd, into[done:], done)
            if came <= 0:
                return False
            done += came
        return done == len(into)

    def _write(self, account: Account) -> None:
        record = _RECORD.pack(
            _MAGIC,
            account.boot,
            account.known,
            account.charged,
            account.held,
            account.granted,
            account.epoch,
        )
        data = record + _CRC.pack(zlib.crc32(record))
        if self._calls.write(self._fd, memoryview(data), 0) != len(data):
            raise LedgerBusy("the ledger could not be written")

    def close(self) -> None:
        """Let go of the file, and so of its lock. Never raises."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._calls.release(fd)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one process allows: bytes in the store, bytes left free on its file system."""

    capacity: int
    reserve: int


def free_bytes(calls: Os, folders: Folders) -> int:
    """Bytes that this user may still write on the store's file system."""
    info = calls.statvfs(folders.root)
    return int(info.f_bavail * info.f_frsize)


def whole_pages(size: int) -> int:
    """Bytes charged for a file of `size` bytes."""
    return -(-size // 4096) * 4096


def boot_id() -> bytes:
    """16 bytes that change when the machine starts; random where that cannot be read."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return bytes.fromhex(file.read(64).strip().replace("-", ""))
    except (OSError, ValueError):
        return secrets.token_bytes(16)

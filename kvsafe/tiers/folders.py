# SPDX-License-Identifier: Apache-2.0
"""The folders of a disk store: checked once, then held open and never named by path again.

ROOT/objects/abc/HEX.chunk    chunks, by the first three digits of their object name
ROOT/objects/abc/.LEASE-N     files being written, by the lease of their writer
ROOT/leases/LEASE             one locked file per process that writes here
ROOT/ledger                   the shared account of bytes (locked for each change)
ROOT/kvsafe-quarantine/       refused files, refusal number first
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable

from kvsafe.tiers.calls import Os, can_rename_new
from kvsafe.tiers.handles import Handle, handle_limit
from kvsafe.tiers.naming import BUCKETS, place_of
from kvsafe.tiers.outcome import FULL, Flaw

QUARANTINE = "kvsafe-quarantine"
PROBE = "probe-"
"""How names begin of files that a start makes in the root for a moment."""
_LINGERING_PART = 8
"""One in so many handles may stay open beside the table before batches open no more of them."""
_ANY = 1 << 30
_LINK_GRACE_S = 60.0
_PROBES = 8
_CHUNK_MODE = stat.S_IFREG | 0o600


class StoreRefused(RuntimeError):
    """The root folder cannot be used; the text says why and what to do."""


class Folders:
    """Descriptors of the folders of one store. Thread-safe."""

    def __init__(self, calls: Os, root: str, row_bytes: int, flaw_number: int = 0) -> None:
        self.calls = calls
        self.row_bytes = row_bytes
        self._flaw_number = flaw_number
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, Handle] = OrderedDict()
        self._handles = handle_limit(BUCKETS)
        self._scarce = self._handles < BUCKETS
        self._lingering = 0
        self._open: list[int] = []
        self._settled = False
        try:
            self.root = self._open_root(root)
            self.objects = self._own("objects")
            self.leases = self._own("leases")
            self.aside = self._own(QUARANTINE)
            self.direct, self.atomic = self._probe()
        except OSError as exc:
            self.close()
            raise StoreRefused(f"{root} cannot be used: {exc.strerror or exc}") from exc

    def _open_root(self, root: str) -> int:
        if not os.path.isabs(root):
            raise StoreRefused(f"root_dir {root!r} is not an absolute path")
        try:
            try:
                fd = self.calls.open_root(root)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another process was faster
                    self.calls.make_root(root)
                fd = self.calls.open_root(root)
        except OSError as exc:
            raise StoreRefused(f"{root} cannot be opened as a folder: {exc.strerror}") from exc
        self._open.append(fd)
        self._check(fd, root, 0o022)
        return fd

    def _check(self, fd: int, name: str, forbidden: int) -> None:
        info = self.calls.fstat(fd)
        if info.st_uid != os.geteuid():
            self.close()
            raise StoreRefused(
                f"{name} belongs to user {info.st_uid}, not to {os.geteuid()}: "
                "whoever owns it can put anything there; use a folder of this user"
            )
        if info.st_mode & forbidden:
            self.close()
            mode = stat.S_IMODE(info.st_mode)
            raise StoreRefused(f"{name} has mode {mode:04o}: others may use it; chmod 0700 it")

    def _own(self, name: str) -> int:
        fd = self._folder(self.root, name)
        self._open.append(fd)
        return fd

    def _folder(self, parent: int, name: str) -> int:
        """Open a folder of ours, made where it is missing."""
        try:
            fd = self._try_folder(parent, name)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # another process was faster
                self.calls.mkdir(parent, name)
            fd = self._try_folder(parent, name)
        return fd

    def _try_folder(self, parent: int, name: str) -> int:
        fd = self.calls.open(parent, name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            info = self.calls.fstat(fd)
            if info.st_uid != os.geteuid() or info.st_mode & 0o077:
                raise PermissionError(errno.EPERM, f"its folder {name} is not ours alone")
        except OSError:
            self.calls.release(fd)
            raise
        return fd

    def _probe(self) -> tuple[bool, bool]:
        """Whether direct I/O opens here, and whether renames that never replace exist."""
        try:
            for _ in range(_PROBES):
                with contextlib.suppress(BlockingIOError, FileNotFoundError):  # swept: another
                    return self._probe_with(f"{PROBE}{secrets.token_hex(8)}")
            raise OSError(errno.EAGAIN, "every probe was swept")
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            # No space for a file: loads can be served all the same. Ask what there is.
            return self._opens_direct("ledger"), can_rename_new(self.root, "leases")

    def _probe_with(self, name: str) -> tuple[bool, bool]:
        fd = self.calls.open(self.root, name, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        try:
            self.calls.flock(fd, fcntl.LOCK_EX)  # until then, and after a kill, it is swept
            self.calls.publish(self.root, name, self.root, name + "-")
            return self._opens_direct(name + "-"), can_rename_new(self.root, name + "-")
        finally:
            for left in (name, name + "-"):
                with contextlib.suppress(OSError):
                    self.calls.unlink(self.root, left)
            self.calls.release(fd)

    def _opens_direct(self, name: str) -> bool:
        try:
            fd = self.calls.open(self.root, name, os.O_RDWR | os.O_DIRECT)
        except OSError:
            return False
        self.calls.release(fd)
        return True

    def settle(self) -> None:
        """Make the names of the root's folders survive, of the root, and of what it lies in.

        Once, before the first store is reported: it may be this process that has made them.
        """
        if self._settled:
            return
        self.calls.fsync(self.root)
        around: list[int] = []
        try:
            while (above := self._above(around[-1] if around else self.root)) is not None:
                around.append(above)
                self.calls.fsync(above)
        finally:
            self._close_all(around)
        self._settled = True

    def _above(self, folder: int) -> int | None:
        """The folder around one; None where the file system, or what this user may see, ends."""
        below = self.calls.fstat(folder)
        try:
            fd = self.calls.open(folder, "..", os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            return None
        try:
            info = self.calls.fstat(fd)
        except OSError:
            self.calls.release(fd)
            raise
        if info.st_dev != below.st_dev or info.st_ino == below.st_ino:
            self.calls.release(fd)
            return None
        return fd

    @staticmethod
    def place(name: bytes) -> tuple[str, str]:
        """Bucket and file name of an object name (1 to 120 bytes)."""
        return place_of(name)

    def bucket(self, key: str, *, make: bool = False) -> "Bucket":
        """The folder of a bucket while it is used, as a context; "" is the quarantine.

        `FileNotFoundError` on entering if it is missing and not to be made.
        """
        return Bucket(self, key, make)

    def take(self, key: str, make: bool) -> Handle:
        """Open or find a bucket and count one more user."""
        handle = self._take_open(key)
        if handle is not None:
            return handle
        fd = self._folder(self.objects, key) if make else self._try_folder(self.objects, key)
        with self._lock:
            spare, handle = fd, self._buckets.get(key)
            if handle is None:
                spare, handle = -1, Handle(fd)
                self._buckets[key] = handle
            handle.users += 1
            closing = [spare, *self._over_limit()]
        self._close_all(closing)
        return handle

    def take_all(self, keys: list[str], make: bool, most_new: int = _ANY) -> list[Handle | None]:
        """As `take` for many; None for each that cannot be had, or not without too many open.

        One that is not there, and not to be made, has a handle without a descriptor. It ends
        before it would open more than `most_new` folders that were not open.
        """
        with self._lock:
            handles = [self._found(key) for key in keys]
        new, ended = 0, len(keys)
        try:
            for at, handle in enumerate(handles):
                if handle is not None:
                    continue
                if new == most_new:
                    ended = at
                    break
                new += 1
                handles[at] = self._take_open(keys[at]) or self._take_new(keys[at], make)
        except BaseException:
            self.drop_all(handles)
            raise
        self.drop_all(handles[ended:])
        return handles[:ended]

    def _take_open(self, key: str) -> Handle | None:
        with self._lock:
            return self._found(key)

    def _found(self, key: str) -> Handle | None:
        """An open bucket with one more user (inside the lock)."""
        handle = self._buckets.get(key)
        if handle is not None:
            handle.users += 1
            if self._scarce:
                self._buckets.move_to_end(key)
        return handle

    def _take_new(self, key: str, make: bool) -> Handle | None:
        if self._lingering >= self._handles // _LINGERING_PART:
            return None
        try:
            return self.take(key, make)
        except FileNotFoundError:
            return Handle.of_none()
        except OSError:
            return None

    def drop_all(self, handles: list[Handle | None]) -> None:
        """One user less of each."""
        closing = []
        with self._lock:
            for handle in handles:
                if handle is not None:
                    handle.users -= 1
                    if handle.forgotten and handle.users == 0:
                        self._lingering -= 1
                        closing.append(handle.fd)
        self._close_all(closing)

    def _over_limit(self) -> list[int]:
        closing = []
        while len(self._buckets) > self._handles:
            _, oldest = self._buckets.popitem(last=False)
            if self._forget(oldest):
                closing.append(oldest.fd)
        return closing

    def _forget(self, handle: Handle) -> bool:
        """Whether a handle that is no longer in the table can be closed now (inside the lock)."""
        handle.forgotten = True
        self._lingering += handle.users > 0
        return handle.users == 0

    def drop(self, handle: Handle) -> None:
        """One user less."""
        self.drop_all([handle])

    def forget_bucket(self, key: str) -> None:
        """Drop a handle whose folder has been removed."""
        with self._lock:
            handle = self._buckets.pop(key, None)
            if handle is None:
                return
            last = self._forget(handle)
        if last:
            self._close_all([handle.fd])

    def _close_all(self, closing: Iterable[int]) -> None:
        for fd in closing:
            if fd >= 0:
                self.calls.release(fd)

    def bucket_names(self) -> list[str]:
        """The buckets that exist."""
        found = self.listing(self.objects)
        return sorted(name for name, info in found if stat.S_ISDIR(info.st_mode))

    def stands(self, key: str, folder: int) -> bool:
        """Whether an open bucket still is the one at its name (a removed one lists as empty)."""
        here, there = self.calls.fstat(folder), self.calls.stat(self.objects, key)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def listing(self, folder: int) -> list[tuple[str, os.stat_result]]:
        """What is in a folder. Over a descriptor of its own: a shared one shares its place."""
        fd = self.calls.open(folder, ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            return self.calls.listing(fd)
        finally:
            self.calls.release(fd)

    def flaw(self, info: os.stat_result) -> Flaw | None:
        """Why this cannot be a chunk, or None. A name that is still being made is no flaw."""
        if (
            info.st_mode == _CHUNK_MODE
            and info.st_size == self.row_bytes
            and info.st_nlink == 1
            and info.st_uid == os.geteuid()
        ):
            return None  # as nearly always
        if not stat.S_ISREG(info.st_mode):
            return self.flaw_of("file type", "-", stat.filemode(info.st_mode)[0])
        if info.st_size != self.row_bytes:
            return self.flaw_of("file bytes", self.row_bytes, info.st_size)
        if info.st_uid != os.geteuid():
            return self.flaw_of("file owner", os.geteuid(), info.st_uid)
        if info.st_mode & 0o077:
            return self.flaw_of("file mode", "0600", f"{stat.S_IMODE(info.st_mode):04o}")
        if info.st_nlink != 1 and not self.in_making(info):
            return self.flaw_of("file links", 1, info.st_nlink)
        return None

    def flaw_of(self, field: str, expected: object, found: object) -> Flaw:
        """A flaw with the number that this store was given for them."""
        return Flaw(field, str(expected), str(found), self._flaw_number)

    def in_making(self, info: os.stat_result) -> bool:
        """Whether two names are what publishing looks like for a moment on this file system."""
        young = self.calls.now() - info.st_ctime < _LINK_GRACE_S
        return not self.atomic and info.st_nlink == 2 and young

    def close(self) -> None:
        """Let go of every descriptor."""
        with self._lock:
            left = [*self._open, *(handle.fd for handle in self._buckets.values())]
            self._open, self._buckets = [], OrderedDict()
        self._close_all(left)


class Bucket:
    """A folder in use, for the length of a `with` block. A class: a generator costs twice that."""

    __slots__ = ("_folders", "_handle", "_key", "_make")

    def __init__(self, folders: Folders, key: str, make: bool) -> None:
        self._folders = folders
        self._key = key
        self._make = make
        self._handle: Handle | None = None

    def __enter__(self) -> int:
        if not self._key:
            return self._folders.aside
        self._handle = handle = self._folders.take(self._key, self._make)
        return handle.fd

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._folders.drop(self._handle)

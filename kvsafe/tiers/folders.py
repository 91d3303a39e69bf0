# SPDX-License-Identifier: Apache-2.0
"""The folders of a disk store: checked once, then held open and never named by path again.

ROOT/objects/ab/HEX.chunk     chunks, by the first byte of their object name
ROOT/tmp/LEASE-...            files being written, by the lease of their writer
ROOT/leases/LEASE             one locked file per process that writes here
ROOT/ledger                   the shared account of bytes (locked for each change)
ROOT/kvsafe-quarantine/       refused files, refusal number first
"""

import contextlib
import errno
import os
import secrets
import stat
import threading

from kvsafe.tiers.calls import Os
from kvsafe.tiers.outcome import Flaw

QUARANTINE = "kvsafe-quarantine"
SUFFIX = ".chunk"
MAX_NAME_BYTES = 120
_LINK_GRACE_S = 60.0


class StoreRefused(RuntimeError):
    """The root folder cannot be used; the text says why and what to do."""


class Folders:
    """Descriptors of the folders of one store. Thread-safe."""

    def __init__(self, calls: Os, root: str, row_bytes: int, flaw_number: int = 0) -> None:
        self.calls = calls
        self.row_bytes = row_bytes
        self._flaw_number = flaw_number
        self._lock = threading.Lock()
        self._buckets: dict[str, int] = {}
        self._open: list[int] = []
        self.root = self._open_root(root)
        try:
            self.objects = self._own("objects")
            self.temporary = self._own("tmp")
            self.leases = self._own("leases")
            self.aside = self._own(QUARANTINE)
            self.direct, self.atomic = self._probe()
        except OSError as exc:
            self.close()
            raise StoreRefused(f"{root} cannot be used: {exc.strerror}") from exc

    def _open_root(self, root: str) -> int:
        if not os.path.isabs(root):
            raise StoreRefused(f"root_dir {root!r} is not an absolute path")
        try:
            try:
                fd = self.calls.open_root(root)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(root), exist_ok=True)
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
        info = self.calls.fstat(fd)
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            self.calls.close(fd)
            raise PermissionError(errno.EPERM, f"its folder {name} is not ours alone")
        return fd

    def _probe(self) -> tuple[bool, bool]:
        """Whether direct I/O opens here, and whether renames that never replace exist."""
        name = f"probe-{secrets.token_hex(8)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        self.calls.close(self.calls.open(self.temporary, name, flags))
        try:
            self.calls.publish(self.temporary, name, self.temporary, name + "-")
            atomic = self.calls.stat(self.temporary, name + "-").st_nlink == 1
            return self._opens_direct(name + "-"), atomic
        finally:
            for left in (name, name + "-"):
                try:
                    self.calls.unlink(self.temporary, left)
                except FileNotFoundError:
                    continue

    def _opens_direct(self, name: str) -> bool:
        try:
            fd = self.calls.open(self.temporary, name, os.O_RDWR | os.O_DIRECT)
        except OSError:
            return False
        self.calls.close(fd)
        return True

    def place(self, name: bytes) -> tuple[str, str]:
        """Bucket and file name of an object name (1 to 120 bytes)."""
        if not 1 <= len(name) <= MAX_NAME_BYTES:
            raise ValueError(f"an object name of {len(name)} bytes")
        text = name.hex()
        return text[:2], text + SUFFIX

    def bucket(self, key: str, *, make: bool) -> int:
        """The folder of a bucket. `FileNotFoundError` if it is missing and not to be made."""
        found = self._buckets.get(key)
        if found is not None:
            return found
        fd = self._folder(self.objects, key) if make else self._try_folder(self.objects, key)
        with self._lock:
            other = self._buckets.setdefault(key, fd)
        if other != fd:
            self.calls.close(fd)
        return other

    def forget_bucket(self, key: str) -> None:
        """Drop a handle whose folder has been removed. The descriptor stays until close."""
        with self._lock:
            fd = self._buckets.pop(key, None)
            if fd is not None:
                # Another thread may be using it at this moment.
                self._open.append(fd)

    def bucket_names(self) -> list[str]:
        """The buckets that exist."""
        fd = self.reopen(self.objects)
        try:
            found = self.calls.listing(fd)
        finally:
            self.calls.close(fd)
        return sorted(name for name, info in found if stat.S_ISDIR(info.st_mode))

    def reopen(self, folder: int) -> int:
        """A descriptor of its own for a listing: a shared one shares its place."""
        return self.calls.open(folder, ".", os.O_RDONLY | os.O_DIRECTORY)

    def flaw(self, info: os.stat_result) -> Flaw | None:
        """Why this cannot be a chunk, or None. A name that is still being made is no flaw."""
        number = self._flaw_number
        if not stat.S_ISREG(info.st_mode):
            return Flaw("file type", "-", stat.filemode(info.st_mode)[0], number)
        if info.st_size != self.row_bytes:
            return Flaw("file bytes", str(self.row_bytes), str(info.st_size), number)
        if info.st_uid != os.geteuid():
            return Flaw("file owner", str(os.geteuid()), str(info.st_uid), number)
        if info.st_mode & 0o077:
            return Flaw("file mode", "0600", f"{stat.S_IMODE(info.st_mode):04o}", number)
        if info.st_nlink != 1 and not self.in_making(info):
            return Flaw("file links", "1", str(info.st_nlink), number)
        return None

    def in_making(self, info: os.stat_result) -> bool:
        """Whether two names are what publishing looks like for a moment on this file system."""
        young = self.calls.now() - info.st_ctime < _LINK_GRACE_S
        return not self.atomic and info.st_nlink == 2 and young

    def close(self) -> None:
        """Let go of every descriptor."""
        with self._lock:
            left = [*self._open, *self._buckets.values()]
            self._open, self._buckets = [], {}
        for fd in left:
            try:
                self.calls.close(fd)
            except OSError:
                continue

# SPDX-License-Identifier: Apache-2.0
"""Every system call of the disk store, one method each, all through one door.

`Os.call` is the seam: a test puts a subclass in its place and fails, shortens, delays or
stalls any call by name and number. Nothing else in this folder touches the store.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Set on every open: no descriptor leaks, no link is followed, no FIFO is waited for."""

_NO_REPLACE = 1
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


class Os:
    """System calls relative to folder descriptors. Errors are `OSError` as the kernel says."""

    def call(self, what: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make one call; `what` is the name of the method that makes it."""
        return function(*args, **kwargs)

    def now(self) -> float:
        """Seconds since 1970, for recency and time to live."""
        return time.time()

    def clock(self) -> float:
        """Seconds of a clock that never goes back, for deadlines."""
        return time.monotonic()

    def open(self, folder: int, name: str, flags: int, mode: int = 0o600) -> int:
        """Open `name` in `folder`."""
        return self.call("open", os.open, name, flags | OPEN_FLAGS, mode, dir_fd=folder)

    def open_root(self, path: str) -> int:
        """Open the root folder by its path: the only call that takes one."""
        return self.call("open_root", os.open, path, os.O_RDONLY | os.O_DIRECTORY | OPEN_FLAGS)

    def make_root(self, path: str) -> None:
        """Make the root folder (0700), and its parents as the umask has it."""
        self.call("make_root", _make_root, path)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        self.call("close", os.close, fd)

    def release(self, fd: int) -> None:
        """Close where an error of it changes nothing: what counts is done, or has failed."""
        with contextlib.suppress(OSError):
            self.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """What the descriptor is."""
        return self.call("fstat", os.fstat, fd)

    def stat(self, folder: int, name: str) -> os.stat_result:
        """What stands at `name`; a link is not followed."""
        return self.call("stat", os.stat, name, dir_fd=folder, follow_symlinks=False)

    def there(self, folder: int, name: str) -> bool:
        """Whether anything stands at `name`; False as well where that cannot be told.

        A quarter of the price of a `stat` that finds nothing, whose exception costs most.
        """
        return self.call("there", os.access, name, os.F_OK, dir_fd=folder, follow_symlinks=False)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at `offset`; returns how many bytes were taken."""
        return self.call("write", os.pwrite, fd, data, offset)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Read at `offset` into a buffer; returns how many bytes came, 0 at the end."""
        return self.call("read", os.preadv, fd, [into], offset)

    def plain(self, fd: int) -> None:
        """Switch direct I/O off on a descriptor."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        self.call("plain", fcntl.fcntl, fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def fdatasync(self, fd: int) -> None:
        """Wait until the bytes and the length are on stable storage."""
        self.call("fdatasync", os.fdatasync, fd)

    def fsync(self, fd: int) -> None:
        """Wait until a folder's entries are on stable storage."""
        self.call("fsync", os.fsync, fd)

    def publish(self, source: int, name: str, target: int, new_name: str) -> None:
        """Rename without replacing: `FileExistsError` when something stands there."""
        self.call("publish", rename_new, source, name, target, new_name)

    def rename(self, source: int, name: str, target: int, new_name: str) -> None:
        """Rename, to a name that is unique by its making."""
        self.call("rename", os.rename, name, new_name, src_dir_fd=source, dst_dir_fd=target)

    def unlink(self, folder: int, name: str) -> None:
        """Remove a name that is not a folder."""
        self.call("unlink", os.unlink, name, dir_fd=folder)

    def mkdir(self, folder: int, name: str) -> None:
        """Make a folder, 0700."""
        self.call("mkdir", os.mkdir, name, 0o700, dir_fd=folder)

    def listing(self, folder: int) -> list[tuple[str, os.stat_result]]:
        """Names in a folder with what they are; what vanishes meanwhile is left out."""
        return self.call("listing", _listing, folder)

    def statvfs(self, fd: int) -> os.statvfs_result:
        """Free space of the file system behind a descriptor."""
        return self.call("statvfs", os.fstatvfs, fd)

    def utime(self, fd: int, accessed_ns: int, modified_ns: int) -> None:
        """Set the time of last use; the time of writing is passed to stay as it is."""
        self.call("utime", os.utime, fd, ns=(accessed_ns, modified_ns))

    def setxattr(self, fd: int, name: str, value: bytes) -> None:
        """Attach a note to a file."""
        self.call("setxattr", os.setxattr, fd, name, value)

    def flock(self, fd: int, how: int) -> None:
        """Lock or unlock; always with LOCK_NB, so that no thread waits in the kernel."""
        self.call("flock", fcntl.flock, fd, how | fcntl.LOCK_NB)


class QuickOs(Os):
    """The same calls where nobody sits in the seam: what every chunk costs, a frame less each."""

    def open(self, folder: int, name: str, flags: int, mode: int = 0o600) -> int:
        """As `Os.open`."""
        return os.open(name, flags | OPEN_FLAGS, mode, dir_fd=folder)

    def close(self, fd: int) -> None:
        """As `Os.close`."""
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """As `Os.fstat`."""
        return os.fstat(fd)

    def stat(self, folder: int, name: str) -> os.stat_result:
        """As `Os.stat`."""
        return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def there(self, folder: int, name: str) -> bool:
        """As `Os.there`."""
        return os.access(name, os.F_OK, dir_fd=folder, follow_symlinks=False)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """As `Os.write`."""
        return os.pwrite(fd, data, offset)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """As `Os.read`."""
        return os.preadv(fd, [into], offset)


def _make_root(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.mkdir(path, 0o700)


def rename_new(source: int, name: str, target: int, new_name: str) -> None:
    """Rename without replacing, atomically where the file system can.

    Elsewhere a link and an unlink: for that moment the file has two names.
    """
    if not _rename_noreplace(source, name, target, new_name):
        os.link(name, new_name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        os.unlink(name, dir_fd=source)


def can_rename_new(folder: int, name: str) -> bool:
    """Whether `rename_new` is one step here; `name` exists, and is found to exist."""
    try:
        return _rename_noreplace(folder, name, folder, name)
    except FileExistsError:
        return True


def _rename_noreplace(source: int, name: str, target: int, new_name: str) -> bool:
    if _renameat2 is None:
        return False
    if _renameat2(source, name.encode(), target, new_name.encode(), _NO_REPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    raise OSError(code, os.strerror(code), new_name)


def _listing(folder: int) -> list[tuple[str, os.stat_result]]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found.append((entry.name, entry.stat(follow_symlinks=False)))
            except FileNotFoundError:
                continue
    return found

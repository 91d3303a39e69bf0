# SPDX-License-Identifier: Apache-2.0
"""Who is alive on a shared region, told by file locks and never by process numbers.

Every process of an engine holds a shared `flock` on its region file for as long as it lives;
the kernel drops it however the process ends, kill -9 included. A region that can be locked
exclusively therefore belongs to nobody and may be removed; a region that cannot is alive
and is never touched. One gate file per user makes create, join and sweep exclusive of one
another, so that nobody sweeps a file between its creation and its first lock.
"""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

GATE_WAIT_S = 30.0
"""Longest wait for the gate; it is held for milliseconds, or while memory is reserved."""

_POLL_S = 0.01
REGION_SUFFIX = ".rows"
_GATE_HELP = "remove it, and see who made it; the folder must be writable for this user"


class GateError(RuntimeError):
    """The region gate cannot be used; the text says why."""


class GateTimeout(GateError):
    """Another process of this user held the region gate for too long."""


def region_prefix() -> str:
    """File name prefix of this user's regions."""
    return f"kvsafe-{os.getuid()}-"


@contextlib.contextmanager
def region_gate(folder: Path, wait_s: float = GATE_WAIT_S) -> Iterator[None]:
    """Hold the gate of this user's regions in `folder`.

    Raises `GateTimeout`, or `GateError` when something that is not ours stands in its place.
    """
    path = folder / f"kvsafe-{os.getuid()}.gate"
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as exc:
        raise GateError(f"{path} cannot be opened ({exc.strerror}): {_GATE_HELP}") from exc
    try:
        if not is_own_file(fd):
            raise GateError(f"{path} is not a file of this user: {_GATE_HELP}")
        _lock_within(fd, wait_s, path)
        yield
    finally:
        os.close(fd)


def _lock_within(fd: int, wait_s: float, path: Path) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise GateTimeout(
                    f"{path}: another process has held this lock for {wait_s:.0f} s; "
                    f"see who with: fuser {path}"
                ) from None
            time.sleep(_POLL_S)


def hold(fd: int) -> None:
    """Mark this process as alive on the region behind `fd`."""
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_own_file(fd: int) -> bool:
    """Whether `fd` is a regular file that belongs to this user."""
    info = os.fstat(fd)
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid()


def unlink_if_same(path: Path, fd: int) -> None:
    """Unlink `path` if it still names the file behind `fd`, and not a later one.

    A name can be forgotten and used again by a restart of the same launch while a process
    of the first one lives on.
    """
    own = os.fstat(fd)
    try:
        named = os.lstat(path)
    except FileNotFoundError:
        return
    if (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino):
        path.unlink(missing_ok=True)


def is_last_holder(fd: int) -> bool:
    """Whether nobody else is alive on the region behind `fd` (call inside the gate).

    False gives up this process's own hold, as a failed conversion of a lock does: ask only
    when about to let go.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sweep_dead_regions(folder: Path) -> list[str]:
    """Remove regions of this user that no process holds; call inside the gate.

    Returns the names that were removed. Files of other users, links, anything that is not
    a regular file and what cannot be removed are left alone.
    """
    removed = []
    for name in sorted(os.listdir(folder)):
        if not (name.startswith(region_prefix()) and name.endswith(REGION_SUFFIX)):
            continue
        if _remove_if_dead(folder / name):
            removed.append(name)
    return removed


def _remove_if_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if not is_own_file(fd) or not is_last_holder(fd):
            return False
        path.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)

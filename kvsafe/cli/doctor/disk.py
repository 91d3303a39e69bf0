# SPDX-License-Identifier: Apache-2.0
"""The folder of a tier and the file system below it, tried with a small file of our own.

Only where the folder is there already: nothing is made but that file, and it is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvsafe.cli.doctor.finding import Finding, bad, ok, unknown, warn
from kvsafe.cli.inspect.screen import amount
from kvsafe.cli.inspect.tree import Tree
from kvsafe.tiers import Os
from kvsafe.tiers.batch import Batch
from kvsafe.tiers.buffers import ThreadBuffers
from kvsafe.tiers.calls import can_rename_new
from kvsafe.tiers.outcome import FULL

__all__ = [
    "IN_MEMORY",
    "Store",
    "examine_store",
    "examine_way",
    "filesystem_of",
    "judge_filesystem",
    "judge_space",
]

_MOUNTS = "/proc/self/mountinfo"
_SIZE = 4096
COUNTED = 200_000
"""Most files that are counted to tell how full a store is."""
_MORE_ROOM = "free space or inodes, or raise this user's quota"
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_SHARED = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "afs")


@dataclass(frozen=True, slots=True)
class Store:
    """One tier of files as it is configured (bytes)."""

    root: str
    kind: str = "kvsafe-fs"
    capacity: int | None = None
    reserve: int = 0
    sync: str = "none"
    direct_io: str = "auto"

    @property
    def name(self) -> str:
        """What its findings are called."""
        return f"store {self.root}"


def examine_store(store: Store, calls: Os | None = None) -> Iterator[Finding]:
    """Everything about one tier's folder."""
    calls = calls or Os()
    if store.kind == "fs":
        # vLLM's own tier goes by the path, links included.
        store = replace(store, root=os.path.realpath(store.root))
    if not os.path.lexists(store.root):
        yield from _not_there(store)
        return
    try:
        # The tier itself opens its root without following a link.
        fd = calls.open_root(store.root)
    except OSError as exc:
        link = exc.errno in (errno.ELOOP, errno.ENOTDIR)
        todo = "name the folder itself, not a link" if link else "correct the path or its owner"
        yield bad(store.name, f"cannot be opened as a folder: {exc.strerror}", todo)
        return
    try:
        yield _owner(store, calls.fstat(fd))
        yield from examine_way(store.name, store.root)
        yield judge_filesystem(store.name, filesystem_of(store.root))
        yield from judge_space(store, calls.statvfs(fd), _used(store.root))
        yield from _Probe(store, calls, fd).findings()
    finally:
        calls.close(fd)


def _not_there(store: Store) -> Iterator[Finding]:
    above = os.path.dirname(store.root)
    while above != "/" and not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.access(above, os.W_OK | os.X_OK):
        yield bad(store.name, f"cannot be made in {above}", "make it for the engine's user, 0700")
        return
    yield ok(store.name, "not there yet; it is made (0700) at the first start")
    yield judge_filesystem(store.name, filesystem_of(above))
    yield from judge_space(store, os.statvfs(above), 0)
    todo = f"mkdir -m 700 {store.root}, and run this again"
    yield unknown(store.name, "sync, renames, direct I/O and locks: the folder is not there", todo)


def _owner(store: Store, info: os.stat_result) -> Finding:
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid != os.geteuid():
        said = f"belongs to user {info.st_uid}, this is user {os.geteuid()}"
        return bad(store.name, said, "run this as the engine's user, or chown it")
    if mode & 0o022:
        return bad(store.name, f"mode {mode:04o}: others may write into it", "chmod 0700")
    if mode & 0o077:
        return warn(store.name, f"mode {mode:04o}: others may list it", "chmod 0700")
    return ok(store.name, f"of this user, mode {mode:04o}")


def examine_way(name: str, path: str) -> Iterator[Finding]:
    """The folders above one of ours: who may write into them can put another one in its place."""
    above = os.path.dirname(os.path.realpath(path))
    while True:
        with contextlib.suppress(OSError):
            info = os.stat(above)
            open_to_all = info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX
            if open_to_all or info.st_uid not in (0, os.geteuid()):
                said = f"{above} (user {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o})"
                todo = "a path whose folders belong to root or the engine's user alone"
                yield warn(name, f"others may exchange it: {said}", todo)
                return
        if above == "/":
            return
        above = os.path.dirname(above)


def filesystem_of(path: str) -> str | None:
    """The kind of the file system at `path`, as the kernel names it; None if it does not tell."""
    real = os.path.realpath(path)
    best, kind = -1, None
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                words = line.split()
                point = words[4].replace("\\040", " ")
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                # Of two mounts on one point the later one is on top.
                if inside and len(point) >= best:
                    best, kind = len(point), words[words.index("-") + 1]
    except (OSError, IndexError, ValueError):
        return None
    return kind


def judge_filesystem(name: str, kind: str | None) -> Finding:
    """What is known about a kind of file system."""
    if kind is None:
        return unknown(name, f"kind of file system: {_MOUNTS} does not tell")
    if kind in IN_MEMORY:
        todo = "use a disk, or give the memory to cpu_bytes_to_use"
        return warn(name, f"on {kind}: it uses memory, and is empty after a restart", todo)
    if kind in _SHARED or kind.startswith("fuse"):
        todo = "use a local disk; or try it: locks must hold between all that use the folder"
        return warn(
            name, f"on {kind}: not tested; calls may hang for as long as the server does", todo
        )
    if kind == "overlay":
        return warn(name, "on overlay: it is lost with the container", "mount a volume there")
    return ok(name, f"on {kind}")


def judge_space(store: Store, info: os.statvfs_result, used: int | None) -> Iterator[Finding]:
    """Whether capacity and reserve fit the disk; `used` bytes are the store's already."""
    name = store.name
    free, total = info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize
    if info.f_files and info.f_favail == 0:
        yield bad(name, "no inode is free on its file system", "remove files, or make more inodes")
    if store.capacity is None:
        said = f"{amount(free)} free of {amount(total)}"
        if store.kind == "fs":
            todo = "use kvsafe-fs with capacity_bytes, or watch the disk"
            yield warn(name, f"{said}; vLLM's fs tier has no capacity", todo)
        else:
            yield ok(name, said)
        return
    inside = f"{amount(used)} used" if used is not None else f"more than {COUNTED:,} files in it"
    said = f"capacity {amount(store.capacity)}, {inside}, {amount(free)} free"
    if store.reserve > free:
        todo = "free space, or a smaller reserve_bytes: until then every store is refused"
        yield bad(name, f"{said}; reserve_bytes {amount(store.reserve)} is more than is free", todo)
    elif store.capacity - (store.capacity if used is None else used) > free - store.reserve:
        todo = "a smaller capacity_bytes; it works, and the disk is full before the tier is"
        yield warn(
            name, f"{said} (reserve {amount(store.reserve)}): it will never be reached", todo
        )
    else:
        yield ok(name, said)


def _used(root: str) -> int | None:
    """Bytes in the files below a store's root; None if there are too many to count here."""
    used = 0
    with Tree(root) as tree:
        for count, entry in enumerate(tree.entries()):
            if count >= COUNTED:
                return None
            used += entry.info.st_size
    return used


class _Probe:
    """One small file in the root, and what can be done with it."""

    def __init__(self, store: Store, calls: Os, root: int) -> None:
        self._store, self._calls, self._root = store, calls, root
        self._file = f".kvsafe-doctor-{secrets.token_hex(8)}"

    def findings(self) -> Iterator[Finding]:
        """Write, sync, rename, batches, direct I/O, locks, notes."""
        name = self._store.name
        try:
            fd = self._calls.open(self._root, self._file, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        except OSError as exc:
            todo = _MORE_ROOM if exc.errno in FULL else "correct its mode"
            yield bad(name, f"no file can be made in it: {exc.strerror}", todo)
            return
        try:
            yield self._write_and_sync(fd)
            yield self._direct()
            yield self._note(fd)
            if self._store.kind != "fs":
                yield self._rename()
                yield self._batches()
                yield self._lock(fd)
        finally:
            self._calls.close(fd)
            with contextlib.suppress(OSError):
                self._calls.unlink(self._root, self._file)

    def _write_and_sync(self, fd: int) -> Finding:
        name, start = self._store.name, time.perf_counter()
        try:
            self._calls.write(fd, memoryview(bytes(_SIZE)), 0)
        except OSError as exc:
            todo = _MORE_ROOM if exc.errno in FULL else "see the kernel's log"
            return bad(name, f"a file of one page cannot be written: {exc.strerror}", todo)
        try:
            self._calls.fdatasync(fd)
            self._calls.fsync(self._root)
        except OSError as exc:
            said = f"sync: {exc.strerror}"
            if self._store.sync == "none":
                return warn(name, f"{said}; sync is none, so nobody asks for it")
            return bad(name, said, "set sync to none, or use another file system")
        spent = 1000 * (time.perf_counter() - start)
        return ok(
            name, f"a file and its name are synced in {spent:.1f} ms (sync: {self._store.sync})"
        )

    def _rename(self) -> Finding:
        name = self._store.name
        try:
            if can_rename_new(self._root, self._file):
                return ok(name, "renames that never replace a file")
        except OSError as exc:
            return bad(name, f"renames: {exc.strerror}", "use another file system")
        try:
            os.link(
                self._file, f"{self._file}-", src_dir_fd=self._root, dst_dir_fd=self._root,
                follow_symlinks=False,
            )  # fmt: skip
            self._calls.unlink(self._root, f"{self._file}-")
        except OSError as exc:
            said = f"neither renames that never replace, nor links: {exc.strerror}"
            return bad(name, said, "use another file system")
        return ok(name, "publishes by link and unlink: it has no rename that never replaces")

    def _batches(self) -> Finding:
        name = self._store.name
        if Batch.load() is None:
            said = "small rows go one by one, more slowly: kvsafe's C object was not built"
            return warn(name, said, "install a C compiler, then kvsafe anew")
        with contextlib.suppress(OSError):
            if can_rename_new(self._root, self._file):
                return ok(name, "small rows go many in one call")
        return warn(name, "small rows go one by one, more slowly: no rename that never replaces")

    def _direct(self) -> Finding:
        name = self._store.name
        try:
            fd = self._calls.open(self._root, self._file, os.O_RDWR | os.O_DIRECT)
        except OSError:
            if self._store.direct_io == "on":
                return bad(name, "no direct I/O, but direct_io is on", "set direct_io to auto")
            return ok(name, "no direct I/O: chunks go through the page cache")
        try:
            with ThreadBuffers(_SIZE).get() as buffer:
                if self._calls.write(fd, buffer, 0) == _SIZE:
                    return ok(name, "direct I/O")
        except OSError as exc:
            return warn(
                name, f"direct I/O opens and does not write: {exc.strerror}", "direct_io: off"
            )
        finally:
            self._calls.close(fd)
        return warn(name, "direct I/O writes less than a page", "set direct_io to off")

    def _lock(self, fd: int) -> Finding:
        name, todo = self._store.name, "use another file system: the ledger needs locks"
        try:
            self._calls.flock(fd, fcntl.LOCK_EX)
            other = self._calls.open(self._root, self._file, os.O_RDWR)
        except OSError as exc:
            return bad(name, f"file locks: {exc.strerror}", todo)
        try:
            self._calls.flock(other, fcntl.LOCK_EX)
        except OSError:
            return ok(name, "file locks hold")
        finally:
            self._calls.close(other)
        return bad(name, "two locks on one file at once: they do not hold", todo)

    def _note(self, fd: int) -> Finding:
        name = self._store.name
        try:
            self._calls.setxattr(fd, "user.kvsafe.refusal", b"doctor")
        except OSError as exc:
            said = f"no notes on files ({exc.strerror}): quarantined ones keep only their number"
            return warn(name, said)
        return ok(name, "notes on files: quarantined ones keep their reason")

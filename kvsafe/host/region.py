# SPDX-License-Identifier: Apache-2.0
"""The shared region: one file in shared memory with the rows of one engine.

    page 0                 what this region is (checked by everyone who joins)
    one page per worker    the geometry that the worker found at registration
    ledger                 generation of every row
    rows                   row r at rows_offset + r * row_bytes

Scheduler and workers of one launch find each other by a launch token; any number of engines
with the same engine id can live side by side, and a file that a dead engine left is swept.
"""

import contextlib
import errno
import hashlib
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from kvsafe.host.lease import (
    REGION_SUFFIX,
    GateError,
    hold,
    is_last_holder,
    is_own_file,
    region_gate,
    region_prefix,
    sweep_dead_regions,
    unlink_if_same,
)
from kvsafe.host.ledger import Ledger, ledger_bytes

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the place of POSIX shared memory on Linux
PAGE = mmap.PAGESIZE
_MAGIC = b"kvsrows1"
_FRONT = struct.Struct("<8sQQQQ32s")
_NOTE = struct.Struct("<I32s")
_EPOCH_AT = 128  # in page 0, behind the front; one aligned word, so that no reader sees half
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the constant is missing from mmap on Python 3.11


class RegionError(RuntimeError):
    """The region cannot be made or joined; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class RegionShape:
    """Sizes of a region: rows, bytes per row (a multiple of the page size), workers."""

    num_rows: int
    row_bytes: int
    workers: int

    @property
    def ledger_offset(self) -> int:
        """First byte of the ledger."""
        return PAGE * (1 + self.workers)

    @property
    def rows_offset(self) -> int:
        """First byte of row 0, on a page boundary."""
        end = self.ledger_offset + ledger_bytes(self.num_rows)
        return -(-end // PAGE) * PAGE

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return self.rows_offset + self.num_rows * self.row_bytes


class HostRegion:
    """One process's hold on the shared rows of its engine.

    Attributes:
        shape: the sizes.
        ledger: generations of the rows.
        rows: memoryview, uint8, shape (num_rows, row_bytes).
        memory: memoryview over the whole file, uint8.
    """

    def __init__(self, path: Path, fd: int, shape: RegionShape, created: bool) -> None:
        self.path = path
        self.shape = shape
        self.created = created
        self._fd: int | None = fd
        self._map = mmap.mmap(fd, shape.total_bytes, flags=mmap.MAP_SHARED)
        self.memory = memoryview(self._map)
        body = self.memory[shape.rows_offset : shape.total_bytes]
        self.rows = body.cast("B", shape=[shape.num_rows, shape.row_bytes])
        self.ledger = Ledger(self.memory[shape.ledger_offset :], shape.num_rows)
        self._epoch = self.memory[_EPOCH_AT : _EPOCH_AT + 8].cast("Q")

    @classmethod
    def open(cls, launch: str, shape: RegionShape, folder: Path = SHARED_MEMORY) -> "HostRegion":
        """Create the region of this launch, or join it if another process has.

        Raises `RegionError` when memory is short or when the region that is there has
        another shape or is not ours, `GateError` when the gate cannot be had.
        """
        _check_shape(shape)
        token = hashlib.sha256(launch.encode()).digest()
        path = folder / f"{region_prefix()}{token.hex()[:24]}{REGION_SUFFIX}"
        with region_gate(folder):
            sweep_dead_regions(folder)
            fd, created = _open_or_create(path)
            try:
                hold(fd)
                if created:
                    _reserve(fd, shape, folder)
                else:
                    _check_front(fd, shape, token, path)
                region = cls(path, fd, shape, created)
            except BaseException:
                if created:
                    unlink_if_same(path, fd)
                os.close(fd)
                raise
            if created:
                region._write_front(token)
        region._advise()
        return region

    def row(self, index: int) -> memoryview:
        """Row `index` as uint8 of `row_bytes`.

        Raises `IndexError` outside the rows and `RegionError` when the region was closed: what
        is not a row must never be taken for the bytes of one.
        """
        if self._fd is None:
            raise RegionError("the region is closed")
        if not 0 <= index < self.shape.num_rows:
            raise IndexError(f"row {index} of {self.shape.num_rows}")
        start = self.shape.rows_offset + index * self.shape.row_bytes
        return self.memory[start : start + self.shape.row_bytes]

    @property
    def epoch(self) -> int:
        """The epoch that the scheduler side last announced to all processes."""
        return int(self._epoch[0])

    def announce_epoch(self, value: int) -> None:
        """Tell every process of this engine the present epoch (scheduler side only)."""
        self._epoch[0] = value

    def register_worker(self, rank: int, document: bytes) -> None:
        """Leave the geometry that worker `rank` found, for the scheduler side to read."""
        limit = PAGE - _NOTE.size
        self._check_rank(rank)
        if len(document) > limit:
            raise RegionError(f"geometry of worker {rank}: {len(document)} bytes, at most {limit}")
        start = PAGE * (1 + rank)
        body = start + _NOTE.size
        self.memory[body : body + len(document)] = document
        digest = hashlib.sha256(document).digest()
        _NOTE.pack_into(self.memory, start, len(document), digest)

    def registration(self, rank: int) -> bytes | None:
        """What worker `rank` has registered, or None if it has not (completely) yet."""
        self._check_rank(rank)
        start = PAGE * (1 + rank)
        length, digest = _NOTE.unpack_from(self.memory, start)
        if not 0 < length <= PAGE - _NOTE.size:
            return None
        body = start + _NOTE.size
        document = bytes(self.memory[body : body + length])
        return document if hashlib.sha256(document).digest() == digest else None

    def forget_name(self) -> None:
        """Unlink the file once every process of the engine has mapped it.

        From then on no way to die, kill -9 included, leaves the memory behind, and no other
        process can open it by name.
        """
        if self._fd is not None:
            unlink_if_same(self.path, self._fd)

    def close(self) -> None:
        """Let go; the last process to do so removes the file. May be called twice.

        The memory is unmapped when the last view of it is gone, and no earlier: a tensor over
        it keeps no buffer lock, so unmapping here would turn its next access into a crash. If
        the gate cannot be had the file stays, and the next start sweeps it.
        """
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        self.ledger.release()
        self._epoch.release()
        self.memory = self.rows = _released()
        del self._map
        try:
            with contextlib.suppress(GateError, OSError), region_gate(self.path.parent):
                if is_last_holder(fd):
                    unlink_if_same(self.path, fd)
        finally:
            os.close(fd)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.shape.workers:
            raise RegionError(f"worker {rank}: the region was made for {self.shape.workers}")

    def _write_front(self, token: bytes) -> None:
        shape = self.shape
        _FRONT.pack_into(
            self.memory,
            0,
            _MAGIC,
            shape.num_rows,
            shape.row_bytes,
            shape.workers,
            0,
            token,
        )

    def _advise(self) -> None:
        # KV of live requests has no place in a core dump.
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_DONTDUMP)
        with contextlib.suppress(OSError):
            self._map.madvise(_MADV_POPULATE_WRITE)


def _released() -> memoryview:
    """A view that refuses every use, to stand where a closed region's memory was."""
    view = memoryview(b"")
    view.release()
    return view


def _check_shape(shape: RegionShape) -> None:
    if shape.num_rows < 1:
        raise RegionError(
            f"cpu_bytes_to_use is too small: one row takes {shape.row_bytes} bytes and the "
            "region must hold at least one"
        )
    if shape.row_bytes % PAGE or shape.row_bytes <= 0 or shape.workers < 1:
        raise ValueError(f"not a region shape: {shape}")


def _open_or_create(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
    except FileExistsError:
        pass
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)
    except OSError as exc:
        raise RegionError(f"{path} cannot be joined: {exc.strerror}") from exc
    if not is_own_file(fd):
        os.close(fd)
        raise RegionError(f"{path} has the name of this launch but is not a file of this user")
    return fd, False


def _reserve(fd: int, shape: RegionShape, folder: Path) -> None:
    """Take the memory now: running out later would be a bus error in mid-copy."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    # A tmpfs without a limit reports no blocks at all.
    if space.f_blocks and shape.total_bytes > free:
        raise RegionError(_no_space(shape, folder, free))
    try:
        os.posix_fallocate(fd, 0, shape.total_bytes)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.ENOMEM):
            raise RegionError(_no_space(shape, folder, free)) from exc
        raise


def _no_space(shape: RegionShape, folder: Path, free: int) -> str:
    return (
        f"{folder} has {free} bytes free, {shape.total_bytes} are needed for "
        f"{shape.num_rows} rows: lower cpu_bytes_to_use, or give the container more shared "
        "memory (docker run --shm-size, or an emptyDir with medium Memory)"
    )


def _check_front(fd: int, shape: RegionShape, token: bytes, path: Path) -> None:
    front = os.pread(fd, _FRONT.size, 0)
    wanted = (_MAGIC, shape.num_rows, shape.row_bytes, shape.workers, 0, token)
    found = _FRONT.unpack(front) if len(front) == _FRONT.size else ()
    if found != wanted or os.fstat(fd).st_size != shape.total_bytes:
        raise RegionError(
            f"{path} belongs to this launch but has another shape: "
            f"expected {wanted[1:4]}, found {found[1:4]} (rows, bytes per row, workers). "
            "All processes of one engine must run with the same configuration."
        )

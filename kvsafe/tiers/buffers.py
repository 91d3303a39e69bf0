# SPDX-License-Identifier: Apache-2.0
"""Private page-aligned buffers, one per thread, and copies that let other threads run."""

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Sequence
from typing import overload

HUGE_BYTES = 2 << 20
"""A huge page, and the least that is worth one."""
_WIPEONFORK = 18
"""`MADV_WIPEONFORK` (Linux 4.14), which Python's `mmap` does not name."""


class ThreadBuffers:
    """`count` buffers of `size` bytes per thread that asks. A stuck thread keeps its own."""

    def __init__(self, size: int, count: int = 1) -> None:
        self._size = size
        self._count = count
        self._local = threading.local()

    def get(self) -> memoryview:
        """This thread's first buffer."""
        return self.get_all()[0]

    def get_all(self) -> list[memoryview]:
        """This thread's buffers, `count` of them; all begin on a page if `size` is pages."""
        views: list[memoryview] | None = getattr(self._local, "views", None)
        if views is None:
            whole, size = own_pages(self._size * self._count), self._size
            views = [whole[at * size : (at + 1) * size] for at in range(self._count)]
            self._local.views = views
        return views


class Rows(Sequence[memoryview]):
    """Some rows of one memory of rows, in any order. Views of them are made when asked for."""

    __slots__ = ("memory", "row_bytes", "starts")

    def __init__(self, memory: memoryview, row_bytes: int, rows: Sequence[int]) -> None:
        """`memory`: bytes, writable. Raises `IndexError` for a row that does not lie in it."""
        if rows and not 0 <= min(rows) <= max(rows) < memory.nbytes // row_bytes:
            raise IndexError(f"rows {min(rows)} to {max(rows)}, of {memory.nbytes // row_bytes}")
        self.memory = memory
        self.row_bytes = row_bytes
        self.starts = [row * row_bytes for row in rows]

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, at: int) -> memoryview: ...
    @overload
    def __getitem__(self, at: slice) -> list[memoryview]: ...
    def __getitem__(self, at: int | slice) -> memoryview | list[memoryview]:
        if isinstance(at, slice):
            return [self._row(start) for start in self.starts[at]]
        return self._row(self.starts[at])

    def _row(self, start: int) -> memoryview:
        return self.memory[start : start + self.row_bytes]


def own_pages(length: int) -> memoryview:
    """`length` bytes of memory of this process, in huge pages where they fill half of one.

    A disk takes a read in as many pieces as its memory has: into 4 MiB of small scattered pages
    reads went in requests of 540 KiB, into huge ones of 2 MiB, and all sizes came up to twice as
    fast. In a child after a fork the memory is empty (`madvise(2)`, MADV_WIPEONFORK), so that the
    parent's stays where a read under way puts its bytes.
    """
    if length * 2 < HUGE_BYTES:
        return memoryview(mmap.mmap(-1, length))
    room = -(-length // HUGE_BYTES) * HUGE_BYTES
    memory = mmap.mmap(-1, room + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(_WIPEONFORK)
    except OSError:
        return memoryview(mmap.mmap(-1, length))
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_BYTES
    return memoryview(memory)[first : first + length]


SMALL_BYTES = 256 << 10
"""Up to here handing the interpreter's lock over costs more than the copy."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy equal lengths of writable bytes; large ones without the interpreter's lock."""
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes into {len(target)}")
    if len(target) <= SMALL_BYTES:
        target[:] = source
        return
    into = (ctypes.c_char * len(target)).from_buffer(target)
    out = (ctypes.c_char * len(source)).from_buffer(source)
    ctypes.memmove(into, out, len(target))


def page_aligned(view: memoryview) -> bool:
    """Whether this memory begins on a page. False for memory that cannot be asked."""
    if view.readonly or len(view) == 0:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % mmap.PAGESIZE == 0

# SPDX-License-Identifier: Apache-2.0
"""The door to `batch.c`: many files in one call, without the interpreter's lock.

The shared object is built beside this file when the package is installed, if there is a C
compiler; without it `Batch.load()` is None and everything goes the long way, one call a file.
See `spec/decisions/0012-batches-in-c.md`.
"""

import ctypes
import mmap
import os
import stat
from array import array
from collections.abc import Sequence
from pathlib import Path

from kvsafe.native import load_beside, sizes_of
from kvsafe.tiers.calls import OPEN_FLAGS
from kvsafe.tiers.outcome import FileId

PLAIN = 0
ASIDE = -1
"""Not as it should be, or not begun: to be taken the long way."""
ABSENT = -2

MEANING = 1
"""Of `batch.c`: another number whenever it does something else with the same structures."""
_NEVER = -(1 << 63)
_MOST_S = 9e9
_MODE = stat.S_IFREG | 0o600


class Rule(ctypes.Structure):
    """What a file must be to go the plain course. Times in ns; see `struct rule`."""

    _fields_ = (
        ("bytes", ctypes.c_int64),
        ("written_min", ctypes.c_int64),
        ("used_min", ctypes.c_int64),
        ("now", ctypes.c_int64),
        ("until", ctypes.c_int64),
        ("mode", ctypes.c_uint32),
        ("owner", ctypes.c_uint32),
    )

    @classmethod
    def of(
        cls, row_bytes: int, now: float, until: float, ttl_s: float | None, fresh_s: float
    ) -> "Rule":
        """For files of one row. `now` in seconds since 1970, `until` of the monotonic clock."""
        return cls(
            row_bytes,
            _NEVER if ttl_s is None else _ns(now - ttl_s),
            _ns(now - fresh_s),
            _ns(now),
            _ns(until),
            _MODE,
            os.geteuid(),
        )


class _Seen(ctypes.Structure):
    _fields_ = (("inode", ctypes.c_uint64), ("written", ctypes.c_int64))


class Batch:
    """The functions of `batch.c`. Every sequence has one entry a file. Thread-safe."""

    def __init__(self, library: ctypes.CDLL) -> None:
        sizes = MEANING, ctypes.sizeof(Rule), ctypes.sizeof(_Seen)
        if sizes_of(library, "kvsafe_batch_sizes", 3) != sizes:
            raise ValueError("a shared object of another version")
        self._library = library
        for name in ("read", "write", "publish", "copy"):
            getattr(library, f"kvsafe_{name}").restype = None
        library.kvsafe_look.restype = ctypes.c_int64

    @classmethod
    def load(cls) -> "Batch | None":
        """The shared object beside this file; None where it was not built, or does not fit."""
        return load_beside(_beside(), "_batch", cls)

    def look(self, folders: Sequence[int], names: Sequence[bytes], rule: Rule) -> list[int]:
        """Per name PLAIN, ABSENT or ASIDE, for as many of them as there was time for."""
        count = _same_length(names, folders)
        answers = (ctypes.c_int32 * count)()
        done = self._library.kvsafe_look(
            ctypes.c_int64(count), _ints(folders), _texts(names), ctypes.byref(rule), answers
        )
        return answers[:done]

    def read(
        self,
        folders: Sequence[int],
        names: Sequence[bytes],
        buffers: Sequence[memoryview],
        direct: bool,
        rule: Rule,
    ) -> list[FileId | None]:
        """Fill buffers of `rule.bytes`. Per file which it was, None for the long way.

        `direct`: past the page cache, if they all begin on a page. So with `write`.
        """
        count = _same_length(names, folders, buffers)
        check_lengths(buffers, rule.bytes)
        answers, seen = (ctypes.c_int32 * count)(), (_Seen * count)()
        held = _Places(buffers)
        self._library.kvsafe_read(
            ctypes.c_int64(count),
            _ints(folders),
            _texts(names),
            held.array,
            ctypes.c_int(os.O_RDONLY | OPEN_FLAGS | held.direct_flag(direct)),
            ctypes.byref(rule),
            answers,
            seen,
        )
        return [
            FileId(which.inode, which.written) if answer == PLAIN else None
            for answer, which in zip(answers, seen, strict=True)
        ]

    def write(
        self,
        folders: Sequence[int],
        names: Sequence[bytes],
        rows: Sequence[memoryview],
        direct: bool,
        sync: bool,
        rule: Rule,
    ) -> list[int]:
        """Make new files of rows of `rule.bytes`. Per file PLAIN or something else."""
        count = _same_length(names, folders, rows)
        check_lengths(rows, rule.bytes)
        answers = (ctypes.c_int32 * count)()
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | OPEN_FLAGS
        held = _Places(rows)
        self._library.kvsafe_write(
            ctypes.c_int64(count),
            _ints(folders),
            _texts(names),
            held.array,
            ctypes.c_int(flags | held.direct_flag(direct)),
            ctypes.c_int(sync),
            ctypes.byref(rule),
            answers,
        )
        return answers[:]

    def publish(
        self, folders: Sequence[int], names: Sequence[bytes], new_names: Sequence[bytes]
    ) -> list[int]:
        """Rename within each folder, never replacing. Per file PLAIN or something else."""
        count = _same_length(names, folders, new_names)
        answers = (ctypes.c_int32 * count)()
        self._library.kvsafe_publish(
            ctypes.c_int64(count), _ints(folders), _texts(names), _texts(new_names), answers
        )
        return answers[:]

    def copy(self, targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
        """Copy each to each; all of one length, writable, and none over another."""
        if not targets:
            return
        count = _same_length(targets, sources)
        length = targets[0].nbytes
        check_lengths(targets, length)
        check_lengths(sources, length)
        to, source = _Places(targets), _Places(sources)
        self._library.kvsafe_copy(
            ctypes.c_int64(count), to.array, source.array, ctypes.c_int64(length)
        )


def _ns(seconds: float) -> int:
    """Nanoseconds, within 64 bits."""
    return int(max(-_MOST_S, min(_MOST_S, seconds)) * 1e9)


def _same_length(first: Sequence[object], *others: Sequence[object]) -> int:
    """How many files: C reads that many of each. Raises `ValueError` for our own misuse."""
    for other in others:
        if len(other) != len(first):
            raise ValueError(f"{len(first)} and {len(other)} entries for one batch")
    return len(first)


def check_lengths(views: Sequence[memoryview], length: int) -> None:
    """Raises `ValueError` if one of the buffers is not `length` bytes long."""
    for view in views:
        if view.nbytes != length:
            raise ValueError(f"a buffer of {view.nbytes} bytes, not {length}")


def _ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(values)).from_buffer(array("i", values))


def _texts(values: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*values)


class _Places:
    """Where buffers begin, for C. They stay exported meanwhile, so that none is unmapped."""

    __slots__ = ("_held", "_places", "array")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._held = [ctypes.c_char.from_buffer(view) for view in views]
        self._places = list(map(ctypes.addressof, self._held))
        self.array = (ctypes.c_void_p * len(views))(*self._places)

    def direct_flag(self, wanted: bool) -> int:
        """The flag for input and output past the page cache, which pages are needed for."""
        pages = wanted and not any(place % mmap.PAGESIZE for place in self._places)
        return os.O_DIRECT if pages else 0


def _beside() -> Path:
    return Path(__file__).parent

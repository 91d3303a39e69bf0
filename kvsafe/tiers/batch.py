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
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

from kvsafe.native import load_beside, sizes_of
from kvsafe.tiers.buffers import Rows
from kvsafe.tiers.calls import OPEN_FLAGS
from kvsafe.tiers.naming import SUFFIX, Names
from kvsafe.tiers.outcome import FileId

PLAIN = 0
ASIDE = -1
"""Not as it should be, or not begun: to be taken the long way, and nothing is left of it."""
ABSENT = -2
STANDS = -3
"""Was to be made, and is there."""
PART = -4
"""Its temporary may be there, in part."""
WHOLE = -5
"""Its temporary was written whole, but it has no name, or is said to have none."""

MEANING = 3
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


@dataclass(frozen=True, slots=True)
class Making:
    """How new files are made.

    Attributes:
        before: how their temporary names begin; a number in hex follows.
        first: the number of the first one.
        direct: past the page cache, if all rows begin on a page.
        sync: whether each is on the disk before it has its name.
    """

    before: str
    first: int
    direct: bool
    sync: bool


Came = ctypes.Array[ctypes.c_int32]


def nothing_made(count: int) -> Came:
    """Before any file of a batch was begun."""
    return (ctypes.c_int32 * count)(*[ASIDE] * count)


class _Naming(ctypes.Structure):
    _fields_ = (
        ("digits", ctypes.c_char_p),
        ("each", ctypes.c_int64),
        ("suffix", ctypes.c_char_p),
    )


class _Making(ctypes.Structure):
    _fields_ = (
        ("temporary", ctypes.c_char_p),
        ("first", ctypes.c_uint64),
        ("flags", ctypes.c_int32),
        ("sync", ctypes.c_int32),
    )


_STRUCTURES = (Rule, _Seen, _Naming, _Making)
_SUFFIX = SUFFIX.encode()
_MAKE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | OPEN_FLAGS


class Batch:
    """The functions of `batch.c`. Every sequence has one entry a file. Thread-safe."""

    def __init__(self, library: ctypes.CDLL) -> None:
        sizes = MEANING, *map(ctypes.sizeof, _STRUCTURES)
        if sizes_of(library, "kvsafe_batch_sizes", len(sizes)) != sizes:
            raise ValueError("a shared object of another version")
        self._library = library
        for name in ("read", "store", "copy"):
            getattr(library, f"kvsafe_{name}").restype = None
        library.kvsafe_look.restype = ctypes.c_int64

    @classmethod
    def load(cls) -> "Batch | None":
        """The shared object beside this file; None where it was not built, or does not fit."""
        return load_beside(_beside(), "_batch", cls)

    def look(self, folders: Sequence[int], names: Names, rule: Rule) -> list[int]:
        """Per name PLAIN, ABSENT or ASIDE, for as many of them as there was time for."""
        count = same_length(names, folders)
        answers = (ctypes.c_int32 * count)()
        done = self._library.kvsafe_look(
            ctypes.c_int64(count),
            _ints(folders),
            ctypes.byref(_naming(names)),
            ctypes.byref(rule),
            answers,
        )
        return answers[:done]

    def read(
        self,
        folders: Sequence[int],
        names: Names,
        buffers: Sequence[memoryview],
        direct: bool,
        rule: Rule,
    ) -> list[FileId | None]:
        """Fill buffers of `rule.bytes`. Per file which it was, None for the long way.

        `direct`: past the page cache, if they all begin on a page. So with `store`.
        """
        count = same_length(names, folders, buffers)
        check_lengths(buffers, rule.bytes)
        answers, seen = (ctypes.c_int32 * count)(), (_Seen * count)()
        held = _Places(buffers)
        self._library.kvsafe_read(
            ctypes.c_int64(count),
            _ints(folders),
            ctypes.byref(_naming(names)),
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

    def store(
        self,
        folders: Sequence[int],
        names: Names,
        rows: Sequence[memoryview],
        making: Making,
        rule: Rule,
        withdrawn: ctypes.c_int32,
        came: Came,
    ) -> None:
        """Make new files of rows of `rule.bytes`, never replacing.

        `came`, from `nothing_made`, tells at any moment what came of each file: PLAIN for those
        that were stored, STANDS, ASIDE, PART or WHOLE. `withdrawn` may be set meanwhile: after that
        no file is begun, and none gets its name.
        """
        count = same_length(names, folders, rows, came)
        check_lengths(rows, rule.bytes)
        held = _Places(rows)
        made = _Making(
            making.before.encode(), making.first, _MAKE | held.direct_flag(making.direct),
            making.sync,
        )  # fmt: skip
        self._library.kvsafe_store(
            ctypes.c_int64(count),
            _ints(folders),
            ctypes.byref(_naming(names)),
            held.array,
            ctypes.byref(made),
            ctypes.byref(rule),
            ctypes.byref(withdrawn),
            came,
        )

    def copy(self, targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
        """Copy each to each; all of one length, writable, and none over another."""
        if not targets:
            return
        count = same_length(targets, sources)
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


def same_length(first: Sized, *others: Sized) -> int:
    """How many files: C reads that many of each. Raises `ValueError` for our own misuse."""
    for other in others:
        if len(other) != len(first):
            raise ValueError(f"{len(first)} and {len(other)} entries for one batch")
    return len(first)


def check_lengths(views: Sequence[memoryview], length: int) -> None:
    """Raises `ValueError` if one of the buffers is not `length` bytes long."""
    lengths = [views.row_bytes] if isinstance(views, Rows) else [view.nbytes for view in views]
    for found in lengths:
        if found != length:
            raise ValueError(f"a buffer of {found} bytes, not {length}")


def _ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(values)).from_buffer(array("i", values))


def _naming(names: Names) -> _Naming:
    if len(names.digits) != names.each * len(names):
        raise ValueError(f"{len(names.digits)} digits for {len(names)} names of {names.each}")
    return _Naming(names.digits.encode(), names.each, _SUFFIX)


class _Places:
    """Where buffers begin, for C. They stay exported meanwhile, so that none is unmapped."""

    __slots__ = ("_held", "_places", "array")

    def __init__(self, views: Sequence[memoryview]) -> None:
        if isinstance(views, Rows):
            self._held = [ctypes.c_char.from_buffer(views.memory)]
            first = ctypes.addressof(self._held[0])
            self._places = [first + start for start in views.starts]
        else:
            self._held = [ctypes.c_char.from_buffer(view) for view in views]
            self._places = list(map(ctypes.addressof, self._held))
        self.array = (ctypes.c_void_p * len(views))(*self._places)

    def direct_flag(self, wanted: bool) -> int:
        """The flag for input and output past the page cache, which pages are needed for."""
        pages = wanted and not any([place % mmap.PAGESIZE for place in self._places])
        return os.O_DIRECT if pages else 0


def _beside() -> Path:
    return Path(__file__).parent

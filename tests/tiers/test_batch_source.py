# SPDX-License-Identifier: Apache-2.0
"""The functions of `batch.c` themselves, and faults seeded in their source: each is noticed."""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

import kvsafe.tiers
from kvsafe.native import SUFFIXES
from kvsafe.tiers import batch
from kvsafe.tiers.batch import (
    ABSENT,
    ASIDE,
    PART,
    PLAIN,
    STANDS,
    WHOLE,
    Batch,
    Making,
    Rule,
    nothing_made,
)  # fmt: skip
from kvsafe.tiers.buffers import ThreadBuffers
from kvsafe.tiers.calls import QuickOs
from kvsafe.tiers.naming import Names
from kvsafe.tiers.order import Order
from tests.tiers.stores import ROW, row_of

LIBRARY = Batch.load()
SOURCE = Path(kvsafe.tiers.__file__).with_name("batch.c")
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
TTL_S = 50_000.0
pytestmark = pytest.mark.skipif(
    LIBRARY is None or COMPILER is None, reason="batch.c was not built: no C compiler"
)


EACH = 7
"""Characters of a name before its end."""


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name:_<{EACH}}.chunk"


def _names(*names: str) -> Names:
    return Names("".join(f"{name:_<{EACH}}" for name in names), EACH, [""] * len(names))


def _file(path: Path) -> Path:
    path.write_bytes(row_of(1))
    path.chmod(0o600)
    return path


def _make(folder: Path) -> None:
    """Files that are chunks or not, by their names."""
    for name in ("good", "longer", "shorter", "mode", "old", "two"):
        _file(_path(folder, name))
    with _path(folder, "longer").open("ab") as file:
        file.write(b"x")
    os.truncate(_path(folder, "shorter"), ROW - 1)
    _path(folder, "mode").chmod(0o644)
    info = _path(folder, "old").stat()
    os.utime(_path(folder, "old"), ns=(info.st_atime_ns, info.st_mtime_ns - 10**14))
    os.link(_path(folder, "two"), folder / "names")
    _path(folder, "link").symlink_to("good")


def _write_up_to(limit: int, write: Callable[[], list[int]]) -> list[int]:
    """Write where files may only be so long."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _times(now: float, clock: float) -> tuple[Rule, Rule]:
    """What a file must be, for calls that have a minute, and for those whose time is over."""
    return Rule.of(ROW, now, clock + 60, TTL_S, 30.0), Rule.of(ROW, now, clock - 1, TTL_S, 30.0)


def _looks_and_reads(library: Batch, folder: Path, fd: int) -> list[object]:
    good, now = _path(folder, "good"), QuickOs().now()
    rule, late = _times(now, QuickOs().clock())
    all_names = ("good", "longer", "shorter", "mode", "link", "old", "two", "gone")
    names, backwards = _names(*all_names), _names(*all_names[::-1])
    folders = [fd] * len(names)
    into = [memoryview(bytearray(ROW)) for _ in folders]
    read = library.read(folders, names, into, False, rule)
    os.utime(good, (now - 3600, now - 7200))
    past = ThreadBuffers(ROW, len(names)).get_all()
    directly = library.read(folders, backwards, past, True, rule)
    again = [memoryview(bytearray(ROW))]
    used = library.read([fd], _names("good"), again, False, rule)
    twice = library.read([fd] * 2, _names("good", "good"), into[:2], False, late)
    many = [memoryview(bytearray(ROW)) for _ in range(40)]
    last = library.read([fd] * 40, _names(*["gone"] * 39, "good"), many, False, rule)
    return [
        library.look(folders, names, rule),
        library.look(folders, names, late),
        library.look([fd], Names("a" * 300, 300, [""]), rule),
        [which is not None for which in read],
        bytes(into[0]) == row_of(1),
        [which is not None for which in directly],
        bytes(past[-1]) == row_of(1),
        [which and which.inode == good.stat().st_ino for which in (read[0], *used)],
        good.stat().st_atime > now - 60 and int(good.stat().st_mtime) == int(now - 7200),
        [which is not None for which in twice],
        last.count(None) == 39 and bytes(many[-1]) == row_of(1),
    ]


def _stores(library: Batch, folder: Path, fd: int) -> list[object]:
    rule, late = _times(QuickOs().now(), QuickOs().clock())
    order, given_up = Order(), Order()
    given_up.withdraw()
    row, number = memoryview(bytearray(row_of(7))), itertools.count(1, 10)

    def store(
        *names: str, rule: Rule = rule, order: Order = order, sync: bool = False
    ) -> list[int]:
        making = Making(".new-", next(number), direct=False, sync=sync)
        rows, came = [row] * len(names), nothing_made(len(names))
        folders = [fd] * len(names)
        library.store(folders, _names(*names), rows, making, rule, order.withdrawn, came)
        return came[:]

    for name in (".new-1", ".new-b"):  # the second is of one that need not be made
        (folder / name).write_bytes(b"in the way")
    came = [
        store("taken"),
        store("good", "new", "mode", "new", sync=True),
        store("x", "y", rule=late),
        store("no", "never", order=given_up),
        _write_up_to(0, lambda: store("none")),
        _write_up_to(100, lambda: store("some")),
    ]
    return [
        *came,
        _path(folder, "good").read_bytes() == row_of(1),
        [path.read_bytes() == row_of(7) for path in folder.glob("new*")],
        [stat.S_IMODE(path.stat().st_mode) for path in folder.glob("new*")],
        sorted(entry.name for entry in folder.iterdir()),
    ]


def _ways(library: Batch, folder: Path) -> list[object]:
    """What the bare functions say of one folder: for the seeded faults below."""
    _make(folder)
    try:
        os.close(os.open(_path(folder, "good"), os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("no direct I/O on this file system")
    fd = os.open(folder, os.O_RDONLY)
    try:
        return _looks_and_reads(library, folder, fd) + _stores(library, folder, fd)
    finally:
        os.close(fd)


EXPECTED: list[object] = [
    [PLAIN, *[ASIDE] * 6, ABSENT],
    [PLAIN],
    [ASIDE],
    [True, *[False] * 7],
    True,
    [*[False] * 7, True],
    True,
    [True, True],
    True,
    [True, False],
    True,
    [PART],
    [STANDS, PLAIN, ASIDE, STANDS],
    [PLAIN, ASIDE],
    [WHOLE, ASIDE],
    [PART],
    [PART],
    True,
    [True],
    [0o600],
    sorted(
        [
            *(f"{name:_<{EACH}}.chunk" for name in ("good", "longer", "shorter", "mode", "link")),
            *(f"{name:_<{EACH}}.chunk" for name in ("old", "two", "new", "x")),
            "names",
            *(f".new-{number:x}" for number in (1, 11, 31, 41, 51)),
        ]
    ),
]

SEEDED = (
    ("info->st_mode == rule->mode && ", "1 && "),
    ("info->st_nlink == 1", "1"),
    ("info->st_size == rule->bytes", "1"),
    ("&& in_ns(&info->st_mtim) >= rule->written_min", ""),
    ("AT_SYMLINK_NOFOLLOW", "0"),
    ("may_read(fd, rule, seen))\n        return fd", "1)\n        return fd"),
    ("!is_plain(&info, rule) ||", ""),
    ("errno == ENOENT ? ABSENT : ASIDE", "ASIDE"),
    ("        info->st_mtim,\n", "        { .tv_sec = 0 },\n"),
    ("in_ns(&time) > rule->until", "0"),
    ("seen->inode = info.st_ino;", "seen->inode = 0;"),
    ("(size_t)rule->bytes, 0) == rule->bytes)\n", "(size_t)rule->bytes - 1, 0) > 0)\n"),
    ("read->aio_nbytes = (uint64_t)bytes;", "read->aio_nbytes = 512;"),
    ("answers[events[i].data] = ", "answers[i] = "),
    # Into the buffer before: what lies behind the last one is somebody else's memory.
    ("read->aio_buf = (uintptr_t)into;", "read->aio_buf = (uintptr_t)into - 4096;"),
    ("read->aio_data = (uint64_t)at;", "read->aio_data = 0;"),
    ("            begun++;", "            (void)begun;"),
    ("length > 0 && length < NAME", "1"),
    ("naming->digits + i * naming->each", "naming->digits"),
    ("read_some(at, some", "read_some(0, some"),
    ("open_to_read(folders[i], naming, first + i", "open_to_read(folders[i], naming, i"),
    ("i > 0 && (is_over(rule) ||", "0 && (is_over(rule) ||"),
    ("(is_over(rule) || is_withdrawn", "(0 || is_withdrawn"),
    ("is_over(rule) || is_withdrawn(withdrawn))", "is_over(rule))"),
    ("    if (is_withdrawn(withdrawn))", "    if (0)"),
    ("return __atomic_load_n(withdrawn, __ATOMIC_SEQ_CST);", "return 0;"),
    ("(unsigned long long)making->first + (unsigned long long)i", "making->first + 0ull"),
    ("if (found != ABSENT)", "if (found == PLAIN)"),
    ("found == PLAIN ? STANDS : ASIDE", "STANDS"),
    ("0) == rule->bytes\n        &&", "0) != -1\n        &&"),
    ("close(fd) == 0 && whole", "close(fd) == 0"),
    ("making->flags, 0600)", "making->flags, 0644)"),
    ("if (fd < 0)\n        return 0;", "if (fd < 0)\n        return 1;"),
)


def _build(source: str, folder: Path) -> Batch:
    (folder / "one.c").write_text(source)
    target = folder / "one.so"
    command = [str(COMPILER), "-O1", "-w", "-fPIC", "-shared", "-o", str(target)]
    subprocess.run([*command, str(folder / "one.c")], check=True, timeout=60)
    return Batch(ctypes.CDLL(str(target)))


def test_the_functions_do_what_they_say(tmp_path: Path) -> None:
    assert LIBRARY is not None
    assert _ways(LIBRARY, tmp_path) == EXPECTED


@pytest.mark.parametrize("fault", SEEDED, ids=[right for right, _ in SEEDED])
def test_a_seeded_fault_is_noticed(tmp_path: Path, fault: tuple[str, str]) -> None:
    source, (right, wrong) = SOURCE.read_text(), fault
    assert right in source, "the seeded fault no longer fits batch.c"
    built = tmp_path / "built"
    built.mkdir()
    folder = tmp_path / "files"
    folder.mkdir()
    assert _ways(_build(source.replace(right, wrong), built), folder) != EXPECTED


def test_a_shared_object_of_another_version_is_not_loaded(tmp_path: Path) -> None:
    source = SOURCE.read_text().replace(
        "    uint32_t owner;", "    uint32_t owner;\n    int64_t more;"
    )
    with pytest.raises(ValueError, match="another version"):
        _build(source, tmp_path)
    (tmp_path / "one.so").rename(tmp_path / f"_batch{SUFFIXES[0]}")
    with patch.object(batch, "_beside", lambda: tmp_path):
        assert Batch.load() is None

# SPDX-License-Identifier: Apache-2.0
"""The functions of `batch.c` themselves, and faults seeded in their source: each is noticed."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

import kvsafe.tiers
from kvsafe.native import SUFFIXES
from kvsafe.tiers import batch
from kvsafe.tiers.batch import ABSENT, ASIDE, PLAIN, Batch, Rule
from kvsafe.tiers.buffers import ThreadBuffers
from kvsafe.tiers.calls import QuickOs
from tests.tiers.stores import ROW, row_of

LIBRARY = Batch.load()
SOURCE = Path(kvsafe.tiers.__file__).with_name("batch.c")
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
TTL_S = 50_000.0
pytestmark = pytest.mark.skipif(
    LIBRARY is None or COMPILER is None, reason="batch.c was not built: no C compiler"
)


def _file(path: Path) -> Path:
    path.write_bytes(row_of(1))
    path.chmod(0o600)
    return path


def _make(folder: Path) -> None:
    """Files that are chunks or not, by their names."""
    for name in ("good", "longer", "shorter", "mode", "old", "two"):
        _file(folder / name)
    with (folder / "longer").open("ab") as file:
        file.write(b"x")
    os.truncate(folder / "shorter", ROW - 1)
    (folder / "mode").chmod(0o644)
    info = (folder / "old").stat()
    os.utime(folder / "old", ns=(info.st_atime_ns, info.st_mtime_ns - 10**14))
    os.link(folder / "two", folder / "names")
    (folder / "link").symlink_to("good")


def _write_up_to(limit: int, write: Callable[[], list[int]]) -> list[int]:
    """Write where files may only be so long."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _ways(library: Batch, folder: Path) -> list[object]:
    """What the bare functions say of one folder: for the seeded faults below."""
    _make(folder)
    good = folder / "good"
    try:
        os.close(os.open(good, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("no direct I/O on this file system")
    names = [b"good", b"longer", b"shorter", b"mode", b"link", b"old", b"two", b"gone"]
    fd = os.open(folder, os.O_RDONLY)
    try:
        now = QuickOs().now()
        rule = Rule.of(ROW, now, QuickOs().clock() + 60, TTL_S, 30.0)
        late = Rule.of(ROW, now, QuickOs().clock() - 1, TTL_S, 30.0)
        folders = [fd] * len(names)
        into = [memoryview(bytearray(ROW)) for _ in names]
        read = library.read(folders, names, into, False, rule)
        rows = [memoryview(bytearray(row_of(7)))] * 2
        wrote = library.write([fd] * 2, [b"good", b"new"], rows, False, True, rule)
        os.utime(good, (now - 3600, now - 7200))
        past = ThreadBuffers(ROW, len(names)).get_all()
        directly = library.read(folders, names[::-1], past, True, rule)
        again = [memoryview(bytearray(ROW))]
        used = library.read([fd], [b"good"], again, False, rule)
        return [
            library.look(folders, names, rule),
            library.look(folders, names, late),
            [which is not None for which in read],
            bytes(into[0]) == row_of(1),
            [which is not None for which in directly],
            bytes(past[-1]) == row_of(1),
            [which and which.inode == good.stat().st_ino for which in (read[0], *used)],
            good.stat().st_atime > now - 60 and int(good.stat().st_mtime) == int(now - 7200),
            wrote,
            good.read_bytes() == row_of(1),
            (folder / "new").read_bytes() == row_of(7),
            library.publish([fd] * 2, [b"new", b"mode"], [b"good", b"named"]),
            good.read_bytes() == row_of(1),
            [
                which is not None
                for which in library.read([fd] * 2, names[:1] * 2, into[:2], False, late)
            ],
            library.write([fd] * 2, [b"x", b"y"], rows, False, False, late),
            _write_up_to(0, lambda: library.write([fd], [b"none"], rows[:1], False, False, rule)),
            _write_up_to(100, lambda: library.write([fd], [b"some"], rows[:1], False, False, rule)),
            sorted(entry.name for entry in folder.iterdir()),
        ]
    finally:
        os.close(fd)


EXPECTED: list[object] = [
    [PLAIN, *[ASIDE] * 6, ABSENT],
    [PLAIN],
    [True, *[False] * 7],
    True,
    [*[False] * 7, True],
    True,
    [True, True],
    True,
    [17, PLAIN],
    True,
    True,
    [17, PLAIN],
    True,
    [True, False],
    [PLAIN, ASIDE],
    [errno.EFBIG],
    [ASIDE],
    sorted(
        [
            "good",
            "longer",
            "shorter",
            "named",
            "link",
            "old",
            "two",
            "names",
            "new",
            "x",
            "none",
            "some",
        ]
    ),
]

SEEDED = (
    ("info->st_mode == rule->mode && ", "1 && "),
    ("info->st_nlink == 1", "1"),
    ("info->st_size == rule->bytes", "1"),
    ("&& in_ns(&info->st_mtim) >= rule->written_min", ""),
    ("AT_SYMLINK_NOFOLLOW", "0"),
    ("!is_plain(&info, rule) ||", ""),
    ("errno == ENOENT ? ABSENT : ASIDE", "ASIDE"),
    ("        info->st_mtim,\n", "        { .tv_sec = 0 },\n"),
    ("in_ns(&time) > rule->until", "0"),
    ("RENAME_NOREPLACE", "0"),
    ("seen->inode = info.st_ino;", "seen->inode = 0;"),
    ("(size_t)rule->bytes, 0) == rule->bytes)\n", "(size_t)rule->bytes - 1, 0) > 0)\n"),
    ("read->aio_nbytes = (uint64_t)bytes;", "read->aio_nbytes = 512;"),
    ("answers[events[i].data] = ", "answers[i] = "),
    ("read->aio_buf = (uintptr_t)into;", "read->aio_buf = (uintptr_t)into + 4096;"),
    ("read->aio_fildes = (uint32_t)fd;", ""),
    ("            begun++;", "            (void)begun;"),
    ("return errno;\n    if (taken", "return PLAIN;\n    if (taken"),
    ("taken != rule->bytes", "0"),
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

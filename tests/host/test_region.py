# SPDX-License-Identifier: Apache-2.0
"""One process and its region: what is refused, what is left alone, what is never half seen."""

import errno
import hashlib
import os
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kvsafe.host import GateError, HostRegion, Ledger, RegionError, RegionShape
from kvsafe.host.lease import region_gate, region_prefix, sweep_dead_regions
from kvsafe.host.ledger import ledger_bytes
from tests.host.processes import ROOT, regions

SHAPE = RegionShape(3, 8192, 2)
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")


def name_of(launch: str) -> str:
    return f"{region_prefix()}{hashlib.sha256(launch.encode()).hexdigest()[:24]}.rows"


@pytest.fixture
def region(shm: Path) -> HostRegion:
    return HostRegion.open("a", SHAPE, shm)


# --- memory --------------------------------------------------------------------------------------


def test_too_little_memory_is_said_and_leaves_nothing(shm: Path) -> None:
    free = os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize
    with pytest.raises(RegionError, match=r"bytes free.*cpu_bytes_to_use.*--shm-size"):
        HostRegion.open("a", RegionShape(free // 4096 + 1, 4096, 1), shm)
    assert regions(shm) == []
    HostRegion.open("a", SHAPE, shm).close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_memory_that_runs_out_while_it_is_taken_leaves_nothing(
    shm: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(code, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(RegionError, match="cpu_bytes_to_use"):
            HostRegion.open("a", SHAPE, shm)
    assert regions(shm) == []
    HostRegion.open("a", SHAPE, shm).close()


def test_a_file_system_without_a_limit_is_not_full(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(shm)
    values = list(real)
    values[2:5] = [0, 0, 0]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    HostRegion.open("a", SHAPE, shm).close()


def test_memory_is_taken_at_once(region: HostRegion, shm: Path) -> None:
    info = os.stat(shm / regions(shm)[0])
    assert info.st_size == SHAPE.total_bytes
    assert info.st_blocks * 512 >= SHAPE.total_bytes
    assert stat.S_IMODE(info.st_mode) == 0o600


def test_no_row_at_all_is_the_operators_mistake(shm: Path) -> None:
    with pytest.raises(RegionError, match="cpu_bytes_to_use is too small"):
        HostRegion.open("a", RegionShape(0, 8192, 1), shm)
    assert os.listdir(shm) == []


@pytest.mark.parametrize("shape", [(1, 4095, 1), (1, 0, 1), (1, -4096, 1), (1, 4096, 0)])
def test_a_shape_that_is_none_is_our_mistake(shm: Path, shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="not a region shape"):
        HostRegion.open("a", RegionShape(*shape), shm)


def test_a_missing_folder_is_said(shm: Path) -> None:
    with pytest.raises(GateError, match="cannot be opened"):
        HostRegion.open("a", SHAPE, shm / "none")


# --- rows ----------------------------------------------------------------------------------------


def test_rows_lie_where_the_shape_says(region: HostRegion) -> None:
    for index in range(SHAPE.num_rows):
        region.row(index)[:] = bytes([index + 1]) * SHAPE.row_bytes
    for index in range(SHAPE.num_rows):
        assert bytes(region.rows[index : index + 1].cast("B")) == bytes(region.row(index))
        start = SHAPE.rows_offset + index * SHAPE.row_bytes
        assert bytes(region.memory[start : start + 1]) == bytes([index + 1])
    assert SHAPE.rows_offset % 4096 == 0
    assert [region.ledger.generation(row) for row in range(3)] == [0, 0, 0]
    assert region.epoch == 0


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_what_is_not_a_row_is_not_given_out(region: HostRegion, index: int) -> None:
    assert len(region.row(2)) == SHAPE.row_bytes
    with pytest.raises(IndexError):
        region.row(index)


def test_a_closed_region_gives_out_nothing(region: HostRegion) -> None:
    region.close()
    with pytest.raises(RegionError, match="closed"):
        region.row(0)
    with pytest.raises(ValueError, match="released"):
        region.ledger.generation(0)
    with pytest.raises(ValueError, match="released"):
        _ = region.epoch
    with pytest.raises(ValueError, match="released"):
        _ = region.memory[0]
    region.close()
    region.forget_name()


_VIEWS = """
import sys, torch
from pathlib import Path
from kvsafe.host import HostRegion, RegionShape
region = HostRegion.open("a", RegionShape(3, 8192, 1), Path(sys.argv[1]))
tensor = torch.frombuffer(region.memory, dtype=torch.uint8)
rows = memoryview(region.rows)
row = region.row(2)
row[:1] = b"\\x07"
region.close()
at = RegionShape(3, 8192, 1).rows_offset + 2 * 8192
print(int(tensor[at]), rows[2, 0], row[0], int(tensor.sum()) >= 7)
"""


def test_views_outlive_the_region(shm: Path) -> None:
    # In a process of its own: if this is wrong, it ends by a signal.
    done = subprocess.run(
        [sys.executable, "-c", _VIEWS, str(shm)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "7 7 7 True"), done.stderr
    assert regions(shm) == []


# --- the ledger ----------------------------------------------------------------------------------


def test_every_allocation_has_a_generation_of_its_own(region: HostRegion, shm: Path) -> None:
    ledger = region.ledger
    given = [ledger.allocate(row) for row in (1, 1, 2, 1, 2)]
    assert [ledger.generation(row) for row in range(len(ledger))] == [0, given[3], given[4]]
    other = HostRegion.open("b", SHAPE, shm)
    given += [other.ledger.allocate(row) for row in (1, 1, 2)]
    other.close()
    assert len(set(given)) == len(given) and 0 not in given
    assert given[:5] == sorted(given[:5])
    assert max(given) < 2**63


def test_ledger_and_rows_do_not_overlap(region: HostRegion) -> None:
    for row in range(SHAPE.num_rows):
        region.ledger.allocate(row)
        region.row(row)[:] = b"\xff" * SHAPE.row_bytes
    given = [region.ledger.generation(row) for row in range(3)]
    assert given == list(range(given[0], given[0] + 3))
    region.register_worker(0, b"x" * 4000)
    region.register_worker(1, b"y" * 4000)
    region.announce_epoch(2**63)
    assert [region.ledger.generation(row) for row in range(3)] == given
    assert region.registration(0) == b"x" * 4000


def test_a_ledger_needs_its_memory_and_knows_its_rows() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Ledger(memoryview(bytearray(ledger_bytes(4) - 1)), 4)
    ledger = Ledger(memoryview(bytearray(64)), 4)
    for row in (4, 2**40):
        with pytest.raises(IndexError):
            ledger.generation(row)
        with pytest.raises(IndexError):
            ledger.allocate(row)
    memory = bytearray(struct.pack("<4Q", 1, 2, 2**63, 3))
    assert [Ledger(memoryview(memory), 4).generation(row) for row in range(4)] == [1, 2, 2**63, 3]


# --- registration and epoch ----------------------------------------------------------------------


def test_a_registration_is_seen_whole_or_not_at_all(region: HostRegion) -> None:
    document = bytes(range(256)) * 8
    assert region.registration(1) is None
    region.register_worker(1, document)
    assert region.registration(1) == document
    assert region.registration(0) is None
    for at in (0, 3, 4, 35, 36, 36 + len(document) - 1):
        byte = region.memory[4096 * 2 + at]
        region.memory[4096 * 2 + at] = byte ^ 0xFF
        assert region.registration(1) is None, at
        region.memory[4096 * 2 + at] = byte
    assert region.registration(1) == document


@pytest.mark.parametrize("length", [0, 4061, 2**31, 2**32 - 1])
def test_a_registration_of_no_possible_length_is_none(region: HostRegion, length: int) -> None:
    region.register_worker(0, b"x")
    struct.pack_into("<I", region.memory, 4096, length)
    assert region.registration(0) is None


def test_a_registration_fits_its_page_or_is_refused(region: HostRegion) -> None:
    region.register_worker(0, b"x" * 4060)
    assert region.registration(0) == b"x" * 4060
    with pytest.raises(RegionError, match="geometry of worker 0"):
        region.register_worker(0, b"x" * 4061)
    assert region.registration(0) == b"x" * 4060
    assert region.registration(1) is None


@pytest.mark.parametrize("rank", [-1, 2, 100])
def test_a_worker_that_the_region_was_not_made_for_is_refused(
    region: HostRegion, rank: int
) -> None:
    with pytest.raises(RegionError, match="made for 2"):
        region.register_worker(rank, b"x")
    with pytest.raises(RegionError, match="made for 2"):
        region.registration(rank)
    assert [region.ledger.generation(row) for row in range(3)] == [0, 0, 0]


def test_the_announced_epoch_is_one_word(region: HostRegion) -> None:
    for epoch in (1, 255, 256, 2**32 - 1, 2**32, 2**63 - 1, 0):
        region.announce_epoch(epoch)
        assert region.epoch == epoch
        assert bytes(region.memory[128:136]) == epoch.to_bytes(8, "little")


# --- what stands in the folder -------------------------------------------------------------------


def _strange(shm: Path) -> dict[str, Path]:
    """Things with our prefix that are none of our business."""
    names = {kind: shm / f"{region_prefix()}{kind}.rows" for kind in ("link", "loop", "fifo")}
    target = shm / "target"
    target.write_bytes(b"kept")
    names["link"].symlink_to(target)
    names["loop"].symlink_to(names["loop"])
    os.mkfifo(names["fifo"])
    names["folder"] = shm / f"{region_prefix()}folder.rows"
    names["folder"].mkdir()
    names["socket"] = shm / f"{region_prefix()}socket.rows"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(names["socket"]))
    names["other suffix"] = shm / f"{region_prefix()}x.tmp"
    names["other suffix"].write_bytes(b"kept")
    names["other user's name"] = shm / "kvsafe-99999-x.rows"
    names["other user's name"].write_bytes(b"kept")
    return names


def test_strange_things_are_left_alone_and_stop_no_start(shm: Path) -> None:
    strange = _strange(shm)
    stale = shm / f"{region_prefix()}stale.rows"
    stale.write_bytes(b"left by a dead engine")
    region = HostRegion.open("a", SHAPE, shm)
    assert not stale.exists()
    for kind, path in strange.items():
        assert os.path.lexists(path), kind
    assert (shm / "target").read_bytes() == b"kept"
    region.close()
    assert all(os.path.lexists(path) for path in strange.values())


@as_root
def test_a_file_of_another_user_is_left_alone(shm: Path) -> None:
    foreign = shm / f"{region_prefix()}foreign.rows"
    foreign.write_bytes(b"theirs")
    os.chown(foreign, NOBODY, NOBODY)
    HostRegion.open("a", SHAPE, shm).close()
    assert foreign.read_bytes() == b"theirs"
    os.chown(foreign, 0, 0)
    HostRegion.open("a", SHAPE, shm).close()
    assert not foreign.exists()


@as_root
def test_a_region_of_another_user_is_never_joined(shm: Path) -> None:
    first = HostRegion.open("a", SHAPE, shm)
    os.chown(shm / name_of("a"), NOBODY, NOBODY)
    with pytest.raises(RegionError, match="not a file of this user"):
        HostRegion.open("a", SHAPE, shm)
    os.chown(shm / name_of("a"), 0, 0)
    joined = HostRegion.open("a", SHAPE, shm)
    assert not joined.created
    joined.close()
    first.close()


@pytest.mark.parametrize("kind", ["link", "loop", "fifo", "folder"])
def test_something_else_under_the_name_of_a_launch_is_never_joined(shm: Path, kind: str) -> None:
    path = shm / name_of("a")
    _strange(shm)[kind].rename(path)
    with pytest.raises(RegionError, match=r"cannot be joined|not a file of this user"):
        HostRegion.open("a", SHAPE, shm)
    assert os.path.lexists(path)
    assert (shm / "target").read_bytes() == b"kept"
    HostRegion.open("b", SHAPE, shm).close()


@pytest.mark.parametrize("kind", ["link", "loop", "fifo", "folder"])
def test_something_else_in_place_of_the_gate_is_said(shm: Path, kind: str) -> None:
    gate = shm / f"kvsafe-{os.getuid()}.gate"
    _strange(shm)[kind].rename(gate)
    with pytest.raises(GateError, match="remove it"):
        HostRegion.open("a", SHAPE, shm)
    assert os.path.lexists(gate)
    assert (shm / "target").read_bytes() == b"kept"
    gate.rmdir() if kind == "folder" else gate.unlink()
    HostRegion.open("a", SHAPE, shm).close()


@as_root
def test_a_gate_of_another_user_is_said(shm: Path) -> None:
    gate = shm / f"kvsafe-{os.getuid()}.gate"
    gate.touch()
    os.chown(gate, NOBODY, NOBODY)
    with pytest.raises(GateError, match="remove it"):
        HostRegion.open("a", SHAPE, shm)


def test_a_stale_file_that_cannot_be_removed_stops_no_start(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = shm / f"{region_prefix()}stale.rows"
    stale.write_bytes(b"")
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == stale:
            raise PermissionError(errno.EPERM, "immutable")
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    HostRegion.open("a", SHAPE, shm).close()
    monkeypatch.undo()
    with region_gate(shm):
        assert sweep_dead_regions(shm) == [stale.name]


@pytest.mark.parametrize("length", [0, 1, 71, 72, 4096])
def test_a_front_that_was_never_finished_is_swept_not_joined(shm: Path, length: int) -> None:
    (shm / name_of("a")).write_bytes(b"kvsrows1".ljust(length, b"\0")[:length])
    region = HostRegion.open("a", SHAPE, shm)
    assert region.created
    region.close()


@pytest.mark.parametrize(
    ("at", "value"), [(0, b"X"), (8, b"\4"), (16, b"\1"), (24, b"\1"), (40, b"Z")]
)
def test_a_front_that_was_changed_is_not_joined(
    region: HostRegion, shm: Path, at: int, value: bytes
) -> None:
    region.memory[at : at + 1] = value
    with pytest.raises(RegionError, match="another shape"):
        HostRegion.open("a", SHAPE, shm)
    assert regions(shm) == [name_of("a")]


@pytest.mark.parametrize("change", [-1, 1, 4096])
def test_a_region_of_another_length_is_not_joined(
    region: HostRegion, shm: Path, change: int
) -> None:
    os.truncate(region.path, SHAPE.total_bytes + change)
    with pytest.raises(RegionError, match="another shape"):
        HostRegion.open("a", SHAPE, shm)

# SPDX-License-Identifier: Apache-2.0
"""The disk store over a folder in which anything may lie, with system calls that fail."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from fuzz.patching import Patch
from fuzz.target import ByteSource, Target, demand
from fuzz.targets.keys import scratch
from kvsafe.tiers import Answer, ChunkStore, Order, Os, StoreRefused, StoreSetting
from kvsafe.tiers import store as store_module
from kvsafe.tiers.calls import P, R
from kvsafe.tiers.keeper import Keeper
from kvsafe.tiers.ledger import _CRC, _MAGIC, _RECORD, boot_id

ROW = 4096
NAMES = tuple(bytes([number]) * 8 + bytes(4) for number in range(5))
_ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.ESTALE, errno.EMFILE)
_WRITING = (
    "write",
    "write",
    "write",
    "publish",
    "unlink",
    "stat",
    "there",
    "open",
    "flock",
    "rename",
    "fstat",
)
_READING = ("read", "read", "read", "open", "rename", "stat", "unlink", "listing", "utime", "fstat")
_KINDS = (
    "nothing", "nothing", "good", "good", "other", "short", "long", "empty", "folder",
    "link", "link in", "fifo", "socket", "second name", "open to all", "sparse", "unreadable",
)  # fmt: skip


def row_of(number: int, fill: int = 0) -> bytes:
    """The row that is stored under name `number`."""
    return blake3(bytes([number, fill])).digest(ROW)


class Faulty(Os):
    """Real calls, of which one fails, or comes back short, now and then (main thread only)."""

    def __init__(self) -> None:
        self.plan: list[tuple[str, int]] = []
        self.fds = 0

    def call(self, what: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make the call, or fail it as planned."""
        planned = [one for one in self.plan if one[0] == what]
        if planned:
            self.plan.remove(planned[0])
            code = planned[0][1]
            if code:
                raise OSError(code, os.strerror(code))
            if what in ("write", "read") and isinstance(args[1], list | memoryview):
                return cast(R, self._short(function, args))
        return function(*args, **kwargs)

    @staticmethod
    def _short(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        fd, data, offset = args
        if isinstance(data, list):
            return function(fd, [data[0][:100]], offset)
        return function(fd, data[:100], offset)


class StillKeeper(Keeper):
    """The housekeeping without its thread: rounds are made where one is asked for."""

    def start(self) -> None:
        """The first round."""
        self.tick()

    def want_count(self) -> None:
        """A round with a count in it, now."""
        self._wanted = True
        self._last_count = float("-inf")
        self.tick()

    def recount(self) -> None:
        """The same."""
        self.want_count()

    def stop(self, timeout_s: float) -> bool:
        """There is no thread."""
        return True


class Disk(Target):
    """`ChunkStore` over a generated folder.

    Oracles: the store opens or is `StoreRefused`; every call answers with an `Outcome`; what is
    loaded is what was stored under that name, or what lay there and passed the judge; a good
    file is never replaced; nothing outside the folder changes; no descriptor and no temporary
    is left; what is charged is never less than what lies there.
    """

    name = "disk"
    max_len = 120
    memory_mib = 64

    def __init__(self) -> None:
        self._home = scratch("disk")
        self._outside = self._home / "outside"
        self._count = 0

    def close(self) -> None:
        _remove(self._home)

    def once(self, data: bytes) -> None:
        source = ByteSource(data)
        self._count += 1
        root = self._home / f"root{self._count}"
        self._outside.write_bytes(row_of(0))
        self._outside.chmod(0o600)
        before = set(os.listdir("/proc/self/fd"))
        try:
            with (
                Patch() as patch,
                contextlib.closing(_Folder(source, root, self._outside)) as folder,
            ):
                patch.set(store_module, "Keeper", StillKeeper)
                folder.work(source)
            self._check_outside()
        finally:
            _remove(root)
        left = set(os.listdir("/proc/self/fd")) - before
        demand(not left, f"{len(left)} descriptors are left open", "memory")

    def _check_outside(self) -> None:
        info = os.stat(self._outside)
        kept = self._outside.read_bytes() == row_of(0)
        demand(
            kept and info.st_mode & 0o777 == 0o600, "a file outside the store changed", "accepted"
        )

    def seeds(self) -> list[bytes]:
        one = [bytes([0, kind, 0, 0, 0, 0, 0, 9]) + bytes(range(40)) for kind in range(len(_KINDS))]
        return [b"", *one, bytes(range(0, 220))]


class _Folder:
    """One generated folder, the store over it, and what must come back from it."""

    def __init__(self, source: ByteSource, root: Path, outside: Path) -> None:
        self.root, self.outside = root, outside
        self.calls = Faulty()
        self.known: dict[int, bytes] = {}
        self.store: ChunkStore | None = None
        self.sockets: list[socket.socket] = []
        shape = source.raw(1)[0]
        self.tidy = shape < 200
        self.foreign = 0
        """Most bytes that others have written here since the first count."""
        self.row_limit = 4 if shape & 1 else 64
        self._make(source, shape)

    def _make(self, source: ByteSource, shape: int) -> None:
        root, objects = self.root, self.root / "objects"
        root.mkdir(mode=0o700)
        odd = source.below(8) if not self.tidy else 0
        if odd == 1:
            root.chmod(0o770)
        if odd == 2:
            objects.symlink_to(self.outside.parent)
        elif odd == 3:
            objects.write_bytes(b"x")
        else:
            objects.mkdir(mode=0o755 if odd == 4 else 0o700)
            for number in range(len(NAMES)):
                self._entry(number, source.pick(_KINDS))
        self._ledger(source, odd)
        if source.rarely():
            (root / "leases").mkdir(mode=0o700)
            (root / "leases" / "1-dead").write_bytes(source.some(12))
        if odd == 7:
            (root / "kvsafe-quarantine").symlink_to(self.outside.parent)

    def _place(self, number: int) -> Path:
        text = NAMES[number].hex()
        folder = self.root / "objects" / text[:3]
        if not folder.exists():
            folder.mkdir(mode=0o700)
        return folder / f"{text}.chunk"

    def _entry(self, number: int, kind: str) -> None:
        place = self._place(number)
        sizes = {"good": ROW, "other": ROW, "short": ROW - 1, "long": ROW + 1, "empty": 0}
        if kind in (*sizes, "open to all", "unreadable"):
            fill = 1 if kind == "other" else 0
            place.write_bytes((row_of(number, fill) + b"\0")[: sizes.get(kind, ROW)])
            place.chmod({"open to all": 0o644, "unreadable": 0o000}.get(kind, 0o600))
        elif kind == "folder":
            place.mkdir(mode=0o700)
        elif kind in ("link", "link in"):
            place.symlink_to(self.outside if kind == "link" else self._place((number + 1) % 5).name)
        elif kind == "fifo":
            os.mkfifo(place, 0o600)
        elif kind == "socket":
            # In a folder whose path is short enough for a socket.
            with contextlib.suppress(OSError):
                self.sockets.append(socket.socket(socket.AF_UNIX))
                self.sockets[-1].bind(str(place))
        elif kind == "second name":
            os.link(self.outside, place)
        elif kind == "sparse":
            with place.open("wb") as file:
                file.truncate(1 << 40)
            place.chmod(0o600)
        if kind == "good" or (kind == "unreadable" and os.geteuid() == 0):
            self.known[number] = row_of(number)

    def _ledger(self, source: ByteSource, odd: int) -> None:
        place, what = self.root / "ledger", source.below(8)
        if odd == 5:
            place.mkdir()
        elif odd == 6:
            place.symlink_to(self.outside)
        elif what == 5:
            place.write_bytes(source.some(80))
        elif what == 6:
            self.foreign = 1 << 62  # an account that lies is believed until the next boot
            numbers = [source.number(60) for _ in range(5)]
            record = _RECORD.pack(_MAGIC, boot_id(), *numbers)
            place.write_bytes(record + _CRC.pack(zlib.crc32(record)))
        if place.is_file():
            place.chmod(0o600)

    def work(self, source: ByteSource) -> None:
        """Open the store and use it."""
        setting = StoreSetting(
            str(self.root), ROW, self.row_limit * ROW, flaw_number=1202, lock_wait_s=2.0,
            quarantine=source.pick(("aside", "remove", "keep")),
        )  # fmt: skip
        try:
            self.store = store = ChunkStore(setting, self.calls)
        except StoreRefused:
            demand(not self.tidy, "a good folder was refused")
            return
        while source.left:
            what = source.below(8)
            self.calls.plan = list(_faults(source, what))
            self._use(source, store, what)
        self.calls.plan = []
        self._settle(store)

    def _use(self, source: ByteSource, store: ChunkStore, what: int) -> None:
        number = source.below(len(NAMES))
        name = NAMES[number]
        if what < 3:
            self._get(store, number, source.below(4) == 3)
        elif what < 5:
            self._put(store, number, source.below(8))
        elif what == 5:
            store.look(NAMES)
        elif what == 6:
            store.touch([name])
            with contextlib.suppress(OSError):
                os.utime(self._place(number), follow_symlinks=False)
        elif source.flag():
            if store.discard(name):
                self.known.pop(number, None)
        else:
            self._meddle(source, number)

    def _get(self, store: ChunkStore, number: int, swap: bool = False) -> None:
        """Load; with `swap` another process stores the chunk anew while the judge looks."""
        buffer = bytearray(ROW)

        def judge(row: memoryview) -> Refused | None:
            if row == row_of(number):
                return None
            if swap:
                _remove(self._place(number))
                self.foreign += 2 * ROW
                self._entry(number, "good")
            return Refused()

        outcome = store.get(NAMES[number], memoryview(buffer), judge)
        if outcome.answer is Answer.DONE:
            demand(buffer == row_of(number), "other bytes than were stored", "accepted")
            demand(number in self.known, "what is no file of ours was loaded", "accepted")
        if outcome.answer is Answer.REFUSED and outcome.quarantined:
            demand(number not in self.known, "a good chunk went to quarantine")

    def _put(self, store: ChunkStore, number: int, hitch: int) -> None:
        """Store; meanwhile the deadline passes (7), or another process stores the same (6)."""
        place = self._place(number)
        stood = [place.lstat().st_ino] if number in self.known and place.exists() else []

        def wanted() -> bool:
            if hitch == 6 and not os.path.lexists(place):
                self.foreign += 2 * ROW
                self._entry(number, "good")
                stood.append(place.lstat().st_ino)
            return hitch != 7

        outcome = store.put(NAMES[number], memoryview(bytearray(row_of(number))), _Asked(wanted))
        if outcome.answer is Answer.DONE:
            demand(hitch != 7, "stored after its deadline", "accepted")
            self.known[number] = row_of(number)
        if stood and place.exists():
            demand(place.lstat().st_ino == stood[-1], "a good file was replaced", "accepted")

    def _meddle(self, source: ByteSource, number: int) -> None:
        """Somebody else puts something there while the store is in use."""
        place = self._place(number)
        _remove(place)
        self.foreign += 2 * ROW
        self.known.pop(number, None)
        self._entry(number, source.pick(_KINDS))

    def _settle(self, store: ChunkStore) -> None:
        """Without faults: what lies there is counted, and charged in full."""
        counts = store.keeper.counts
        store.keeper.want_count()
        demand(store.keeper.counts > counts, "a count that was asked for failed", "hang")
        charged, lies = store.charged, _bytes_in(self.root)
        demand(charged + self.foreign >= lies, f"{charged} bytes charged, {lies} lie there")
        for number in range(len(NAMES)):
            self._get(store, number)

    def close(self) -> None:
        """Close the store; nothing that it was writing stays."""
        for one in self.sockets:
            one.close()
        if self.store is not None:
            self.calls.plan = []
            self.store.close()


def _faults(source: ByteSource, what: int) -> Iterator[tuple[str, int]]:
    """Calls that fail, or come back short, during the next use."""
    if source.flag():
        for _ in range(source.between(1, 2)):
            name = source.pick(_WRITING if 3 <= what < 5 else _READING)
            short = name in ("write", "read") and source.below(4) > 0
            yield name, 0 if short else source.pick(_ERRORS)


class _Asked(Order):
    """Does what it is told to when it is asked whether it is still wanted."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        super().__init__()
        self._wanted = wanted

    @property
    def wanted(self) -> bool:
        return self._wanted()


class Refused:
    """A refusal of the judge."""

    number = 1001

    def __str__(self) -> str:
        return "not the row"


def _bytes_in(root: Path) -> int:
    """Whole pages of what lies in the store, quarantine included."""
    total = 0
    for part in ("objects", "kvsafe-quarantine"):
        for folder, _, files in os.walk(root / part):
            for file in files:
                info = os.lstat(os.path.join(folder, file))
                if info.st_mode & 0o170000 == 0o100000 and info.st_size <= ROW + 1:
                    total += -(-info.st_size // 4096) * 4096
    return total


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)

# SPDX-License-Identifier: Apache-2.0
"""Each system call of `batch.c` fails, is short, or is the writer's last: real calls, real kills.

    python -m fuzz.campaigns.batches [--share 1.0] [--seed 0] [--json]

`batch.c` is built anew with a fault layer before it (`faults.h`). For every operation on many
files, in every sync setting, every call that it makes fails without and after having done its
work, is cut short where it moves bytes, and kills the process before, in the middle and after.
After each: values and no exceptions, nothing wrong, a bystander still served, the account at or
above what is there, and a store over the folder that works again. Needs a C compiler.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fuzz.campaigns.aftermath import (
    Findings,
    Known,
    before_reopening,
    opened,
    reopen,
    temporaries,
    used,
)
from fuzz.campaigns.command import Progress, finish, parser
from fuzz.campaigns.rows import ROW, is_content_of, judge_of, name_of, row_of
from kvsafe.tiers import Answer, ChunkStore, Outcome, batch
from kvsafe.tiers.batch import Batch
from kvsafe.tiers.buffers import ThreadBuffers
from kvsafe.tiers.calls import QuickOs

BYSTANDER = 50
MANY = tuple(range(1, 6))
CAPACITY = 24 * ROW
SYNCS = ("none", "full")
ERRORS = (
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.ENOENT, errno.ESTALE, errno.EMFILE,
)  # fmt: skip
FAIL_BEFORE, FAIL_AFTER, HALF, KILL_BEFORE, KILL_AFTER, KILL_HALF, STALL = range(1, 8)
KILLS = (KILL_BEFORE, KILL_AFTER, KILL_HALF)
_WORDS = (
    "",
    "before",
    "after",
    "half",
    "killed before",
    "killed after",
    "killed half-way",
    "hangs",
)
_NO_KERNEL_DOES = (
    ("close", FAIL_BEFORE),
    ("io_submit", FAIL_AFTER),
    ("io_getevents", FAIL_AFTER),
)
"""Faults of the layer alone: a descriptor that stays open, a read that nobody will wait for."""
_WAIT_S = 60


class FaultyBatch(Batch):
    """`Batch` over a build of `batch.c` in which one call goes wrong, when it is told so."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._own = library

    @classmethod
    def build(cls) -> FaultyBatch | None:
        """Build it for this process; None where there is no C compiler."""
        built = _built()
        return None if built is None else cls(built[0])

    def plan(self, at: int, kind: int, code: int = errno.EIO) -> None:
        """Call number `at` from now on (0: none) goes wrong in this way."""
        self._set("met", 0)
        self._set("stalled", 0)
        self._set("kind", kind)
        self._set("errno", code)
        self._set("at", at)

    def _set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self._own, f"kvsafe_fault_{name}").value = value

    @property
    def stalled(self) -> bool:
        """Whether a call hangs, or has hung."""
        return bool(ctypes.c_int.in_dll(self._own, "kvsafe_fault_stalled").value)

    @property
    def made(self) -> list[str]:
        """The calls since the last plan."""
        met = ctypes.c_int.in_dll(self._own, "kvsafe_fault_met").value
        names = (ctypes.c_char_p * 512).in_dll(self._own, "kvsafe_fault_names")
        return [(names[at] or b"").decode() for at in range(min(met, 512))]


@cache
def _built() -> tuple[ctypes.CDLL, tempfile.TemporaryDirectory[str]] | None:
    """The library, and the folder that goes when this process ends."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    folder = tempfile.TemporaryDirectory(prefix="kvsafe-batch-")
    target = os.path.join(folder.name, "faulty.so")
    words = [compiler, "-O1", "-w", "-fPIC", "-shared", "-o", target]
    layer = Path(__file__).with_name("faults.h")
    source = Path(batch.__file__).with_name("batch.c")
    subprocess.run([*words, "-include", str(layer), str(source)], check=True, timeout=_WAIT_S)
    return ctypes.CDLL(target), folder


class WrongBytes(Exception):
    """The store has served what was not stored."""


def put_many(store: ChunkStore) -> list[Outcome]:
    """Store five chunks in one batch."""
    rows = [memoryview(bytearray(row_of(number))) for number in MANY]
    return store.put_all([name_of(number) for number in MANY], rows)


def get_many(store: ChunkStore) -> list[Outcome]:
    """Load five chunks in one batch, and open each."""
    into = ThreadBuffers(ROW, len(MANY)).get_all()
    outcomes = store.get_all([name_of(number) for number in MANY], into)
    for number, outcome, row in zip(MANY, outcomes, into, strict=True):
        if outcome.good and (judge_of(number)(row) or not is_content_of(number, row)):
            raise WrongBytes(f"chunk {number}")
    return outcomes


def look_at_many(store: ChunkStore) -> list[bool]:
    """Look for five chunks and one that is not there."""
    return store.look([name_of(number) for number in (*MANY, 6)])


def _some(store: ChunkStore) -> None:
    for number in MANY[::2]:
        store.put(name_of(number), memoryview(bytearray(row_of(number))))


def _all(store: ChunkStore) -> None:
    put_many(store)


def _refused(store: ChunkStore) -> None:
    """Some are there, and the last grant was refused: names are looked at before room is taken."""
    _some(store)
    store.room.return_unspent()
    store.room._more = False


def _flaws(store: ChunkStore) -> None:
    """All are there; one may be read by others, one has not been used for long."""
    put_many(store)
    for number, spoil in (
        (MANY[1], lambda p: p.chmod(0o644)),
        (MANY[2], lambda p: os.utime(p, (1, 2))),
    ):
        bucket, file = store.folders.place(name_of(number))
        spoil(Path(store.setting.root) / "objects" / bucket / file)


@dataclass(frozen=True)
class Operation:
    """What a store does with many files; `kept` must still be there, whatever fails."""

    name: str
    ready: Callable[[ChunkStore], object]
    act: Callable[[ChunkStore], Sequence[Outcome | bool]]
    kept: tuple[int, ...] = (BYSTANDER,)


OPERATIONS = (
    Operation("put", lambda store: None, put_many),
    Operation("put where some are there", _some, put_many, (BYSTANDER, *MANY[::2])),
    Operation("put without a grant", _refused, put_many, (BYSTANDER, *MANY[::2])),
    Operation("get", _all, get_many, (BYSTANDER, *MANY)),
    Operation("get where some are flawed", _flaws, get_many, (BYSTANDER, MANY[0], *MANY[2:])),
    Operation("look", _some, look_at_many, (BYSTANDER, *MANY[::2])),
)


@dataclass(frozen=True)
class Fault:
    """One call of one operation, and what happens to it."""

    operation: Operation
    sync: str
    at: int
    call: str
    kind: int
    code: int = errno.EIO

    @property
    def label(self) -> str:
        """For sentences."""
        name = "" if self.kind in (HALF, *KILLS) else f" {errno.errorcode[self.code]}"
        return (
            f"{self.operation.name}, sync {self.sync}: call {self.at}, {self.call}:"
            f"{name} {_WORDS[self.kind]}"
        )


class Station:
    """A store over a new folder, made ready for one operation, with a faulty batch."""

    def __init__(self, root: Path, operation: Operation, sync: str) -> None:
        built = FaultyBatch.build()
        if built is None:
            raise RuntimeError("no C compiler: batch.c cannot be built with a fault layer")
        self.batch = built
        self.batch.plan(0, 0)
        self.store = opened(root, CAPACITY, QuickOs(), self.batch, sync=sync)
        self.store.put(name_of(BYSTANDER), memoryview(bytearray(row_of(BYSTANDER))))
        # So that this thread has its queue for reads: it is made once.
        self.store.get_all([name_of(BYSTANDER)] * 2, ThreadBuffers(ROW, 2).get_all())
        operation.ready(self.store)
        self.store.keeper.stop(_WAIT_S)


def faults() -> Iterator[Fault]:
    """Every fault there is, learnt from a run without one."""
    for operation in OPERATIONS:
        for sync in SYNCS:
            for at, call in enumerate(_calls_of(operation, sync), 1):
                for kind in (FAIL_BEFORE, FAIL_AFTER):
                    if (call, kind) in _NO_KERNEL_DOES:
                        continue
                    yield from (Fault(operation, sync, at, call, kind, code) for code in ERRORS)
                moves = call in ("pread", "pwrite", "io_submit")
                for kind in (*((HALF, *KILLS) if moves else KILLS[:2]),):
                    yield Fault(operation, sync, at, call, kind)


def _calls_of(operation: Operation, sync: str) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="kvsafe-batches-") as name:
        station = Station(Path(name) / "store", operation, sync)
        station.batch.plan(0, 0)
        operation.act(station.store)
        made = station.batch.made
        station.store.close()
    return made


def run(fault: Fault, root: Path, found: Findings) -> bool:
    """Make one fault and judge; whether it was met."""
    if fault.kind in KILLS:
        return _run_killed(fault, root, found)
    station = Station(root, fault.operation, fault.sync)
    station.batch.plan(fault.at, fault.kind, fault.code)
    kept = set(fault.operation.kept)
    try:
        answers = fault.operation.act(station.store)
        kept |= {number for number, answer in zip(MANY, answers, strict=False) if _is_good(answer)}
    except WrongBytes as wrong:
        found.wrong.append(f"{fault.label}: {wrong}")
    except Exception as exc:  # the point of the campaign: there must be none
        found.other.append(f"{fault.label}: raised {type(exc).__name__}: {exc}")
    met = len(station.batch.made) >= fault.at
    station.batch.plan(0, 0)
    _judge(station.store, fault, root, found)
    station.store.close()
    reopen(root, Known(_begun(), kept, capacity=CAPACITY, label=fault.label), found)
    shutil.rmtree(root)
    return met


def _is_good(answer: Outcome | bool) -> bool:
    """What was reported as there has to be there."""
    return answer.good if isinstance(answer, Outcome) else answer


def _begun() -> list[int]:
    return [*MANY, 6, BYSTANDER]


def _judge(store: ChunkStore, fault: Fault, root: Path, found: Findings) -> None:
    buffer = memoryview(bytearray(ROW))
    if not store.get(name_of(BYSTANDER), buffer, judge_of(BYSTANDER)).good:
        found.lost.append(f"{fault.label}: the bystander")
    if left := len(temporaries(root)):
        found.leftover.append(f"{fault.label}: {left} files that are being written by nobody")
    if store.room._in_flight:
        found.account.append(f"{fault.label}: {store.room._in_flight} bytes reserved for nothing")
    account, present = store.room.account(), used(root)
    if account.known and account.charged < present:
        found.account.append(f"{fault.label}: charged {account.charged}, there {present}")
    outcome = store.put(name_of(6), memoryview(bytearray(row_of(6))))
    if not outcome.good and outcome.answer is not Answer.NO_ROOM:
        found.other.append(f"{fault.label}: the next store: {outcome}")


def _run_killed(fault: Fault, root: Path, found: Findings) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(_WAIT_S)
            station = Station(root, fault.operation, fault.sync)
            station.batch.plan(fault.at, fault.kind)
            fault.operation.act(station.store)
            station.store.close()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and status != 0:
        raise RuntimeError(f"a writer failed by itself ({fault.label}): status {status}")
    known = Known(_begun(), fault.operation.kept, capacity=CAPACITY, label=fault.label)
    before_reopening(root, known, found, dead_writers=1)
    reopen(root, known, found)
    shutil.rmtree(root)
    return killed


def campaign(
    share: float = 1.0,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
    base: str | None = None,
) -> tuple[Findings, Counter[str]]:
    """Make this share of all faults below `base`; what was found, and how many were met."""
    found, met = Findings(), Counter[str]()
    every = list(faults())
    chosen = random.Random(seed).sample(every, max(1, round(share * len(every))))
    with tempfile.TemporaryDirectory(prefix="kvsafe-batches-", dir=base) as name:
        for fault in chosen:
            hit = run(fault, Path(name) / "store", found)
            word = "killed" if fault.kind in KILLS else "met"
            met[word if hit else "not met"] += 1
            tick()
    return found, met


def main(argv: list[str]) -> int:
    """The command."""
    options = parser(__doc__)
    options.add_argument("--share", type=float, default=1.0, help="part of all faults")
    args = options.parse_args(argv)
    if FaultyBatch.build() is None:
        raise SystemExit("no C compiler: batch.c cannot be built with a fault layer")
    total = max(1, round(args.share * sum(1 for _ in faults())))
    with Progress("batches", total, args.json) as progress:
        found, met = campaign(args.share, args.seed, progress.tick)
    return finish([("batches", found, met)], args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

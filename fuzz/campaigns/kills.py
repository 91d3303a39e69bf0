# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of a writer before, in the middle of and after each system call that it makes.

    python -m fuzz.campaigns.kills [--kills 1000] [--strace 100] [--seed 0] [--json]

The writer is a real child process; it kills itself at call number n, so every call of the
write path is met, in each sync setting, with room and without. With `--strace` as many
writers more are killed by strace, which sends the signal at the kernel's own door.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fuzz.campaigns.aftermath import Findings, Known, before_reopening, reopen
from fuzz.campaigns.command import Progress, finish, parser
from fuzz.campaigns.work import NUMBERS, ROOMY, TIGHT, work
from kvsafe.tiers import Os

P = ParamSpec("P")
R = TypeVar("R")
MODES = ("before", "after", "half")
THREADS = ("MainThread", "kvsafe-fs-keeper", "")
SYNCS = ("none", "data", "full")
WAIT_S = 60.0


class KillingOs(Os):
    """Counts the calls of some threads, and kills this process at one of them."""

    def __init__(self, at: int, mode: str, threads: str) -> None:
        self._at = at
        self._mode = mode
        self._threads = threads
        self._lock = threading.Lock()
        self.made: list[str] = []

    def call(self, what: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if not threading.current_thread().name.startswith(self._threads):
            return function(*args, **kwargs)
        with self._lock:
            self.made.append(what)
            now = len(self.made) == self._at
        if not now:
            return function(*args, **kwargs)
        if self._mode == "half" and what == "write":
            _half(*args)
        elif self._mode != "before":
            function(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


def _half(fd: Any, data: Any, offset: Any) -> None:
    """The first half of a write."""
    os.pwrite(fd, data[: max(1, len(data) // 2)], offset)


@dataclass(frozen=True)
class Case:
    """One kind of writer: which of its calls are counted, and how it is set."""

    threads: str
    sync: str
    capacity: int

    @property
    def label(self) -> str:
        """For sentences."""
        room = "roomy" if self.capacity == ROOMY else "tight"
        return f"{self.threads or 'any thread'}, sync {self.sync}, {room}"


CASES = tuple(
    Case(threads, sync, capacity)
    for threads in THREADS
    for sync in SYNCS
    for capacity in (ROOMY, TIGHT)
)


@dataclass
class Told:
    """What a writer said before it died."""

    begun: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, text: str) -> Told:
        """From its lines; the last one may be cut."""
        told = cls()
        for line in text.split("\n")[:-1]:
            word, _, number = line.partition(" ")
            told.lines.append(line)
            if word == "begin":
                told.begun.add(int(number))
            elif word == "kept":
                told.kept.add(int(number))
            elif word == "gone":
                told.kept.discard(int(number))
        return told


def forked(root: Path, case: Case, at: int, mode: str) -> tuple[Told, bool, list[str]]:
    """Run one writer; what it told, whether it was killed, and its calls if it was not."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            code = _as_child(root, case, at, mode, writing)
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and status != 0:
        raise RuntimeError(f"a writer failed by itself ({case.label}, call {at} {mode}): {text}")
    told = Told.of(text)
    calls = [line.removeprefix("call ") for line in told.lines if line.startswith("call ")]
    return told, killed, calls


def _as_child(root: Path, case: Case, at: int, mode: str, pipe: int) -> int:
    signal.alarm(int(WAIT_S))
    calls = KillingOs(at, mode, case.threads)

    def tell(text: str) -> None:
        os.write(pipe, f"{text}\n".encode())

    work(root, case.sync, case.capacity, calls, tell)
    for call in calls.made:
        tell(f"call {call}")
    return 0


def aftermath(root: Path, case: Case, told: Told, label: str, found: Findings) -> None:
    """Judge what the dead writer left, twice: as it lies, and opened anew."""
    # With little room chunks may have been evicted after they were reported.
    kept = told.kept if case.capacity == ROOMY else set()
    known = Known(told.begun, kept, whole=True, capacity=case.capacity, label=label)
    before_reopening(root, known, found, dead_writers=1)
    reopen(root, known, found)


def points(kills: int, seed: int, folder: Path) -> Iterator[tuple[Case, int, str]]:
    """Which kills to make: every call of every case in turn, thinned out or repeated to fit."""
    lengths = {}
    for place, case in enumerate(CASES):
        _, _, calls = forked(folder / f"learn{place}", case, 0, "before")
        lengths[case] = calls
    every = [
        (case, at, mode)
        for case, calls in lengths.items()
        for at, what in enumerate(calls, 1)
        for mode in (MODES if what == "write" else MODES[:2])
    ]
    rng = random.Random(seed)
    chosen: list[tuple[Case, int, str]] = []
    while len(chosen) < kills:
        part = min(kills - len(chosen), len(every))
        chosen += every if part == len(every) else rng.sample(every, part)
    yield from chosen


def campaign(
    kills: int,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
    base: str | None = None,
) -> tuple[Findings, Counter[str]]:
    """Make so many kills below `base`; what was found, and how many writers died of them."""
    found, met = Findings(), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="kvsafe-kills-", dir=base) as name:
        folder = Path(name)
        for turn, (case, at, mode) in enumerate(points(kills, seed, folder)):
            root = folder / "store"
            told, killed, _ = forked(root, case, at, mode)
            met["killed" if killed else "ended first"] += 1
            aftermath(root, case, told, f"{case.label}, {mode} call {at}", found)
            shutil.rmtree(root)
            tick()
            if turn % 50 == 49 and found.faults:
                break
    return found, met


# ---- by strace --------------------------------------------------------------------------

STRACED = (
    "openat", "mkdirat", "mkdir", "flock", "pwrite64", "fdatasync", "fsync", "renameat2",
    "unlinkat", "utimensat", "preadv2", "preadv", "close", "fstat", "newfstatat", "fsetxattr",
)  # fmt: skip


def _straced(root: Path, case: Case, what: str, at: int, trace: Path) -> tuple[Told, bool]:
    words = [
        "strace", "-f", "-qq", "-o", str(trace), "-e", f"trace={what}",
        *(["-e", f"inject={what}:signal=KILL:when={at}"] if at else []),
        sys.executable, "-m", "fuzz.campaigns.kills", "--as-writer", str(root), case.sync,
        str(case.capacity),
    ]  # fmt: skip
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=_checkout()
    )
    killed = done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if not killed and done.returncode != 0:
        raise RuntimeError(f"a traced writer failed by itself: {done.stderr[-500:]}")
    return Told.of(done.stdout), killed


def _checkout() -> Path:
    return Path(__file__).resolve().parents[2]


def _first_of_the_store(trace: Path, root: Path) -> int:
    """How many traced calls of one thread come before the store is touched."""
    lines = trace.read_text(encoding="utf-8", errors="replace").splitlines()
    main = lines[0].split()[0] if lines else ""
    own = [line for line in lines if line.startswith(f"{main} ")]
    return next((place for place, line in enumerate(own) if str(root) in line), 0)


def straced(
    kills: int, seed: int = 0, tick: Callable[[], None] = lambda: None
) -> tuple[Findings, Counter[str]]:
    """The same with strace sending the signal; needs strace."""
    found, met, rng = Findings(), Counter[str](), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvsafe-kills-") as name:
        folder, root = Path(name), Path(name) / "store"
        counts = _learn(folder)
        cases = [case for case in CASES if not case.threads]
        usable = [what for what, (first, last) in counts.items() if last > first]
        while met["killed"] < kills and sum(met.values()) < 4 * kills:
            case, what = rng.choice(cases), rng.choice(usable)
            first, last = counts[what]
            at = rng.randint(first + 1, last)
            told, killed = _straced(root, case, what, at, folder / "trace")
            met["killed" if killed else "ended first"] += 1
            if killed:
                met[f"at {what}"] += 1
                tick()
            if root.exists():
                aftermath(root, case, told, f"strace, {case.label}, {what} {at}", found)
                shutil.rmtree(root)
    return found, met


def _learn(folder: Path) -> dict[str, tuple[int, int]]:
    """Per system call: how many come before the store, how many there are (main thread)."""
    case = Case("", "full", TIGHT)
    counts = {}
    for what in STRACED:
        root, trace = folder / f"learn-{what}", folder / f"trace-{what}"
        _straced(root, case, what, 0, trace)
        lines = trace.read_text(encoding="utf-8", errors="replace").splitlines()
        main = lines[0].split()[0] if lines else "-"
        own = sum(line.startswith(f"{main} ") for line in lines)
        counts[what] = (_first_of_the_store(trace, root), own)
    return counts


def _writer(root: str, sync: str, capacity: str) -> int:
    work(Path(root), sync, int(capacity), Os(), lambda text: print(text, flush=True))
    return 0


def main(argv: list[str]) -> int:
    """The command."""
    if argv[:1] == ["--as-writer"]:
        return _writer(*argv[1:4])
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=1000, help="kills from inside")
    options.add_argument("--strace", type=int, default=0, help="kills by strace")
    args = options.parse_args(argv)
    with Progress("kills", args.kills + args.strace, args.json) as progress:
        found, met = campaign(args.kills, args.seed, progress.tick)
        reports = [("kills", found, met)]
        if args.strace:
            if shutil.which("strace") is None:
                raise SystemExit("strace is not installed")
            reports.append(("kills by strace", *straced(args.strace, args.seed, progress.tick)))
    return finish(reports, args.json)


__all__ = ["CASES", "NUMBERS", "campaign", "straced"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

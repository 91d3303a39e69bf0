# SPDX-License-Identifier: Apache-2.0
"""Campaigns: children that fuzz, watched from outside, and what came of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fuzz
from fuzz import corpus
from fuzz.child import Job
from fuzz.pulse import Beat, Pulse

ROOT = Path(fuzz.__file__).resolve().parent.parent
BOUND_S = 60.0
"""Longest execution as the parent sees it; the child itself is stricter (`Target.seconds`)."""
_START_S = 180.0
_GRACE_S = 30.0
_POLL_S = 0.2
_COVERAGE = re.compile(rb"cov: (\d+)")
_CORPUS = re.compile(rb"corp: (\d+)/")
_NEW = re.compile(rb"^#\d+\s+NEW", re.MULTILINE)


@dataclass
class Report:
    """What came of one child: numbers, and the finding if there is one."""

    target: str
    engine: str
    seed: int
    executions: int = 0
    seconds: float = 0.0
    coverage: int = 0
    fresh: int = 0
    corpus: int = 0
    finding: dict[str, Any] | None = None
    file: str = ""

    @property
    def rate(self) -> float:
        """Executions per second."""
        return self.executions / max(self.seconds, 0.001)


class Child:
    """One process that fuzzes one target."""

    def __init__(self, job: Job, bound_s: float) -> None:
        self.job, self._bound_s = job, bound_s
        home = job.home
        (home / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
        self._pulse = Pulse(home / "pulse", create=True)
        self._log = (home / "log").open("wb")
        shared = Path("/dev/shm")  # noqa: S108 - files in memory
        self._scratch = tempfile.mkdtemp(
            prefix="kvsafe-fuzz-", dir=shared if shared.is_dir() else None
        )
        environ = {"PYTHONHASHSEED": "0", "PYTHONPATH": _path()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.child", str(home / "job.json")],
            cwd=ROOT,
            env={**os.environ, **environ, "KVSAFE_FUZZ_SCRATCH": self._scratch},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self._began = self._moved = time.monotonic()
        self._last = Beat()
        self._hung = False

    def running(self) -> bool:
        """Whether it still runs; one that has not moved for too long is ended here."""
        if self._process.poll() is not None:
            return False
        now, beat = time.monotonic(), self._pulse.read()
        if beat != self._last:
            self._last, self._moved = beat, now
            if not beat.begun:
                self._began = now
        bound = self._bound_s + _GRACE_S if beat.begun > beat.ended else _START_S
        if now - self._moved > bound:
            self._hung = True
            self._end(signal.SIGABRT)
        elif now - self._began > self.job.seconds + _START_S + self._bound_s:
            self._end(signal.SIGTERM)
        return self._process.poll() is None

    def _end(self, number: int) -> None:
        self._process.send_signal(number)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._end(signal.SIGTERM)
        self._log.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def report(self) -> Report:
        """What it has to say now."""
        job, beat = self.job, self._pulse.read()
        seconds = time.monotonic() - self._began
        made = Report(
            job.target, job.engine, job.seed, beat.ended, seconds, beat.coverage, beat.fresh,
            beat.corpus,
        )  # fmt: skip
        if job.engine == "atheris":
            self._ask_log(made)
        if self._process.poll() is not None:
            made.finding = self._finding()
        return made

    def _ask_log(self, made: Report) -> None:
        """Atheris tells its coverage in its log."""
        log = self.log()
        covered, inputs = _COVERAGE.findall(log), _CORPUS.findall(log)
        made.coverage = int(covered[-1]) if covered else 0
        made.corpus = int(inputs[-1]) if inputs else made.corpus
        made.fresh = len(_NEW.findall(log))

    def _finding(self) -> dict[str, Any] | None:
        path = self.job.home / "result.json"
        if path.exists():
            found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8"))["finding"]
            return found
        code, beat = self._process.returncode, self._pulse.read()
        if code == 0 or (code == -signal.SIGTERM and not self._hung):
            return None
        hung = self._hung or b"=== Timeout:" in self.log()
        if hung:
            text = f"one execution took more than {self._bound_s + _GRACE_S:.0f} s"
        else:
            text = f"the process ended with status {code}"
        if not beat.begun and not self.job.replay:
            raise RuntimeError(f"{self.job.target} did not start:\n{self.tail()}")
        data = self._pulse.last_input().hex()
        return {
            "oracle": "hang" if hung else "crash", "text": text, "signature": "",
            "input": data, "small": data, "trace": self.tail(), "steady": True,
        }  # fmt: skip

    def log(self) -> bytes:
        """All that the child printed."""
        return (self.job.home / "log").read_bytes()

    def tail(self) -> str:
        """The end of what the child printed."""
        lines = self.log().decode("utf-8", "replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith("#"))[-4000:]


def _path() -> str:
    return os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)


@dataclass
class Campaign:
    """What to fuzz, with what, for how long.

    Attributes:
        targets: names, one child each, `jobs` at a time; a single name gets `jobs` children.
        inputs: a folder with one folder of inputs per target; read first, added to.
        findings: where the inputs of findings go.
        told: called with the reports of the running children, every second or so.
    """

    targets: tuple[str, ...]
    engine: str
    seed: int
    seconds: float
    jobs: int = 1
    runs: int = 0
    canary: str = ""
    inputs: Path | None = None
    findings: Path = Path(".cache/fuzz/findings")
    told: Callable[[list[Report]], None] = lambda reports: None
    reports: list[Report] = field(default_factory=list)

    def run(self) -> list[Report]:
        """All of it; returns one report per child, in the order in which they ended."""
        waiting = list(self._jobs())
        running: list[Child] = []
        with tempfile.TemporaryDirectory(prefix="kvsafe-fuzz-") as home:
            try:
                while waiting or running:
                    while waiting and len(running) < self.jobs:
                        target, seed = waiting.pop(0)
                        running.append(self._start(Path(home), target, seed))
                    time.sleep(_POLL_S)
                    running = [child for child in running if not self._over(child)]
                    self.told([child.report() for child in running])
            finally:
                for child in running:
                    child.kill()
        return self.reports

    def _jobs(self) -> Iterator[tuple[str, int]]:
        if len(self.targets) == 1:
            yield from ((self.targets[0], self.seed + number) for number in range(self.jobs))
        else:
            yield from ((name, self.seed) for name in self.targets)

    def _start(self, home: Path, target: str, seed: int) -> Child:
        folder = Path(tempfile.mkdtemp(dir=home))
        inputs = folder / "inputs"
        inputs.mkdir()
        for data in corpus.stored(target):
            corpus.keep(inputs, data)
        if self.inputs is not None:
            for data in corpus.in_folder(self.inputs / target):
                corpus.keep(inputs, data)
        job = Job(
            str(folder), target, self.engine, seed, self.seconds, self.runs, self.canary
        )  # fmt: skip
        return Child(job, BOUND_S)

    def _over(self, child: Child) -> bool:
        if child.running():
            return False
        child.kill()
        made = child.report()
        made.seconds = max(made.seconds - _POLL_S / 2, 0.001)
        if made.finding is not None:
            small = bytes.fromhex(made.finding["small"])
            made.file = str(corpus.keep(self.findings / child.job.target, small))
        if self.inputs is not None:
            for data in corpus.in_folder(child.job.home / "inputs"):
                corpus.keep(self.inputs / child.job.target, data)
        shutil.rmtree(child.job.home, ignore_errors=True)
        self.reports.append(made)
        return True


def replay(target: str, path: Path, canary: str = "") -> dict[str, Any] | None:
    """Run one input in a child; returns the finding, or None if it is quiet."""
    with tempfile.TemporaryDirectory(prefix="kvsafe-fuzz-") as home:
        job = Job(home, target, "seeded", 0, 1.0, canary=canary, replay=str(path.resolve()))
        child = Child(job, BOUND_S)
        try:
            while child.running():
                time.sleep(_POLL_S / 4)
            return child.report().finding
        finally:
            child.kill()

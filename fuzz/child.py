# SPDX-License-Identifier: Apache-2.0
"""The process in which a target runs: `python -m fuzz.child JOB.json`, started by the runner.

It drives one target with one engine, tells its numbers through a `Pulse`, and leaves
`result.json` beside the job when it has something to say. If it dies, the pulse tells on what.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuzz.target import Finding, Target

FOUND = 77
"""Exit status after a finding."""


@dataclass(frozen=True)
class Job:
    """What the child has to do. `folder` holds the job, the pulse and what comes of it."""

    folder: str
    target: str
    engine: str
    seed: int
    seconds: float
    runs: int = 0
    canary: str = ""
    replay: str = ""

    @property
    def home(self) -> Path:
        """The folder."""
        return Path(self.folder)

    def result(self, values: dict[str, Any]) -> None:
        """Leave the result, whole or not at all."""
        new = self.home / "result.new"
        new.write_text(json.dumps(values), encoding="utf-8")
        new.rename(self.home / "result.json")


def main(path: str) -> int:
    """Do the job in this file."""
    faulthandler.enable()
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    target = _made(job)
    try:
        return _replay(job, target) if job.replay else _drive(job, target)
    finally:
        target.close()


def _made(job: Job) -> Target:
    """The target, with the seeded fault that was asked for; instrumented for Atheris."""
    if job.engine == "atheris" and not job.replay:
        atheris = importlib.import_module("atheris")

        with atheris.instrument_imports(include=["kvsafe"]):
            target = _make(job.target)
    else:
        target = _make(job.target)
    if job.canary:
        from fuzz.canaries import named
        from fuzz.patching import Patch

        named(job.canary, job.target).fault(Patch(), target)
    return target


def _make(name: str) -> Target:
    from fuzz.targets import make

    return make(name)


def _replay(job: Job, target: Target) -> int:
    from fuzz.execute import bound_memory, check

    data = Path(job.replay).read_bytes()
    bound_memory()
    finding = check(target, data)
    job.result({"finding": None if finding is None else _told(finding, data, data)})
    return FOUND if finding else 0


def _drive(job: Job, target: Target) -> int:
    from fuzz import engines
    from fuzz.corpus import keep
    from fuzz.execute import bound_memory

    seat = Seat(job, target)
    bound_memory()
    if job.engine == "atheris":
        for data in seat.first:
            keep(job.home / "inputs", data)
        engines.with_atheris(
            seat.execute, job.home / "inputs", job.seed, target.max_len, job.seconds, job.runs
        )
    for data in seat.first:
        if seat.over():
            break
        seat.execute(data)
    if job.engine == "hypothesis":
        engines.with_hypothesis(seat.execute, seat.over, seat.pool, job.seed, target.max_len)
    else:
        engines.with_seed(seat.execute, seat.over, seat.pool, job.seed, target.max_len)
    return FOUND if seat.found else 0


class Seat:
    """One target being driven: counts, keeps what reached new code, stops at a finding."""

    def __init__(self, job: Job, target: Target) -> None:
        from fuzz.corpus import in_folder
        from fuzz.pulse import Beat, Pulse
        from fuzz.tracing import Lines

        self.job, self.target = job, target
        self.pool: list[bytes] = []
        self.first = list(dict.fromkeys([*target.seeds(), *in_folder(job.home / "inputs")]))
        self.lines = None if job.engine == "atheris" else Lines()
        self.found = False
        self.began = time.monotonic()
        self._pulse = Pulse(job.home / "pulse")
        self._beat = Beat(ready=1, corpus=len(self.first))

    def over(self) -> bool:
        """Whether to stop: time, runs, or a finding."""
        late = time.monotonic() - self.began > self.job.seconds
        return self.found or late or bool(self.job.runs and self._beat.ended >= self.job.runs)

    def execute(self, data: bytes) -> None:
        """One execution."""
        from fuzz.execute import check

        self._beat = self._beat._replace(begun=self._beat.begun + 1, length=len(data))
        self._pulse.input(data)
        self._pulse.write(self._beat)
        if self.lines is None:
            finding = check(self.target, data, alarm=False)
        else:
            with self.lines.watch():
                finding = check(self.target, data)
            self._learn(data)
        self._beat = self._beat._replace(ended=self._beat.ended + 1)
        self._pulse.write(self._beat)
        if finding is not None:
            self._report(finding, data)

    def _learn(self, data: bytes) -> None:
        from fuzz.corpus import keep

        if self.lines is None or not self.lines.fresh:
            return
        self.pool.append(data)
        if self._beat.ended >= len(self.first):
            keep(self.job.home / "inputs", data)
        self._beat = self._beat._replace(
            coverage=len(self.lines.seen), fresh=self._beat.fresh + 1, corpus=len(self.pool)
        )

    def _again(self, data: bytes) -> Finding | None:
        from fuzz.execute import check

        return check(self.target, data, alarm=self.lines is not None)

    def _report(self, finding: Finding, data: bytes) -> None:
        """Make the input smaller, leave the result, and stop."""
        from fuzz.minimise import minimise

        self.found = True
        small, wanted = data, finding.signature

        def finds(smaller: bytes) -> bool:
            again = self._again(smaller)
            return again is not None and again.signature == wanted

        steady = finding.oracle in ("hang", "memory") or finds(data)
        if steady and finding.oracle not in ("hang", "memory"):
            small = minimise(data, finds)
        told = _told(self._again(small) or finding, data, small)
        self.job.result({"finding": {**told, "steady": steady}})
        if self.job.engine == "atheris":
            self.target.close()
            os._exit(FOUND)


def _told(finding: Finding, data: bytes, small: bytes) -> dict[str, Any]:
    error = finding.__cause__ or finding
    return {
        "oracle": finding.oracle,
        "text": finding.text,
        "signature": finding.signature,
        "input": data.hex(),
        "small": small.hex(),
        "trace": "".join(traceback.format_exception(error))[-4000:],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

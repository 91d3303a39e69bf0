# SPDX-License-Identifier: Apache-2.0
"""`kvsafe fuzz` in the checkout: campaigns, replays, and the tables of targets and canaries."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from fuzz.canaries import Canary, Hunt, every, hunt, of_target
from fuzz.engines import ENGINES, best, installed
from fuzz.runner import Campaign, Report, replay
from fuzz.target import Finding
from fuzz.targets import PLACES, make
from kvsafe.cli import ExitCode, UsageError

_TELL_S = 2.0
_HEAD = f"{'target':<10}{'engine':<12}{'seconds':>8}{'executions':>12}{'per s':>8}{'cov':>7}{'new':>6}{'corpus':>8}"  # noqa: E501


def run(args: argparse.Namespace) -> int:
    """0 nothing found (or everything, for canaries), 1 something found, 2 used wrongly."""
    if args.target == "list":
        return _list(args)
    if args.target == "canaries":
        return _canaries(args)
    if args.target != "all" and args.target not in PLACES:
        raise UsageError(f"no target {args.target!r}; `kvsafe fuzz list` names them")
    if args.canary and args.canary not in {one.name for one in of_target(args.target)}:
        raise UsageError(f"{args.target} has no canary {args.canary!r}; see `kvsafe fuzz canaries`")
    if args.replay is not None:
        return _replay(args)
    return _campaign(args)


def _engine(args: argparse.Namespace) -> str:
    name: str = best() if args.engine == "auto" else args.engine
    if not installed(name):
        raise UsageError(f"{name} is not installed here")
    return name


# ---- campaigns --------------------------------------------------------------------------


def _campaign(args: argparse.Namespace) -> int:
    if args.seconds <= 0 or args.jobs < 1 or args.runs < 0 or args.seed < 0:
        raise UsageError("--seconds and --jobs must be above 0, --runs and --seed not below")
    engine = _engine(args)
    screen = _Screen(args, engine)
    campaign = Campaign(
        tuple(PLACES) if args.target == "all" else (args.target,),
        engine,
        args.seed,
        args.seconds,
        args.jobs,
        args.runs,
        args.canary,
        args.corpus,
        told=screen.tell,
    )
    reports = campaign.run()
    return screen.sum_up(reports)


class _Screen:
    """Progress while it runs, and the result. With --json progress goes to stderr."""

    def __init__(self, args: argparse.Namespace, engine: str) -> None:
        self._args = args
        self._out = sys.stderr if args.json else sys.stdout
        self._last = time.monotonic()
        self._say(f"engine {engine}, seed {args.seed}, {args.seconds:g} s per target")
        self._say(_HEAD)

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def tell(self, reports: list[Report]) -> None:
        """One line per running child, now and then."""
        if time.monotonic() - self._last < _TELL_S:
            return
        self._last = time.monotonic()
        for report in reports:
            if report.executions:
                self._say(_row(report))

    def sum_up(self, reports: list[Report]) -> int:
        """The last word on every child; returns the exit code."""
        found = [report for report in reports if report.finding is not None]
        if self._args.json:
            sys.stdout.write(json.dumps([_document(report) for report in reports], indent=2) + "\n")
        self._say("")
        self._say(_HEAD)
        for report in reports:
            self._say(_row(report))
        for report in found:
            for line in _story(report, self._args.canary):
                self._say(line)
        total = sum(report.executions for report in reports)
        self._say(f"{total} executions, {len(found)} findings")
        return ExitCode.FOUND if found else ExitCode.FINE


def _row(report: Report) -> str:
    state = "  FOUND" if report.finding is not None else ""
    return (
        f"{report.target:<10}{report.engine:<12}{report.seconds:>8.1f}{report.executions:>12}"
        f"{report.rate:>8.0f}{report.coverage:>7}{report.fresh:>6}{report.corpus:>8}{state}"
    )


def _command(report: Report, canary: str) -> str:
    fault = f" --canary '{canary}'" if canary else ""
    return f"kvsafe fuzz {report.target} --replay {report.file}{fault}"


def _story(report: Report, canary: str) -> list[str]:
    finding = report.finding or {}
    size, first = (len(finding[name]) // 2 for name in ("small", "input"))
    rule = Finding.ORACLES[finding["oracle"]]
    return [
        "",
        f"FOUND in {report.target}: {finding['oracle']}: {finding['text']}",
        f"  broken rule   {rule}",
        f"  seed          {report.seed}, execution {report.executions}",
        f"  input         {size} bytes, made from {first}: {finding['small']}",
        f"  replay        {_command(report, canary)}",
        *(f"  | {line}" for line in finding["trace"].splitlines()[-12:]),
    ]


def _document(report: Report) -> dict[str, Any]:
    finding = report.finding
    told = None if finding is None else {**finding, "file": report.file}
    return {
        "target": report.target,
        "engine": report.engine,
        "seed": report.seed,
        "executions": report.executions,
        "seconds": round(report.seconds, 1),
        "per_second": round(report.rate, 1),
        "coverage": report.coverage,
        "new": report.fresh,
        "corpus": report.corpus,
        "finding": told,
    }


def _replay(args: argparse.Namespace) -> int:
    path: Path = args.replay
    if args.target == "all" or not path.is_file():
        raise UsageError("--replay needs one target and a file with its input")
    finding = replay(args.target, path, args.canary)
    if args.json:
        sys.stdout.write(json.dumps({"target": args.target, "finding": finding}, indent=2) + "\n")
    elif finding is None:
        print(f"{args.target}: quiet")
    else:
        print(f"{args.target}: {finding['oracle']}: {finding['text']}\n{finding['trace']}")
    return ExitCode.FINE if finding is None else ExitCode.FOUND


# ---- tables -----------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    if args.json:
        lines = [{"name": name, "summary": place.summary} for name, place in PLACES.items()]
        sys.stdout.write(json.dumps(lines, indent=2) + "\n")
        return ExitCode.FINE
    width = max(map(len, PLACES))
    for name, place in PLACES.items():
        print(f"{name:<{width}}  {place.summary}")
    return ExitCode.FINE


def _canaries(args: argparse.Namespace) -> int:
    """Hunt every canary, or those whose name or target was given with --canary."""
    chosen = [one for one in every() if args.canary in (one.name, one.target, "")]
    if not chosen:
        raise UsageError(f"no canary and no target is called {args.canary!r}")
    out = sys.stderr if args.json else sys.stdout
    print(f"{'target':<10}{'seeded fault':<44}{'found at':>9}{'within':>8}  as", file=out)
    hunts = []
    for name in dict.fromkeys(one.target for one in chosen):
        target = make(name)
        try:
            for canary in (one for one in chosen if one.target == name):
                hunts.append(hunt(canary, args.seed or 1, target))
                print(_hunt_row(hunts[-1]), file=out, flush=True)
        finally:
            target.close()
    missed = [one for one in hunts if not one.good]
    if args.json:
        sys.stdout.write(json.dumps([_hunt_document(one) for one in hunts], indent=2) + "\n")
    print(f"{len(hunts)} seeded faults, {len(missed)} not found", file=out)
    return ExitCode.FOUND if missed else ExitCode.FINE


def _hunt_row(found: Hunt) -> str:
    canary = found.canary
    at = str(found.at) if found.good else "NOT FOUND"
    return f"{canary.target:<10}{canary.name:<44}{at:>9}{canary.within:>8}  {found.signature}"


def _hunt_document(found: Hunt) -> dict[str, Any]:
    canary: Canary = found.canary
    return {
        "name": canary.name,
        "target": canary.target,
        "says": canary.says,
        "within": canary.within,
        "found": found.good,
        "at": found.at,
        "signature": found.signature,
        "input": found.data.hex(),
        "seconds": round(found.seconds, 2),
    }


ENGINE_CHOICES = ("auto", *ENGINES)

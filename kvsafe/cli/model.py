# SPDX-License-Identifier: Apache-2.0
"""`kvsafe model`: walk the lifecycle's state machine, hunt its seeded faults, print its rules."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence

from kvsafe.cli import ExitCode, UsageError
from kvsafe.lifecycle.check import Result, check_all, never_fired
from kvsafe.lifecycle.liveness import LIVENESS
from kvsafe.lifecycle.mutants import MUTANTS, Finding, hunt
from kvsafe.lifecycle.safety import SAFETY
from kvsafe.lifecycle.table import RULES
from kvsafe.lifecycle.worlds import POLICIES, SIZES, lively, worlds

__all__ = ["add_arguments", "run"]

HEAD = (
    f"{'policy':<7}{'world':<16}{'k/r/q/t':<9}{'states':>9}{'moves':>10}"
    f"{'depth':>6}{'s':>8}{'MiB':>6}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `kvsafe model`."""
    parser.add_argument("what", choices=("check", "mutants", "show"))
    parser.add_argument(
        "name", nargs="?", default="", help="check: one world; mutants: part of a name; "
        "show: rules (default), laws, worlds, or an event's name",
    )  # fmt: skip
    parser.add_argument("--world", choices=SIZES, default="default", help="how large (check)")
    parser.add_argument("--policy", choices=sorted(POLICIES), help="one policy instead of both")
    parser.add_argument("--limit", type=int, default=50_000_000, help="states per world")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """0 if nothing was broken and every fault was found, 1 otherwise."""
    if args.limit < 1:
        raise UsageError("--limit must be at least 1")
    return {"check": _check, "mutants": _mutants, "show": _show}[args.what](args)


def _policies(args: argparse.Namespace) -> tuple[str, ...]:
    return (args.policy,) if args.policy else tuple(sorted(POLICIES, reverse=True))


# ---- check ------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    _say(args, HEAD)
    results = check_all(
        args.world, _policies(args), lambda result: _tell(args, result), args.limit, args.name
    )
    if not results:
        raise UsageError(f"there is no world {args.name!r}; `kvsafe model show worlds` lists them")
    idle = () if args.name else never_fired(results)
    good = all(result.ok for result in results) and not idle
    if args.json:
        document = {
            "ok": good,
            "worlds": [result.report() for result in results],
            "never_fired": list(idle),
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        _sum_up(results, idle)
    return ExitCode.FINE if good else ExitCode.FOUND


def _say(args: argparse.Namespace, line: str) -> None:
    print(line, file=sys.stderr if args.json else sys.stdout, flush=True)


def _tell(args: argparse.Namespace, result: Result) -> None:
    walk, world = result.walk, result.walk.world
    size = f"{world.keys}/{world.rows}/{world.requests}/{world.tiers}"
    verdict = "" if result.ok else "  NOT COMPLETE" if not walk.complete else "  BROKEN"
    if walk.violation is not None:
        verdict = "  BROKEN"
    _say(
        args,
        f"{world.policy.name:<7}{world.name:<16}{size:<9}{walk.states:>9}{walk.transitions:>10}"
        f"{walk.depth:>6}{walk.seconds:>8.1f}{walk.peak_mib:>6.0f}"
        f"{'  +liveness' if result.live else ''}{verdict}",
    )
    for line in result.in_words():
        _say(args, f"    {line}")


def _sum_up(results: Sequence[Result], idle: Sequence[str]) -> None:
    states = sum(result.walk.states for result in results)
    moves = sum(result.walk.transitions for result in results)
    broken = sum(bool(result.walk.violation or result.stuck) for result in results)
    short = sum(not result.walk.complete and not result.walk.violation for result in results)
    print(f"{states} states, {moves} moves, {len(SAFETY)} laws, {len(LIVENESS)} properties: "
          f"{broken} worlds broken, {short} not walked to the end")  # fmt: skip
    for event in idle:
        print(f"the rule '{event}' never fired: nothing was learnt about it")


# ---- mutants ----------------------------------------------------------------------------


def _mutants(args: argparse.Namespace) -> int:
    chosen = [mutant for mutant in MUTANTS if args.name in mutant.name]
    if not chosen:
        raise UsageError(f"no seeded fault has {args.name!r} in its name")
    _say(args, f"{'seeded fault':<50}{'broken law':<36}{'world':<16}{'moves':>6}{'states':>8}")
    findings = []
    for mutant in chosen:
        findings.append(hunt(mutant))
        _say(args, _fault(findings[-1]))
    missed = [finding for finding in findings if not finding.found]
    if args.json:
        sys.stdout.write(json.dumps([_fault_report(one) for one in findings], indent=2) + "\n")
    else:
        print(f"{len(findings)} seeded faults, {len(missed)} not found")
    return ExitCode.FOUND if missed else ExitCode.FINE


def _fault(finding: Finding) -> str:
    mutant = finding.mutant
    end = f"{finding.steps:>6}{finding.states:>8}" if finding.found else "  NOT FOUND"
    return f"{mutant.name:<50}{mutant.law:<36}{mutant.world:<16}{end}"


def _fault_report(finding: Finding) -> dict[str, object]:
    return {
        "fault": finding.mutant.name,
        "law": finding.mutant.law,
        "world": finding.mutant.world,
        "found": finding.found,
        "laws": list(finding.laws),
        "moves": finding.steps,
        "states": finding.states,
    }


# ---- show -------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    lines = list(_lines(args.name or "rules", _policies(args)[:1]))
    if not lines:
        raise UsageError(f"neither a list nor an event: {args.name!r}")
    if args.json:
        sys.stdout.write(json.dumps(lines, indent=2) + "\n")
    else:
        print("\n".join(lines))
    return ExitCode.FINE


def _lines(name: str, policies: tuple[str, ...]) -> Iterable[str]:
    if name == "laws":
        yield from (f"{law.name}: {law.says}" for law in SAFETY)
        yield from (f"{law.name}: {law.says} (liveness)" for law in LIVENESS)
        return
    if name == "worlds":
        for size in SIZES:
            yield from (f"{size} {world.name}: {world.about}" for world in worlds(size, policies))
        for policy in policies:
            yield from (f"liveness {one.name}: {one.about}" for one in lively(POLICIES[policy]))
        return
    for rule in RULES:
        if name in ("rules", rule.event):
            about = f" ({rule.over.replace(',', ', ')})" if rule.over else ""
            yield f"{rule.event}{about}"
            yield f"    when  {rule.when}"
            yield f"    then  {rule.then}"
            yield f"    law   {rule.law}"

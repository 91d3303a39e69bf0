# SPDX-License-Identifier: Apache-2.0
"""`kvsafe conformance tier MODULE:CLASS`: run the trials on a tier and print the table."""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

from conformance.tier.folder import Case, cases, promises
from conformance.tier.known import KVSAFE_FS, Entrant, Unknown, enter
from conformance.tier.runner import Result, run_all

SUMMARY = "run attacks and faults on a disk tier and print what it answers"


class Misused(ValueError):
    """The command was used wrongly; the text says how."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "tier",
        nargs="?",
        default=KVSAFE_FS,
        metavar="MODULE:CLASS",
        help=f"a SecondaryTierManager, or a driver of conformance/tier/drivers ({KVSAFE_FS})",
    )
    parser.add_argument(
        "--options", help="JSON object of the tier's options; \"{root}\" is the trial's folder"
    )
    parser.add_argument("--sealed", action="store_true", help="put kvsafe's proof before it")
    parser.add_argument(
        "--promise",
        action="append",
        default=[],
        choices=("all", *sorted(promises())),
        metavar="NAME",
        help=f"what the tier promises besides; repeatable: all, {', '.join(sorted(promises()))}",
    )
    parser.add_argument("--case", action="append", default=[], help="this case only; repeatable")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML too")
    parser.add_argument("--verbose", action="store_true", help="let the tier's own log through")


def run(args: argparse.Namespace) -> int:
    """0 if every promise was kept, 1 otherwise. Raises `Misused`."""
    try:
        chosen = cases(args.case)
        options = _options(args.options)
        entrant = enter(args.tier, options, args.sealed, args.promise)
    except (Unknown, ValueError, ImportError) as exc:
        raise Misused(str(exc)) from exc
    before = logging.root.manager.disable
    if not args.verbose:
        logging.disable(logging.CRITICAL)
    try:
        results = list(_with_progress(entrant, chosen))
    finally:
        logging.disable(before)
    document = report(entrant, results)
    if args.junit is not None:
        args.junit.write_bytes(junit(entrant, results))
    if args.json:
        json.dump(document, sys.stdout, indent=1)
        print()
    else:
        print(table(entrant, results))
    return 1 if any(result.failed for result in results) else 0


def _options(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("--options is not a JSON object")
    return value


def _with_progress(entrant: Entrant, chosen: Sequence[Case]) -> list[Result]:
    shown, done = sys.stderr.isatty(), 0

    def tick(case: Case) -> None:
        nonlocal done
        done += 1
        if shown:
            sys.stderr.write(f"\r\x1b[K{done}/{len(chosen)} {case.name}")
            sys.stderr.flush()

    results = list(run_all(chosen, entrant.driver, entrant.options, entrant.promised, tick))
    if shown:
        sys.stderr.write("\r\x1b[K")
    return results


def report(entrant: Entrant, results: Sequence[Result]) -> dict[str, Any]:
    """Everything as one document."""
    return {
        "tier": entrant.name,
        "target": entrant.target,
        "options": dict(entrant.options),
        "promises": sorted(entrant.promised),
        "versions": dict(entrant.driver.versions()),
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "failed": sum(result.failed for result in results),
        "results": [asdict(result) for result in results],
    }


def table(entrant: Entrant, results: Sequence[Result]) -> str:
    """For people: one line per case, then one line of sums."""
    width = max(len(result.case) for result in results)
    lines = [f"{entrant.name} ({_versions(entrant.driver.versions())})"]
    for result in results:
        mark = "FAILED  " if result.failed else ""
        shown = result.detail and result.verdict != "not promised"
        why = f"  ({result.detail})" if shown else ""
        lines.append(f"  {result.case:<{width}}  {mark}{result.verdict}{why}")
    kept = sum(not one.failed and one.verdict not in ("not promised", "not run") for one in results)
    unpromised = sum(one.verdict == "not promised" for one in results)
    failed = sum(one.failed for one in results)
    lines.append(
        f"{len(results)} cases: {kept} as they should be, {failed} failed, "
        f"{unpromised} not promised, {len(results) - kept - failed - unpromised} not run"
    )
    return "\n".join(lines)


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def junit(entrant: Entrant, results: Sequence[Result]) -> bytes:
    """For machines that read JUnit XML."""
    failures = sum(result.failed for result in results)
    suite = Xml.Element(
        "testsuite", name=entrant.name, tests=str(len(results)), failures=str(failures)
    )
    for result in results:
        case = Xml.SubElement(
            suite, "testcase", classname=entrant.name, name=result.case, time=str(result.seconds)
        )
        if result.failed:
            Xml.SubElement(case, "failure", message=result.seen).text = result.detail
        elif result.verdict in ("not promised", "not run"):
            Xml.SubElement(case, "skipped", message=result.detail or result.verdict)
    return bytes(Xml.tostring(suite, encoding="utf-8", xml_declaration=True))


__all__ = ["SUMMARY", "Misused", "add_arguments", "junit", "report", "run", "table"]

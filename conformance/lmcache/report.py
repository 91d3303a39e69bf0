# SPDX-License-Identifier: Apache-2.0
"""Results of a suite: a table for people, JSON and JUnit for machines, one exit code."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree as Xml

__all__ = ["Result", "add_report_arguments", "deliver"]


@dataclass(frozen=True)
class Result:
    """One case on one peer: `verdict` is pass, fail, or note; `found` says what was seen."""

    case: str
    level: str
    title: str
    verdict: str
    found: str
    seconds: float


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that all suites share."""
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write them as JUnit XML too")
    parser.add_argument(
        "--case", action="append", metavar="NAME", help="this case only; repeatable"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long one answer may take (default 5)",
    )


def deliver(peer: str, results: Sequence[Result], args: argparse.Namespace) -> int:
    """Print and write what `args` asks for; returns 1 when a case failed, else 0."""
    failed = [result for result in results if result.verdict == "fail"]
    if args.junit is not None:
        args.junit.write_bytes(_junit(peer, results))
    if args.json:
        document = {"peer": peer, "results": [asdict(result) for result in results]}
        json.dump(document, sys.stdout, indent=1)
        print()
    else:
        print(_table(results))
        print(f"{peer}: {len(results)} cases, {len(failed)} failed")
    return 1 if failed else 0


def _table(results: Sequence[Result]) -> str:
    width = max((len(result.case) for result in results), default=4)
    rows = []
    for result in results:
        rows.append(f"{result.verdict:<5} {result.level:<6} {result.case:<{width}}  {result.title}")
        if result.verdict != "pass":
            rows.append(f"{'':<13}{'':<{width}}  {result.found}")
    return "\n".join(rows)


def _junit(peer: str, results: Sequence[Result]) -> bytes:
    failures = sum(result.verdict == "fail" for result in results)
    suite = Xml.Element(
        "testsuite", name=f"lmcache {peer}", tests=str(len(results)), failures=str(failures)
    )
    for result in results:
        entry = Xml.SubElement(
            suite,
            "testcase",
            classname=f"lmcache.{result.level}",
            name=result.case,
            time=f"{result.seconds:.3f}",
        )
        if result.verdict == "fail":
            Xml.SubElement(entry, "failure", message=result.found).text = result.title
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(suite)

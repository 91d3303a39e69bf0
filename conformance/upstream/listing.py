# SPDX-License-Identifier: Apache-2.0
"""The differences that `spec/upstream-tests.md` lists, held against what a run has found.

A row names a test, or a group of them with `*`, says how many there are, and how they end. It is
wrong in both directions: a failure without a row, and a row whose tests pass, are fewer or more
than it says, or end in another way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

_ROW = re.compile(r"^\| `([^`]+::[^`]+)` \| (\d+) \| `([^`]+)` \| (.+) \|$", re.MULTILINE)


class Outcome(NamedTuple):
    """What became of a test: `passed`, `failed` or `skipped`, and what a failure said."""

    kind: str
    said: str = ""


class Difference(NamedTuple):
    """One row of the page."""

    tests: str
    number: int
    ends: str
    why: str

    def holds(self, test: str) -> bool:
        """Whether the row is about this test."""
        pattern = re.escape(self.tests).replace(r"\*", ".*")
        return re.fullmatch(pattern, test) is not None


def listed(page: Path) -> list[Difference]:
    """The rows of the page."""
    rows = _ROW.findall(page.read_text(encoding="utf-8"))
    return [Difference(tests, int(count), ends, why) for tests, count, ends, why in rows]


def outcomes(report: Path) -> dict[str, Outcome]:
    """Test to outcome, from a report of pytest."""
    found = {}
    # The report was written by the pytest that was just run.
    for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314
        place = case.get("classname", "").replace("tests.v1.", "")
        found[f"{place}::{case.get('name')}"] = _outcome(case)
    return found


def _outcome(case: ElementTree.Element) -> Outcome:
    bad = [child for child in case if child.tag in ("failure", "error")]
    if bad:
        return Outcome("failed", " ".join(child.get("message", "") for child in bad))
    skipped = any(child.tag == "skipped" for child in case)
    return Outcome("skipped" if skipped else "passed")


def complaints(
    found: Mapping[str, Outcome], rows: Sequence[Difference], *, whole: bool
) -> list[str]:
    """What is not as the rows say, one sentence each; `whole` if every test was run."""
    said = []
    seen = [0] * len(rows)
    for test, outcome in sorted(found.items()):
        places = [place for place, row in enumerate(rows) if row.holds(test)]
        for place in places:
            seen[place] += 1
        said += _complaints(test, outcome, [rows[place] for place in places])
    for row, count in zip(rows, seen, strict=True):
        if whole and count != row.number:
            said.append(f"{row.tests}: {count} tests, listed are {row.number}")
    return said


def _complaints(test: str, outcome: Outcome, rows: Sequence[Difference]) -> list[str]:
    if len(rows) > 1:
        return [f"{test} is listed {len(rows)} times"]
    if outcome.kind != "failed":
        return [f"{test} {outcome.kind} and is listed"] if rows else []
    if not rows:
        return [f"{test} failed and is not listed"]
    if rows[0].ends not in outcome.said:
        return [f"{test} ends with {outcome.said[:200]!r}, listed is {rows[0].ends!r}"]
    return []

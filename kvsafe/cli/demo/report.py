# SPDX-License-Identifier: Apache-2.0
"""The demo's result: one line per promise, what was expected and what was seen."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

from kvsafe.cli import ExitCode

__all__ = ["Check", "Report"]

HEADINGS = ("step", "expected", "seen", "")
WIDTHS = (15, 25, 28)


@dataclass(frozen=True)
class Check:
    """One promise of one step, and whether it held."""

    step: str
    expected: str
    seen: str
    ok: bool


@dataclass
class Report:
    """All checks of one run. A run holds when it has checks and each of them held."""

    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every step held."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def exit_code(self) -> ExitCode:
        """0 when every step held, else 1."""
        return ExitCode.FINE if self.ok else ExitCode.FOUND

    def add(self, step: str, expected: str, seen: str, ok: bool) -> Check:
        """Note one check and return it."""
        check = Check(step, expected, seen, ok)
        self.checks.append(check)
        return check

    def as_json(self, **more: object) -> str:
        """The table as one JSON object, with `more` beside it."""
        document = {"ok": self.ok, **more, "steps": [asdict(check) for check in self.checks]}
        return json.dumps(document, indent=2) + "\n"

    def as_text(self) -> str:
        """The table in columns of fixed width; long cells take several lines."""
        rule = "  ".join("-" * width for width in (*WIDTHS, 6))
        lines = [*_row(HEADINGS), rule]
        shown = ""
        for check in self.checks:
            step = "" if check.step == shown else check.step
            shown = check.step
            lines += _row((step, check.expected, check.seen, "ok" if check.ok else "FAILED"))
        return "\n".join(line.rstrip() for line in lines) + "\n"


def _row(cells: Iterable[str]) -> Iterator[str]:
    """The lines of one row: each cell wrapped to the width of its column."""
    *wide, last = cells
    columns = [textwrap.wrap(text, width) for text, width in zip(wide, WIDTHS, strict=True)]
    for place in range(max(1, *map(len, columns))):
        parts = [
            (column[place] if place < len(column) else "").ljust(width)
            for column, width in zip(columns, WIDTHS, strict=True)
        ]
        yield "  ".join([*parts, last if place == 0 else ""])

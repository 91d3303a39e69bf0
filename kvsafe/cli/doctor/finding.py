# SPDX-License-Identifier: Apache-2.0
"""What the doctor says: one finding per line, each with what to do about it."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvsafe.cli.inspect.tree import shown

__all__ = ["Finding", "Level", "bad", "finding_lines", "ok", "unknown", "warn"]


class Level(enum.StrEnum):
    """How a check ended; `UNKNOWN` is a check that could not be made."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was looked at, what was found, what to do."""

    level: Level
    name: str
    text: str
    todo: str = ""

    def document(self) -> dict[str, str]:
        """Plain data for JSON."""
        return {"level": self.level, "name": self.name, "text": self.text, "todo": self.todo}


def ok(name: str, text: str) -> Finding:
    """As it should be."""
    return Finding(Level.OK, name, text)


def warn(name: str, text: str, todo: str = "") -> Finding:
    """It works, and somebody should know."""
    return Finding(Level.WARN, name, text, todo)


def bad(name: str, text: str, todo: str = "") -> Finding:
    """It will not start, or not do what is asked of it."""
    return Finding(Level.BAD, name, text, todo)


def unknown(name: str, text: str, todo: str = "") -> Finding:
    """It could not be looked at."""
    return Finding(Level.UNKNOWN, name, text, todo)


def finding_lines(findings: Iterable[Finding], width: int = 100) -> Iterator[str]:
    """Findings for people: level, name, text; below it what to do."""
    findings = list(findings)
    names = min(32, max((len(item.name) for item in findings), default=0))
    for item in findings:
        lead = f"{item.level.value:<11}  {shown(item.name):<{names}}  "
        yield from _wrapped(lead, shown(item.text), width)
        if item.todo:
            yield from _wrapped(" " * (15 + names) + "-> ", shown(item.todo), width)


def _wrapped(lead: str, text: str, width: int) -> list[str]:
    rest = " " * len(lead)
    lines = textwrap.wrap(text, max(40, width - len(lead)), break_long_words=False) or [""]
    return [(lead if place == 0 else rest) + line for place, line in enumerate(lines)]

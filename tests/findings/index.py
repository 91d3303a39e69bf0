# SPDX-License-Identifier: Apache-2.0
"""The table in `spec/findings/README.md`, made from the first lines of the findings.

`python -m tests.findings.index --write` writes it. A finding begins with

    # ID: what, in one line

    - state: open | closed in VERSION
    - seen in: the versions of vLLM that it was seen in
    - test: path of the reproducer
    - guard: what of ours stands before it, in one line
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[2] / "spec" / "findings"
BEGIN, END = "<!-- index: begin -->", "<!-- index: end -->"
TITLE = re.compile(r"# ([A-Z]+[0-9]*): (.+)")
FACT = re.compile(r"- (state|seen in|test|guard): (.+)")
FACTS = ("state", "seen in", "test", "guard")


class Finding(NamedTuple):
    """One finding: where it is written up, and its first lines."""

    place: Path
    name: str
    title: str
    facts: dict[str, str]


def read(path: Path) -> Finding:
    """Raises `ValueError` if the first lines are not as they have to be."""
    first, blank, *rest = path.read_text(encoding="utf-8").splitlines()
    title = TITLE.fullmatch(first)
    found = [FACT.fullmatch(line) for line in rest[: len(FACTS)]]
    facts = {match[1]: match[2] for match in found if match is not None}
    if title is None or blank or tuple(facts) != FACTS:
        raise ValueError(f"{path.name}: the first lines are not as in tests/findings/index.py")
    if not path.name.startswith(f"{title[1]}-"):
        raise ValueError(f"{path.name}: the name does not begin with {title[1]}-")
    return Finding(path, title[1], title[2], facts)


def findings(folder: Path = FOLDER) -> list[Finding]:
    """All of them, by name."""
    return [read(path) for path in sorted(folder.glob("*.md")) if path.name != "README.md"]


def table(found: Iterable[Finding]) -> str:
    """The index as a table of markdown."""
    lines = [
        "| id | what | state | seen in | reproducer | our guard |",
        "|---|---|---|---|---|---|",
    ]
    for finding in found:
        state, seen, test, guard = (finding.facts[name] for name in FACTS)
        link = f"[{finding.name}]({finding.place.name})"
        lines.append(f"| {link} | {finding.title} | {state} | {seen} | `{test}` | {guard} |")
    return "\n".join(lines)


def page(text: str, found: Iterable[Finding]) -> str:
    """The README with the table of today in it."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(found)}\n{END}{after}"


def main() -> None:
    """Write the README, or print the table."""
    readme = FOLDER / "README.md"
    if "--write" in sys.argv[1:]:
        readme.write_text(page(readme.read_text(encoding="utf-8"), findings()), encoding="utf-8")
    else:
        print(table(findings()))


if __name__ == "__main__":
    main()

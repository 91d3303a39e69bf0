# SPDX-License-Identifier: Apache-2.0
"""Write the table of `conformance/RESULTS.md` from the JSON of `kvsafe conformance tier --json`.

    python -m conformance.tier.publish RESULT.json ... [--write conformance/RESULTS.md]

Only the part between the two marks is replaced; other suites have parts of their own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.tier.folder import cases

BEGIN, END = "<!-- tier: begin -->", "<!-- tier: end -->"
_TITLE = "# Conformance: what was run, and what came of it\n\n"
_ABOUT = """\
## Disk tiers

Attacks and faults on the files of a tier, each in a process of its own (`conformance/tier/`). A
case that begins with *hit* must be served, one that begins with *miss* must not be.

- **hit, miss, refused**: as it should be; refused means that the tier noticed, or that the load
  failed, and nothing was served.
- **not promised**: the tier does not do it, and its documentation does not say that it does. That
  is no fault: it was made for another purpose.
- **served wrong, served, lost, left behind, hang, crash**: a promise that was not kept.
- **not run**: the case does not apply, for example because the files have no header.
"""


def part(documents: Sequence[dict[str, Any]]) -> str:
    """The whole part, marks included."""
    lines = [BEGIN, _ABOUT, *_subjects(documents), "", *_table(documents), "", *_how(documents)]
    return "\n".join([*lines, END]) + "\n"


def _subjects(documents: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| tier | versions | promises, beside the round trip | date |", "|---|---|---|---|"]
    for one in documents:
        versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
        promised = ", ".join(name for name in one["promises"] if name != "round trip") or "nothing"
        lines.append(f"| {one['tier']} | {versions} | {promised} | {one['date']} |")
    return lines


def _table(documents: Sequence[dict[str, Any]]) -> list[str]:
    names = [one["tier"] for one in documents]
    lines = [f"| case | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for case in cases():
        cells = [_cell(one, case.name) for one in documents]
        lines.append(f"| [{case.name}](tier/cases/{case.name}/README.md) | {' | '.join(cells)} |")
    return lines


def _cell(document: dict[str, Any], name: str) -> str:
    for result in document["results"]:
        if result["case"] == name:
            return f"**{result['verdict']}**" if result["failed"] else str(result["verdict"])
    return "-"


def _how(documents: Sequence[dict[str, Any]]) -> list[str]:
    kernels = sorted({f"Python {one['python']}, Linux {one['kernel']}" for one in documents})
    lines = [f"Run on {'; '.join(kernels)}. To reproduce, from a checkout:", "", "```"]
    for one in documents:
        under = one["tier"].endswith("under kvsafe")
        lines.append(f"kvsafe conformance tier {one['target']}{' --sealed' if under else ''}")
    lines += [
        "```",
        "",
        "LMCache and SpoolCache need an environment of their own beside vLLM's packages: "
        "`pip install --no-deps` of the versions above, and of `sortedcontainers aiofile caio "
        "aiofiles` for LMCache.",
    ]
    return lines


def replaced(text: str, new: str) -> str:
    """`text` with the part between the marks replaced, or added at the end."""
    before, mark, rest = text.partition(BEGIN)
    if not mark:
        return f"{text.rstrip()}\n\n{new}" if text.strip() else _TITLE + new
    return before + new + rest.partition(END)[2].lstrip("\n")


def main(argv: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--write", type=Path, help="the page; default: print the part")
    args = parser.parse_args(argv)
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    new = part(documents)
    if args.write is None:
        sys.stdout.write(new)
        return 0
    text = args.write.read_text(encoding="utf-8") if args.write.exists() else ""
    args.write.write_text(replaced(text, new), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

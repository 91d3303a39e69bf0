# SPDX-License-Identifier: Apache-2.0
"""CrossHair as a child process, and what it said about each contract."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
MODULES: Final = ("seal", "lifecycle", "geometry", "lmcache", "known_false")
FALSE_ON_PURPOSE: Final = "known_false"
CONFIRMED: Final = "confirmed"
BOUNDED: Final = "bounded"
REFUTED: Final = "refuted"

_LINE = re.compile(r"^.*\.py:(\d+): (info|error|warning): (.*)$")


class Verdict(NamedTuple):
    """What is known of one contract. `example` refutes it, "" where nothing does."""

    module: str
    contract: str
    says: str
    outcome: str
    example: str


class CheckerMissing(RuntimeError):
    """CrossHair is not installed here, or did not run."""


class _Contract(NamedTuple):
    name: str
    says: str
    first: int
    last: int


def contracts(module: str) -> list[_Contract]:
    """The contracts of a module, in its order: public functions that begin with an assert."""
    tree = ast.parse((ROOT / "fuzz" / "contracts" / f"{module}.py").read_text())
    return [
        _Contract(node.name, (ast.get_docstring(node) or "").split("\n")[0], node.lineno, end)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and (end := node.end_lineno) is not None
        if not node.name.startswith("_")
    ]


def check(module: str, seconds: float) -> list[Verdict]:
    """Ask CrossHair about one module, at most `seconds` for each contract.

    Raises `CheckerMissing` where it cannot be run.
    """
    found = contracts(module)
    if importlib.util.find_spec("crosshair") is None:
        raise CheckerMissing("CrossHair is not installed: pip install crosshair-tool")
    options = ["--report_all", "--analysis_kind=asserts", f"--per_condition_timeout={seconds}"]
    done = subprocess.run(
        [sys.executable, "-m", "crosshair", "check", *options, f"fuzz.contracts.{module}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60 + 4 * seconds * len(found),
        check=False,
    )
    if done.returncode not in (0, 1):
        raise CheckerMissing(f"CrossHair ended with {done.returncode}: {done.stderr[-500:]}")
    said = dict(_answers(done.stdout.splitlines(), found))
    return [
        Verdict(module, one.name, one.says, *said.get(one.name, (BOUNDED, ""))) for one in found
    ]


def _answers(lines: Iterable[str], found: list[_Contract]) -> Iterator[tuple[str, tuple[str, str]]]:
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        at = int(match[1])
        name = next((one.name for one in found if one.first <= at <= one.last), None)
        if name is None:
            raise CheckerMissing(f"CrossHair spoke of no contract: {Path(line).name}")
        if match[2] == "error":
            yield name, (REFUTED, match[3].split("when calling ")[-1])
        else:
            yield name, (CONFIRMED if match[3].startswith("Confirmed") else BOUNDED, "")


def complaints(verdicts: Iterable[Verdict]) -> list[str]:
    """Contracts that were refuted, and false ones that were not."""
    found = []
    for one in verdicts:
        false = one.module == FALSE_ON_PURPOSE
        if false and one.outcome != REFUTED:
            found.append(f"{one.contract} is false, and CrossHair found it {one.outcome}")
        if not false and one.outcome == REFUTED:
            found.append(f"{one.module}.{one.contract} is refuted by {one.example}")
    return found

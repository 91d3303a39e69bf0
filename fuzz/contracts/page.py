# SPDX-License-Identifier: Apache-2.0
"""`spec/contracts.md`: what was confirmed, what was only bounded, what was refuted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fuzz.contracts.check import FALSE_ON_PURPOSE, REFUTED, Verdict

_FRONT = """<!-- Written by `python -m fuzz.contracts --write`; do not edit. -->
# Contracts

Each line is a contract of `fuzz/contracts/`, run through CrossHair with at most {seconds:g} seconds
for each. **confirmed**: every path through the function was explored and holds, for all arguments
that the contract speaks of. **bounded**: no path that was explored in that time breaks it, and some
were not explored. **refuted**: CrossHair gave arguments for which it does not hold.

| folder | contract | what it says | outcome |
|---|---|---|---|
"""

_FALSE = """
## False on purpose
A checker that refutes none of these checks nothing.

| contract | why it is false | refuted by |
|---|---|---|
"""

_REFUTED_ONCE = (
    (
        "equal_strides_agree_with_the_slow_way",
        "(1, 2, 2, 2)",
        "with equal strides `first_overlap` named a pair that overlaps, but not the first one; "
        "both of its ways now name the first",
    ),
)
_HISTORY = """
## What was refuted once
| contract | refuted by | what followed |
|---|---|---|
"""


def write_page(path: Path, verdicts: Iterable[Verdict], seconds: float) -> None:
    """Write the page for these verdicts."""
    verdicts = list(verdicts)
    text = _FRONT.format(seconds=seconds)
    for one in verdicts:
        if one.module != FALSE_ON_PURPOSE:
            outcome = f"refuted by `{one.example}`" if one.outcome == REFUTED else one.outcome
            text += f"| {one.module} | `{one.contract}` | {one.says} | {outcome} |\n"
    text += _FALSE
    for one in verdicts:
        if one.module == FALSE_ON_PURPOSE:
            text += f"| `{one.contract}` | {one.says} | `{one.example}` |\n"
    text += _HISTORY
    for name, example, followed in _REFUTED_ONCE:
        text += f"| `{name}` | `{example}` | {followed} |\n"
    path.write_text(text)

# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmarks: paired rounds, medians of ratios, a table or JSON."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paired:
    """Two sides timed in turn: medians in seconds, and the ratios ours / theirs per round."""

    ours: float
    theirs: float
    ratio: float
    ratio_low: float
    ratio_high: float


def timed(action: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def paired(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> Paired:
    """Time both sides `rounds` times in alternating order; each returns its own seconds."""
    left, right = [], []
    for index in range(rounds):
        for side in (0, 1) if index % 2 else (1, 0):
            if side == 0:
                left.append(ours())
            else:
                right.append(theirs())
    ratios = [a / b for a, b in zip(left, right, strict=True)]
    return Paired(
        statistics.median(left),
        statistics.median(right),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


def arguments(text: str, rounds: int) -> argparse.Namespace:
    """`--json` and `--rounds`."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser.parse_args()


def show(rows: Sequence[dict[str, object]], *, as_json: bool) -> None:
    """Print rows of equal keys as a table, or as JSON."""
    if as_json:
        print(json.dumps(list(rows), indent=1))
        return
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(names, *cells, strict=True)]
    for line in (names, ["-" * width for width in widths], *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)

# SPDX-License-Identifier: Apache-2.0
"""Shared by the campaigns: options, a line that moves, one report and one exit code."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from types import TracebackType

from fuzz.campaigns.aftermath import Findings

_EVERY_S = 0.5
_SHOWN = 40


def parser(about: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every campaign has."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return made


class Progress:
    """A line on a terminal that says how far it is; silent elsewhere."""

    def __init__(self, label: str, total: int, quiet: bool) -> None:
        self._label = label
        self._total = total
        self._shown = sys.stderr.isatty() and not quiet
        self._done = 0
        self._last = 0.0
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def tick(self) -> None:
        """One more is done."""
        self._done += 1
        now = time.monotonic()
        if self._shown and now - self._last > _EVERY_S:
            self._last = now
            sys.stderr.write(f"\r{self._label}: {self._done} of {self._total}")
            sys.stderr.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            sys.stderr.write("\n")


def finish(reports: Iterable[tuple[str, Findings, Counter[str]]], as_json: bool) -> int:
    """Print what was found; 1 if anything was wrong."""
    faults: list[str] = []
    document = {}
    for label, found, met in reports:
        document[label] = {**dict(met), **found.report()}
        faults += found.faults
    if as_json:
        print(json.dumps({"ok": not faults, **document, "faults": faults[:_SHOWN]}, indent=2))
    else:
        for label, counts in document.items():
            print(f"{label}: " + ", ".join(f"{value} {name}" for name, value in counts.items()))
        for fault in faults[:_SHOWN]:
            print(f"  {fault}")
    return 1 if faults else 0

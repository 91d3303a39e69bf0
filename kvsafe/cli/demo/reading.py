# SPDX-License-Identifier: Apache-2.0
"""Read what a server says of itself: its metrics page and the refusals in its log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Metrics", "RefusalLine", "read_metrics", "read_refusals"]

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(?P<name>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')
_REFUSAL = re.compile(
    r"kvsafe: tier (?P<tier>[^,]+), chunk (?P<chunk>[0-9a-f]+): "
    r"refusal (?P<number>\d+) at step (?P<step>\d+): (?P<meaning>[^;]*); "
    r"field (?P<field>.*?): expected (?P<expected>.*), found (?P<found>.*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Metrics:
    """The samples of one metrics page: (name, labels, value)."""

    samples: tuple[tuple[str, dict[str, str], float], ...]

    def total(self, counter: str, **labels: str) -> int:
        """Sum of a counter over all samples that carry these labels; 0 when there is none.

        `counter` is the name without Prometheus' `_total`.
        """
        return int(self.value(f"{counter}_total", **labels))

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples of exactly this name that carry these labels; 0 when there is none."""
        return sum(
            value
            for found, carried, value in self.samples
            if found == name and labels.items() <= carried.items()
        )


def read_metrics(page: str) -> Metrics:
    """Parse the Prometheus text format; lines that are no samples are passed over."""
    return Metrics(tuple(_samples(page)))


def _samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        labels = {label["name"]: label["value"] for label in _LABEL.finditer(match["labels"] or "")}
        yield match["name"], labels, value


@dataclass(frozen=True)
class RefusalLine:
    """One refusal as the server's log tells it; `chunk` is the key's first bytes in hex."""

    tier: str
    chunk: str
    number: int
    step: int
    meaning: str
    field: str
    expected: str
    found: str


def read_refusals(log: str) -> tuple[RefusalLine, ...]:
    """Every refusal in the text of a log, in its order."""
    return tuple(
        RefusalLine(
            match["tier"],
            match["chunk"],
            int(match["number"]),
            int(match["step"]),
            match["meaning"],
            match["field"],
            match["expected"],
            match["found"].rstrip(),
        )
        for match in _REFUSAL.finditer(log)
    )

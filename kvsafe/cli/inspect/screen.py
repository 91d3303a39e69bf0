# SPDX-License-Identifier: Apache-2.0
"""What the commands that look at stores print: tables, amounts, and a bar during long work."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

__all__ = ["Bar", "amount", "moment", "print_json", "say", "table"]

_REDRAW_S = 0.1
_WIDTH = 24
_CLEAR = "\r\x1b[K"


def say(lines: Iterable[str]) -> None:
    """Lines on stdout. What the terminal's encoding cannot show becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        print(line.encode(encoding, "replace").decode(encoding))


def print_json(document: dict[str, Any]) -> None:
    """One JSON document on stdout, ASCII only."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> list[str]:
    """Aligned lines under a head; columns whose head is in `right` (words) are right-aligned."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    to_right = [name in right.split() for name in head]
    return [_line(line, widths, to_right) for line in lines]


def _line(cells: Sequence[str], widths: Sequence[int], to_right: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, to_right, strict=True)
    )
    return "  ".join(padded).rstrip()


def amount(size: float) -> str:
    """Bytes for people: three digits and a unit in 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def moment(seconds: float) -> str:
    """A Unix time in UTC; numbers that are no date are shown as they are."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} (no date)"


class Bar:
    """One line on a terminal that is redrawn; says nothing anywhere else."""

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        """`live`: whether to draw (default: is the stream, stderr by itself, a terminal)."""
        self._stream = sys.stderr if stream is None else stream
        self.live = self._stream.isatty() if live is None else live
        self._started = time.monotonic()
        self._drawn_at = float("-inf")

    def show(self, what: str, done: int, total: int, size: int) -> None:
        """`done` of `total` files (0: not known), `size` bytes so far."""
        now = time.monotonic()
        if not self.live or now - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = now
        rate = amount(size / max(now - self._started, 0.001))
        full = min(_WIDTH, _WIDTH * done // total) if total else 0
        part = f"[{'#' * full}{'.' * (_WIDTH - full)}] {done}/{total}" if total else f"{done}"
        self._stream.write(f"{_CLEAR}{what} {part} files, {amount(size)}, {rate}/s")
        self._stream.flush()

    def clear(self) -> None:
        """Take the line away, before other text and at the end."""
        if self.live:
            self._stream.write(_CLEAR)
            self._stream.flush()
        self._drawn_at = float("-inf")

# SPDX-License-Identifier: Apache-2.0
"""What the demo says while it runs: headings, lines, and one moving line during long waits."""

from __future__ import annotations

import os
import time
from typing import TextIO

__all__ = ["Screen"]

SPINNER = "|/-\\"
HEARTBEAT_S = 15.0
WIDTH = 78


class Screen:
    """Writes to one stream; on a terminal waits are a spinner, elsewhere plain lines."""

    def __init__(self, stream: TextIO, *, live: bool | None = None) -> None:
        """`live` says whether the last line may be redrawn (default: is `stream` a terminal)."""
        self._stream = stream
        self._live = stream.isatty() if live is None else live
        self._bold = self._live and "NO_COLOR" not in os.environ
        self._turn = 0
        self._waiting_for = ""
        self._said_at = 0.0

    def heading(self, text: str) -> None:
        """Begin a part of the story."""
        self._clear()
        start, end = ("\x1b[1m", "\x1b[0m") if self._bold else ("", "")
        self._write(f"\n{start}{text}{end}\n")

    def say(self, text: str = "") -> None:
        """One line, indented under its heading."""
        self._clear()
        self._write(f"   {text}\n" if text else "\n")

    def raw(self, text: str) -> None:
        """Text as it is, with its own line ends."""
        self._clear()
        self._write(text)

    def wait(self, what: str, elapsed_s: float) -> None:
        """Called again and again during a wait; `what` is what is being waited for now."""
        if self._live:
            self._turn += 1
            line = f"   {SPINNER[self._turn % len(SPINNER)]} {what}, {elapsed_s:.0f} s"
            self._write(f"\r\x1b[K{line[:WIDTH]}")
            self._waiting_for = what
            return
        now = time.monotonic()
        if what != self._waiting_for or now - self._said_at > HEARTBEAT_S:
            self._waiting_for, self._said_at = what, now
            self._write(f"   ... {what}, {elapsed_s:.0f} s\n")

    def _clear(self) -> None:
        if self._live and self._waiting_for:
            self._write("\r\x1b[K")
        self._waiting_for = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

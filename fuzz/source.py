# SPDX-License-Identifier: Apache-2.0
"""Bytes read as choices: the one language between the engines and the targets.

Both engines make bytes; a target reads numbers, picks and flags from them. When the bytes are
used up every choice is the first one, so any input is a whole, repeatable story.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_EDGES = (0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 4095, 4096, 4097)
_WIDE = (8191, 8192, 65535, 65536, 65537, 1 << 20, (1 << 20) + 4096, (1 << 31) - 1, 1 << 31)
_TOPS = ((1 << 32) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
SPECIAL = (*_EDGES, *_WIDE, *_TOPS)
"""Numbers at which lengths and counters go wrong."""


class ByteSource:
    """Reads choices from `data`, front to back."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that nobody has read yet."""
        return len(self._data) - self._at

    def raw(self, length: int) -> bytes:
        """Exactly `length` bytes; zeros behind the end."""
        part = self._data[self._at : self._at + length]
        self._at = min(len(self._data), self._at + length)
        return part.ljust(length, b"\0")

    def rest(self) -> bytes:
        """All that is left."""
        return self.raw(self.left)

    def some(self, limit: int) -> bytes:
        """At most `limit` bytes, as many as a number says, and never more than are left."""
        return self.raw(min(self.below(limit + 1), self.left))

    def below(self, count: int) -> int:
        """A number in [0, count)."""
        width = ((count - 1).bit_length() + 7) // 8
        return int.from_bytes(self.raw(width), "little") % count if width else 0

    def between(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def flag(self) -> bool:
        """Yes or no."""
        return bool(self.raw(1)[0] & 1)

    def rarely(self) -> bool:
        """Yes once in sixteen."""
        return self.raw(1)[0] & 15 == 15

    def pick(self, options: Sequence[T]) -> T:
        """One of `options`."""
        return options[self.below(len(options))]

    def number(self, bits: int = 64) -> int:
        """A number of at most `bits` bits, often one at which something goes wrong."""
        kind, top = self.raw(1)[0], (1 << bits) - 1
        if kind < 170:
            return min(SPECIAL[kind % len(SPECIAL)], top)
        if kind < 210:
            return top - (kind - 170)
        return int.from_bytes(self.raw(bits // 8), "little")

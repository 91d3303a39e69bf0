# SPDX-License-Identifier: Apache-2.0
"""The few numbers, and the input, that a child shares with whoever watches it.

They lie in a file that both have mapped, so that they are still there when the child is not.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

_HEAD = struct.Struct("<QQQQQQI")
_ROOM = 1 << 16
_SIZE = _HEAD.size + _ROOM


class Beat(NamedTuple):
    """Executions begun and ended, coverage, inputs that brought new coverage, corpus, ready."""

    begun: int = 0
    ended: int = 0
    coverage: int = 0
    fresh: int = 0
    corpus: int = 0
    ready: int = 0
    length: int = 0


class Pulse:
    """One child's page. The child writes, the parent reads."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def write(self, beat: Beat) -> None:
        """Say where the child is."""
        _HEAD.pack_into(self._map, 0, *beat)

    def input(self, data: bytes) -> None:
        """Leave the input that is about to run."""
        part = data[:_ROOM]
        self._map[_HEAD.size : _HEAD.size + len(part)] = part

    def read(self) -> Beat:
        """What the child said last."""
        return Beat._make(_HEAD.unpack_from(self._map, 0))

    def last_input(self) -> bytes:
        """The input that ran last, or runs."""
        length = min(self.read().length, _ROOM)
        return self._map[_HEAD.size : _HEAD.size + length]

# SPDX-License-Identifier: Apache-2.0
"""Make an input smaller while it finds the same thing."""

from __future__ import annotations

import time
from collections.abc import Callable

TRIES = 600
SECONDS = 10.0


class _Budget:
    """Asks whether an input finds it, so many times at most."""

    def __init__(self, finds: Callable[[bytes], bool], tries: int, seconds: float) -> None:
        self._finds, self._left = finds, tries
        self._until = time.monotonic() + seconds

    def finds(self, data: bytes) -> bool:
        """Whether this one does; no longer once the budget is spent."""
        self._left -= 1
        return self._left >= 0 and time.monotonic() < self._until and self._finds(data)


def minimise(
    data: bytes, finds: Callable[[bytes], bool], tries: int = TRIES, seconds: float = SECONDS
) -> bytes:
    """The smallest input found from `data` that still `finds`: shorter first, then more zeros."""
    budget = _Budget(finds, tries, seconds)
    size = len(data) + 1
    while len(data) < size:
        size = len(data)
        data = _shorter(data, budget)
    return _plainer(data, budget)


def _shorter(data: bytes, budget: _Budget) -> bytes:
    """Parts left out, from large to small."""
    step = len(data)
    while step:
        at = 0
        while at < len(data):
            part = data[:at] + data[at + step :]
            if budget.finds(part):
                data = part
            else:
                at += step
        step //= 2
    return data


def _plainer(data: bytes, budget: _Budget) -> bytes:
    """Bytes made zero, or else halved."""
    for at, byte in enumerate(data):
        for value in (0, byte // 2):
            if data[at] > value:
                part = data[:at] + bytes([value]) + data[at + 1 :]
                if budget.finds(part):
                    data = part
                    break
    return data

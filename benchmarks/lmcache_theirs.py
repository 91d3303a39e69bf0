# SPDX-License-Identifier: Apache-2.0
"""LMCache's own lm:// client under a stopwatch; started by `benchmarks.lmcache` in LMCache's venv.

One line in, one line out: `put FROM COUNT`, `get FROM COUNT`; the answer is seconds. A put ends
when the server has said that it has the last chunk, as ours does.
"""

from __future__ import annotations

import os
import sys
import time

from conformance.lmcache.drivers.lmcache_peer import LMCachePeer
from conformance.lmcache.drivers.loop import Wanted
from conformance.lmcache.wire import pattern


class Stopwatch:
    """The client, its buffers filled beforehand, and the two things that are timed."""

    def __init__(self, host: str, port: int, shape: tuple[int, int, int, int]) -> None:
        planes, layers, tokens, width = shape
        length = planes * layers * tokens * width * 2
        self._peer = LMCachePeer((layers, tokens, width))
        self._peer.open("lm", host, port)
        self._wanted = Wanted(length, 1, 3, shape)
        self._data = pattern(length, 1)

    def put(self, first: int, count: int) -> float:
        """Put chunks one after another, as its storage backend does, then ask for the last."""
        keys = [_key(first + at) for at in range(count)]
        held = [self._peer.filled(self._wanted, self._data) for _ in keys]
        began = time.perf_counter()
        for key, buffer in zip(keys, held, strict=True):
            self._peer.put(key, buffer)
        there = self._peer.look(keys[-1]).word
        took = time.perf_counter() - began
        for buffer in held:
            buffer.ref_count_down()
        return took if there == "yes" else float("nan")

    def get(self, first: int, count: int) -> float:
        """Get chunks one after another; buffers come from its pool."""
        keys = [_key(first + at) for at in range(count)]
        began = time.perf_counter()
        held = [self._peer.get(key) for key in keys]
        took = time.perf_counter() - began
        whole = all(buffer is not None for buffer in held)
        for buffer in held:
            if buffer is not None:
                buffer.ref_count_down()
        return took if whole else float("nan")


def _key(number: int) -> str:
    return f"bench@1@0@{number:x}@bfloat16"


def main() -> int:
    """HOST PORT and the four sides of a chunk as arguments."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    host, port, *sides = sys.argv[1:]
    a, b, c, d = (int(side) for side in sides)
    watch = Stopwatch(host, int(port), (a, b, c, d))
    for line in sys.stdin:
        verb, first, count = line.split()
        took = getattr(watch, verb)(int(first), int(count))
        answers.write(f"{took!r}\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

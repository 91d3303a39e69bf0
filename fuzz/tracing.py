# SPDX-License-Identifier: Apache-2.0
"""Which lines of kvsafe an execution reached, where no instrumentation is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvsafe

_HOME = str(Path(kvsafe.__file__).parent) + "/"
Local = Callable[[FrameType, str, Any], Any]


class Lines:
    """Pairs of neighbouring lines inside the functions of kvsafe that ran so far.

    Pairs, and not lines: a loop that ends at once and one that goes round are two things.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[CodeType, int, int]] = set()
        self._ours: dict[CodeType, bool] = {}
        self._fresh = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note what runs in this thread inside the block; `fresh` tells what was new in it."""
        before = len(self.seen)
        old = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(old)
            self._fresh = len(self.seen) - before

    @property
    def fresh(self) -> int:
        """New pairs in the last block."""
        return self._fresh

    def _call(self, frame: FrameType, event: str, argument: Any) -> Local | None:
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            ours = self._ours[code] = code.co_filename.startswith(_HOME)
        if not ours:
            return None
        return self._follow(code, frame.f_lineno)

    def _follow(self, code: CodeType, line: int) -> Local:
        seen, last = self.seen, line

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                line = frame.f_lineno
                seen.add((code, last, line))
                last = line
            return local

        return local

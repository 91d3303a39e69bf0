# SPDX-License-Identifier: Apache-2.0
"""What the worlds over real files share: the tier's book, and who meddles with its files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvsafe.lifecycle.requests import with_request
from kvsafe.lifecycle.words import ABSENT, DAMAGED, GOOD
from tests.lockstep.hand import Tiered
from tests.lockstep.primary import KEYS
from tests.lockstep.runs import Dice
from tests.lockstep.tiers import TieredBook

WAIT_S = 60.0


def wait_until(done: Callable[[], bool], what: str) -> None:
    """Wait for threads of the tier. Raises `TimeoutError` with `what` when they take too long."""
    deadline = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.0002)


class FileBook(TieredBook):
    """The machine over one tier of files, whose jobs end by themselves.

    The tier asks for a key once for all requests and keeps the answer while one of them lives.
    """

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.world = self.world._replace(features=self.world.features | {"probe"})
        self.answers: dict[int, bool | None] = {}
        self.askers: dict[int, set[int]] = {}

    def ask(self, who: int, key: int) -> bool | None:
        """The answer that a request hears; None while there is none."""
        answer = self.answers.setdefault(key, None)
        self.askers.setdefault(key, set()).add(who)
        self.hear(who, key, 2 if answer is None else int(answer))
        return answer

    def hear(self, who: int, key: int, answer: int) -> None:
        """A request hears of a key: 0 absent, 1 there, 2 not known yet."""
        self.state = with_request(self.state, who, probes=frozenset({(0, key, answer)}))

    def _answers(self) -> Any:
        yield "hit", (), "HIT"
        yield "pend", (), "HIT_PENDING"
        yield "promote", (0,), "HIT_PENDING"
        yield "no room", (0,), "MISS"
        yield "retry", (), "RETRY"
        yield "miss", (), "MISS"

    def object(self, key: int) -> int:
        """What the tier has under a key."""
        return self.state.objects[0][key]

    def end_job(self, number: int, good: Collection[int]) -> None:
        """Jobs end by themselves here."""

    def step(self) -> None:
        """`on_schedule_end`; lookups are answered with what there is after it."""
        super().step()
        for key, answer in self.answers.items():
            if answer is None:
                self.answers[key] = self.object(key) != ABSENT

    def leave(self, who: int) -> None:
        """An answer is kept while a request lives that asked."""
        here = who in self._present
        super().leave(who)
        if here and who not in self._present:
            for key, askers in list(self.askers.items()):
                askers.discard(who)
                if not askers:
                    del self.askers[key], self.answers[key]


class OnFiles(Tiered):
    """Somebody removes files of the tier, or cuts them short."""

    book: FileBook
    source = CacheHitSource.DISK
    # How much a cut leaves of a file, and what the tier has then.
    left_bytes: int
    left_value: int

    def _path(self, key: int) -> Path:
        """The file of a key."""
        raise NotImplementedError

    def _with(self, dice: Dice, *values: int) -> int | None:
        keys = [key for key in range(KEYS) if self.book.object(key) in values]
        return dice.pick(keys) if keys else None

    def remove(self, dice: Dice) -> None:
        """A file goes."""
        key = self._with(dice, GOOD, DAMAGED)
        if key is not None:
            self._path(key).unlink()
            self.book.put(0, key, ABSENT)

    def cut(self, dice: Dice) -> None:
        """A file is cut short."""
        key = self._with(dice, GOOD)
        if key is not None:
            os.truncate(self._path(key), self.left_bytes)
            self.book.put(0, key, self.left_value)

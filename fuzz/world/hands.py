# SPDX-License-Identifier: Apache-2.0
"""Time and threads by hand: nothing happens before the driver says so."""

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from types import ModuleType
from typing import Any

CLOCKED = (
    "kvsafe.engine.tiers.patience",
    "kvsafe.engine.rows.primary",
    "kvsafe.engine.scheduler",
    "kvsafe.engine.rows.epochs",
    "kvsafe.engine.rows.loads",
    "kvsafe.engine.journal",
    "kvsafe.engine.tiers.proving",
    "kvsafe.engine.tiers.rest",
    "kvsafe.engine.requests.waits",
)


class Clock:
    """Stands in for the module `time` where kvsafe measures patience."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Seconds; only the driver moves them."""
        return self.now

    perf_counter = monotonic
    time = monotonic

    def sleep(self, seconds: float) -> None:
        """Nobody waits here."""


@contextlib.contextmanager
def clocked(clock: Clock) -> Iterator[None]:
    """Give kvsafe's modules this clock."""
    modules: list[ModuleType] = [sys.modules[name] for name in CLOCKED if name in sys.modules]
    before = [(module, vars(module).get("time")) for module in modules]
    for module, known in before:
        if known is not None:
            vars(module)["time"] = clock
    try:
        yield
    finally:
        for module, known in before:
            if known is not None:
                vars(module)["time"] = known


class HandFuture(Future[Any]):
    """A future that runs what is waiting when someone insists on its answer."""

    def __init__(self, owner: "HandThreads") -> None:
        super().__init__()
        self._owner = owner

    def result(self, timeout: float | None = None) -> Any:
        """The answer, after everything that was submitted has run."""
        if not self.done():
            self._owner.run()
        return super().result(timeout)


class HandThreads(Executor):
    """Proof threads by hand."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[HandFuture, Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Take a task."""
        future = HandFuture(self)
        self.waiting.append((future, partial(fn, *args, **kwargs)))
        return future

    def run(self, count: int | None = None) -> None:
        """Run the oldest `count` tasks, all by default."""
        left = len(self.waiting) if count is None else count
        while self.waiting and left > 0:
            left -= 1
            future, task = self.waiting.popleft()
            try:
                future.set_result(task())
            except Exception as exc:
                future.set_exception(exc)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End, as an executor does."""
        if wait and not cancel_futures:
            self.run()
        self.waiting.clear()


class HandPool:
    """The copier's threads by hand; runs any task of those that wait, in any order."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def submit(self, action: Callable[[], None]) -> None:
        """Take a task."""
        self.waiting.append(action)

    def close(self, timeout_s: float) -> bool:
        """Run what is left."""
        while self.waiting:
            self.waiting.popleft()()
        return True

    def run(self, index: int) -> None:
        """Run the task at this place."""
        action = self.waiting[index]
        del self.waiting[index]
        action()

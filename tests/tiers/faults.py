# SPDX-License-Identifier: Apache-2.0
"""A fault layer: real system calls, of which any can be failed, cut short or stalled.

A plan says which call (`what`, and the how-many-eth of its kind from now on) and what
happens to it. Every call is counted, so a test can ask how many there are and then fail
each in turn.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from kvsafe.tiers import Os

P = ParamSpec("P")
R = TypeVar("R")
WAIT_S = 30.0


@dataclass
class Stall:
    """A call that does not return until the test lets it."""

    entered: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Be stuck."""
        self.entered.set()
        self.let_go.wait(WAIT_S)


Action = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def failing(code: int) -> Action:
    """The call fails with an errno and does nothing."""

    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise OSError(code, os.strerror(code))

    return act


def failing_after(code: int) -> Action:
    """The call is made, and then reports an error."""

    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    return act


def short(length: int) -> Action:
    """A read or write moves `length` bytes at most."""

    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fd, data, offset = args
        if isinstance(data, list):
            return function(fd, [data[0][:length]], offset)
        return function(fd, data[:length], offset)

    return act


def stalled(stall: Stall, *, before: bool = True) -> Action:
    """The call is stuck before or after it is made."""

    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if before:
            stall.wait()
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        stall.wait()
        return result

    return act


@dataclass
class Plan:
    """One fault: calls named `what`, from the `first` one on, `times` of them."""

    what: str
    action: Action
    first: int = 1
    times: int = 1 << 30
    seen: int = 0
    hits: int = 0


class FaultyOs(Os):
    """System calls with plans. `threads` limits them to threads with these name prefixes."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.made: Counter[str] = Counter()
        self.log: list[str] = []
        self.only_threads: tuple[str, ...] | None = None
        self.skew_s = 0.0
        self.clock_skew_s = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        return super().now() + self.skew_s

    def clock(self) -> float:
        return super().clock() + self.clock_skew_s

    def plan(self, what: str, action: Action, first: int = 1, times: int = 1 << 30) -> Plan:
        """Add a plan, counted from now."""
        plan = Plan(what, action, first, times)
        self.plans.append(plan)
        return plan

    def calm(self) -> None:
        """No more faults."""
        self.plans = []

    def call(self, what: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        chosen = self._chosen(what)
        if chosen is None:
            return function(*args, **kwargs)
        result: R = chosen.action(function, args, kwargs)
        return result

    def _chosen(self, what: str) -> Plan | None:
        name = threading.current_thread().name
        with self._lock:
            if self.only_threads is not None and not name.startswith(self.only_threads):
                return None
            self.made[what] += 1
            self.log.append(what)
            for plan in self.plans:
                if plan.what in (what, "*"):
                    plan.seen += 1
                    if plan.first <= plan.seen < plan.first + plan.times:
                        plan.hits += 1
                        return plan
        return None


TRANSIENT = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.ESTALE, errno.ENOMEM)
"""Errors that say nothing about the file."""
FULL = (errno.ENOSPC, errno.EDQUOT)

# SPDX-License-Identifier: Apache-2.0
"""Processes that vLLM's tests start: our classes have to be in place there as well.

A child runs a function of this module, which then imports the test's own.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from multiprocessing import queues, synchronize
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from vllm.utils import system_utils

from conformance.upstream.region import put_in_place, sweep

_context = system_utils.get_mp_context


PATIENCE = 10
"""Their waits are for a machine that starts a process in seconds."""


class PatientQueue(queues.Queue):  # type: ignore[type-arg]
    """A queue that is waited for longer than a test says."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item."""
        return super().get(block, None if timeout is None else timeout * PATIENCE)


class PatientBarrier(synchronize.Barrier):
    """A barrier that is waited for longer than a test says."""

    def wait(self, timeout: float | None = None) -> int:
        """Until all are there."""
        return super().wait(None if timeout is None else timeout * PATIENCE)


class Context:
    """A context of multiprocessing whose processes begin with our classes in place."""

    def __init__(self, inner: BaseContext) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def Queue(self) -> PatientQueue:
        """A queue."""
        return PatientQueue(ctx=self._inner)

    def Barrier(self, parties: int) -> PatientBarrier:
        """A barrier."""
        return PatientBarrier(parties, ctx=self._inner)

    def Process(self, target: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:
        """A process that is not started yet."""
        make: Any = self._inner
        process: BaseProcess = make.Process(
            target=run, args=(target.__module__, target.__qualname__, *args), daemon=True
        )
        return process


def run(module: str, name: str, *args: Any) -> None:
    """What the child does, before the test's module is imported and then in it."""
    put_in_place()
    # A test that has failed leaves its children waiting; they are ended with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        getattr(importlib.import_module(module), name)(*args)
    finally:
        sweep()


def follow() -> None:
    """From here on children of the tests are followed."""
    system_utils.get_mp_context = lambda: Context(_context())

# SPDX-License-Identifier: Apache-2.0
"""Where one trial happens: a folder, the tier over it, its files, and the kernel's door."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from conformance.tier.kernel import PASS, Rule
from conformance.tier.subject import OURS, PATIENCE_S, Seen, Span, Subject, content_of

CONTROL = 900
"""A chunk that no trial touches: it must be served, or a trial has shown nothing."""
_PAUSE_S = 0.01
_HEAD = 64


class NotRun(Exception):
    """The trial cannot be made on this tier or this machine; the text says why."""


class Bench:
    """One trial's folder. `door` is None where the kernel has none."""

    def __init__(
        self, folder: Path, driver: type[Subject], options: Mapping[str, Any], door: Rule | None
    ) -> None:
        self.folder = folder
        self.root = folder / "store"
        self.root.mkdir(mode=0o700)
        self._driver = driver
        self._options = options
        self._door = door
        self._open: list[Subject] = []

    def open(self, model: str = OURS) -> Subject:
        """The tier over the folder, as at a start."""
        subject = self._driver.open(self.root, model, self._options)
        self._open.append(subject)
        return subject

    def close(self, subject: Subject) -> None:
        """End a tier, as at a shutdown."""
        self._open.remove(subject)
        subject.close()

    @property
    def door(self) -> Rule:
        """The kernel's door. Raises `NotRun` without one."""
        if self._door is None:
            raise NotRun("needs seccomp with user notification")
        return self._door

    def ready(self, *numbers: int) -> Subject:
        """A tier with these chunks and the control stored, each seen to come back."""
        subject = self.open()
        for number in (CONTROL, *numbers):
            if not subject.store(number):
                raise NotRun("a plain store fails")
        return subject

    def files(self) -> list[Path]:
        """Every regular file of the tier."""
        found = [Path(at) / name for at, _, names in os.walk(self.root) for name in names]
        return sorted(path for path in found if path.is_file() and not path.is_symlink())

    def place(self, number: int, model: str = OURS) -> Span:
        """Where a chunk's payload lies. Raises `NotRun` if it lies in no file as it is."""
        content = content_of(model, number)
        for path in self.files():
            data = path.read_bytes()
            begin = data.find(content[:_HEAD])
            if begin >= 0 and data[begin : begin + len(content)] == content:
                return Span(path, begin, begin + len(content))
        raise NotRun("the payload lies in no file in one piece")

    def in_child(self, work: Callable[[], None]) -> bool:
        """Run `work` in a process of its own; whether it was killed by SIGKILL.

        Only before this process has threads, so before any tier is open here.
        """
        return ended(self.start_child(work))

    def start_child(self, work: Callable[[], None]) -> int:
        """Start such a process; its id."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return child

    def end(self) -> None:
        """Let everything go."""
        if self._door is not None:
            self._door.set(PASS)
        for subject in list(self._open):
            self.close(subject)


def ended(child: int) -> bool:
    """Wait for a child; whether SIGKILL ended it. Raises `NotRun` if it failed by itself."""
    end = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            if os.WIFSIGNALED(status):
                return os.WTERMSIG(status) == signal.SIGKILL
            if status:
                raise NotRun("a second process failed")
            return False
        time.sleep(_PAUSE_S)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise NotRun("a second process did not end")


def each(subject: Subject, numbers: Iterator[int] | list[int]) -> list[Seen]:
    """Load several chunks."""
    return [subject.load(number) for number in numbers]

# SPDX-License-Identifier: Apache-2.0
"""One guarded execution: what is undocumented, too slow or too large becomes a `Finding`."""

from __future__ import annotations

import resource
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

import kvsafe
from fuzz.target import Finding, Target

_PACKAGE = str(Path(kvsafe.__file__).parent) + "/"
_ROOM_MIB = 1024
"""Address space beyond what is mapped at the start: far above every target's own bound."""


class Overtime(BaseException):
    """The alarm of the watchdog; not an `Exception`, so that no handler of ours swallows it."""


def check(target: Target, data: bytes, *, alarm: bool = True) -> Finding | None:
    """Run `target` once on `data`; returns what is wrong, or None.

    Without `alarm` an execution that never ends is for others to notice: Atheris has an alarm of
    its own, and there is only one.
    """
    _forget_peak()
    before, peak = time.monotonic(), _peak_mib()
    try:
        with _watched(target.seconds) if alarm else nullcontext():
            target.once(data)
    except Finding as finding:
        finding.where = finding.where or place_of(finding)
        return finding
    except Overtime as late:
        return _sorted_out("hang", f"over {target.seconds:g} s", late)
    except MemoryError as full:
        return _sorted_out("memory", "MemoryError", full)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return _sorted_out("exception", f"{type(error).__name__}: {str(error)[:200]}", error)
    if time.monotonic() - before > target.seconds:
        return Finding("hang", f"over {target.seconds:g} s")
    if _peak_mib() - peak > target.memory_mib:
        return Finding("memory", f"more than {target.memory_mib} MiB in one execution")
    return None


def _sorted_out(oracle: str, text: str, error: BaseException) -> Finding:
    finding = Finding(oracle, text)
    finding.where = place_of(error)
    finding.__cause__ = error
    return finding


def place_of(error: BaseException) -> str:
    """Where an error came from: a line of a target for a finding, else a function of kvsafe."""
    frames = traceback.extract_tb(error.__traceback__)
    asked = [frame for frame in frames if "/fuzz/targets/" in frame.filename]
    ours = [frame for frame in frames if _PACKAGE in frame.filename]
    if ours and not isinstance(error, Finding):
        return f"{ours[-1].filename.rpartition('/')[2]}:{ours[-1].name}"
    if asked:
        return f"{asked[-1].filename.rpartition('/')[2]}:{asked[-1].lineno}"
    return ""


def _peak_mib() -> float:
    """Peak of resident memory since the last `_forget_peak`, in MiB.

    Not `getrusage`: its peak is inherited from the process that started this one (Linux carries it
    over an exec), so a large parent hides every allocation of a small child.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        words = file.read().partition("VmHWM:")[2].split(None, 1)
    return int(words[0]) / 1024


def _forget_peak() -> None:
    """Let the peak begin anew, see proc(5); where that is not allowed it is that of a lifetime."""
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


@contextmanager
def _watched(seconds: float) -> Iterator[None]:
    """Raise `Overtime` in the main thread after `seconds`; elsewhere only the clock is read."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()
    # The clock before the handler: somebody else's alarm must never ring ours. Then again and
    # again, so that code which swallows the first one is still caught.
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    old = signal.signal(signal.SIGALRM, _ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if old is not None:
            signal.signal(signal.SIGALRM, old)
        if left and old is not None:
            # Somebody else's alarm, such as a test runner's, goes on.
            rest = max(0.001, left - (time.monotonic() - began))
            signal.setitimer(signal.ITIMER_REAL, rest, again)


def _ring(number: int, frame: FrameType | None) -> None:
    raise Overtime


def bound_memory() -> None:
    """Bound this process's address space: a runaway allocation fails instead of the machine."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    limit = mapped + (_ROOM_MIB << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

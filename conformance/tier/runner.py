# SPDX-License-Identifier: Apache-2.0
"""Runs cases, each in a process of its own, so that a crash or a hang is only a verdict."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.tier.attacks import ATTACKS
from conformance.tier.bench import Bench, NotRun
from conformance.tier.folder import Case
from conformance.tier.kernel import Doorkeeper, Rule, Unsupported, hand_over, supported
from conformance.tier.subject import Seen, Subject

LIMIT_S = 150.0
NOT_PROMISED = "not promised"
AT_THE_DOOR = ("killed-writer", "stalled-read", "read-error", "full-disk")
"""Attacks that show nothing unless a call has met the fault."""
_LOOK_S = 0.2


@dataclass(frozen=True)
class Result:
    """One case on one tier. `verdict` is what the table shows, `seen` what happened."""

    case: str
    promise: str
    verdict: str
    seen: str
    detail: str
    failed: bool
    seconds: float


def judge(case: Case, seen: Seen, promised: frozenset[str]) -> tuple[str, bool]:
    """The word for the table, and whether the tier has failed the case."""
    if seen is Seen.NOT_RUN or case.fulfilled(seen):
        return seen.value, False
    if case.promise not in promised:
        return NOT_PROMISED, False
    return seen.value, True


def run_all(
    chosen: Iterable[Case],
    driver: type[Subject],
    options: Mapping[str, Any],
    promised: frozenset[str],
    tick: Callable[[Case], None] = lambda case: None,
) -> Iterator[Result]:
    """Run cases one after another."""
    door = supported()
    for case in chosen:
        tick(case)
        start = time.monotonic()
        seen, detail = run_one(case, driver, options, door)
        if seen is Seen.HIT and case.verdict == "miss":
            seen = Seen.SERVED  # the right bytes, where there should have been none
        verdict, failed = judge(case, seen, promised)
        seconds = round(time.monotonic() - start, 1)
        yield Result(case.name, case.promise, verdict, seen.value, detail, failed, seconds)


def run_one(
    case: Case, driver: type[Subject], options: Mapping[str, Any], door: bool
) -> tuple[Seen, str]:
    """Run one case in a child; what was seen, and a word about it."""
    rule = Rule() if door else None
    folder = Path(tempfile.mkdtemp(prefix="kvsafe-trial-"))
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        here.close()
        os.setsid()
        _in_child(case, driver, options, rule, folder, there)
    there.close()
    try:
        seen, detail, acted = _attended(child, here, rule)
    finally:
        here.close()
        shutil.rmtree(folder, ignore_errors=True)
    if case.attack in AT_THE_DOOR and not acted and seen is not Seen.NOT_RUN:
        return Seen.NOT_RUN, "none of its calls met the fault"
    return seen, detail


def _in_child(
    case: Case,
    driver: type[Subject],
    options: Mapping[str, Any],
    rule: Rule | None,
    folder: Path,
    channel: socket.socket,
) -> None:
    """Never returns. The answer goes out before the tier is ended: an end may hang."""
    try:
        if rule is not None:
            hand_over(channel)
        bench = Bench(folder, driver, options, rule)
        seen, detail = _answer(case, bench)
        channel.sendall(f"{seen.name}\n{detail}".encode())
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _answer(case: Case, bench: Bench) -> tuple[Seen, str]:
    try:
        return ATTACKS[case.attack](bench, case.options), ""
    except NotRun as why:
        return Seen.NOT_RUN, str(why)
    except Exception as exc:
        # Out of a tier's method into vLLM's scheduler: the engine would be gone.
        traceback.print_exc()
        return Seen.CRASH, f"{type(exc).__name__}: {exc}"[:200]


def _attended(child: int, channel: socket.socket, rule: Rule | None) -> tuple[Seen, str, int]:
    """Keep the door and the time; the child's answer, or what its silence means, and how many
    calls met the fault."""
    keeper = door = _keeper(channel, rule)
    end = time.monotonic() + LIMIT_S
    text = b""
    try:
        while time.monotonic() < end:
            fds = [channel.fileno(), *([keeper.fd] if keeper is not None else [])]
            ready, _, _ = select.select(fds, [], [], _LOOK_S)
            if channel.fileno() in ready:
                part = channel.recv(4096)
                text += part
                if part:
                    break
                return Seen.CRASH, _end(child), 1
            if keeper is not None and keeper.fd in ready and not keeper.answer():
                keeper.close()
                keeper = None
    finally:
        if keeper is not None:
            keeper.close()
        _kill(child)
    acted = door.acted if door is not None else 0
    if not text:
        return Seen.HANG, f"no answer in {LIMIT_S:.0f} s", acted
    name, _, detail = text.decode(errors="replace").partition("\n")
    return Seen[name], detail, acted


def _keeper(channel: socket.socket, rule: Rule | None) -> Doorkeeper | None:
    if rule is None:
        return None
    try:
        return Doorkeeper(channel, rule)
    except Unsupported:
        return None


def _end(child: int) -> str:
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with code {os.waitstatus_to_exitcode(status)}"


def _kill(child: int) -> None:
    """End the child and whatever it has started: they are a session of their own."""
    try:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        return

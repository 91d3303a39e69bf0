# SPDX-License-Identifier: Apache-2.0
"""Processes on one folder: they store, load, refuse, evict and count at random; some are killed.

    python -m fuzz.campaigns.crowd [--seconds 60] [--writers 4] [--seed 0] [--json]

All share one small capacity, so that every store evicts what another may be reading. Every
loaded chunk carries the name that was asked for or it is a miss; one that a judge refuses
without need is stored anew by somebody. Now and then everybody stands still and the folder
is measured.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzz.campaigns.aftermath import Findings, Known, before_reopening, opened, reopen, used
from fuzz.campaigns.command import Progress, finish, parser
from fuzz.campaigns.rows import ROW, is_content_of, judge_of, name_of, row_of
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.tiers import ChunkStore

NAMES = 40
CAPACITY = 16 * ROW
LEAST_TURNS = 60
_NEEDLESS = Refusal.of(RefusalKind.PAYLOAD_TAG, "payload", "a", "b")


@dataclass
class Member:
    """One process, and the pipe on which it tells what it has seen."""

    pid: int
    pipe: int


def join(root: Path, seed: int) -> Member:
    """Start one process that works until it is told to stop (SIGTERM) or killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            counts = _work(root, seed, lambda: os.write(writing, b"."))
            os.write(writing, json.dumps(counts).encode())
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    os.read(reading, 1)  # from here on it can be told to stop
    return Member(pid, reading)


def _work(root: Path, seed: int, ready: Callable[[], object]) -> dict[str, int]:
    told: list[int] = []
    parent, turns = os.getppid(), 0
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    store, rng = opened(root, CAPACITY), random.Random(seed)
    counts: Counter[str] = Counter()
    ready()
    # Also where the machine is so slow that the time is over before anything was done.
    while (not told or turns < LEAST_TURNS) and os.getppid() == parent:
        turns += 1
        _turn(store, rng.randrange(NAMES), rng.random(), counts)
    store.close()
    return dict(counts)


def _turn(store: ChunkStore, number: int, dice: float, counts: Counter[str]) -> None:
    buffer = memoryview(bytearray(ROW))
    if dice < 0.45:
        outcome = store.put(name_of(number), memoryview(bytearray(row_of(number))))
        counts[f"put {outcome.answer.value}"] += 1
    elif dice < 0.9:
        outcome = store.get(name_of(number), buffer, judge_of(number))
        counts[f"get {outcome.answer.value}"] += 1
        if outcome.good and not is_content_of(number, buffer):
            counts["wrong"] += 1
    elif dice < 0.94:
        outcome = store.get(name_of(number), buffer, lambda row: _NEEDLESS)
        counts["refused without need"] += outcome.quarantined
    elif dice < 0.97:
        counts["seen"] += sum(store.look([name_of(number)]))
    elif dice < 0.98:
        store.discard(name_of(number))
    else:
        store.keeper.want_count()


def _leave(member: Member, number: int) -> dict[str, int] | None:
    """End one process; what it counted, None if it was killed. Raises if it failed."""
    os.kill(member.pid, number)
    with open(member.pipe, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(member.pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    if status:
        return {"failed by itself": 1}
    counts: dict[str, int] = json.loads(text)
    return counts


def _measure(members: list[Member], root: Path, found: Findings) -> None:
    """Stop everybody, measure the folder, let them go on."""
    for member in members:
        os.kill(member.pid, signal.SIGSTOP)
    for member in members:
        os.waitid(os.P_PID, member.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    present = used(root)
    if present > CAPACITY:
        found.account.append(f"{present} bytes of {CAPACITY} while all stand still")
    for member in members:
        os.kill(member.pid, signal.SIGCONT)


def campaign(
    seconds: float,
    writers: int = 4,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
    base: str | None = None,
) -> tuple[Findings, Counter[str]]:
    """Let them work for so long; kill one every so often and start another."""
    found, met, rng = Findings(), Counter[str](), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvsafe-crowd-", dir=base) as name:
        root = Path(name) / "store"
        members = [join(root, seed * 1000 + place) for place in range(writers)]
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                time.sleep(0.05 + 0.1 * rng.random())
                _measure(members, root, found)
                met["measured"] += 1
                if rng.random() < 0.3:
                    gone = members.pop(rng.randrange(len(members)))
                    met["killed"] += _leave(gone, signal.SIGKILL) is None
                    members.append(join(root, rng.randrange(1 << 30)))
                tick()
        finally:
            told = [_leave(member, signal.SIGTERM) for member in members]
        for counts in told:
            met.update(counts or {})
        if met["failed by itself"]:
            found.other.append(f"{met['failed by itself']} members failed by themselves")
        if met["wrong"]:
            found.wrong.append(f"{met['wrong']} loads brought what was not stored")
        if met["get refused"]:
            found.phantom.append(f"{met['get refused']} whole files were refused")
        known = Known(range(NAMES), capacity=CAPACITY, label="after the crowd")
        before_reopening(root, known, found, dead_writers=met["killed"])
        reopen(root, known, found)
    return found, met


def main(argv: list[str]) -> int:
    """The command."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--writers", type=int, default=4)
    args = options.parse_args(argv)
    with Progress("crowd", round(args.seconds * 10), args.json) as progress:
        found, met = campaign(args.seconds, args.writers, args.seed, progress.tick)
    return finish([("crowd", found, met)], args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

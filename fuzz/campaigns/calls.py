# SPDX-License-Identifier: Apache-2.0
"""Each system call of each operation fails, is short, is slow, or never returns.

    python -m fuzz.campaigns.calls [--share 1.0] [--seed 0] [--json]

For every operation of the store, every call that it makes, and every error: the call fails
without, and then after, having done its work. Reads and writes are also cut short, every
call is also delayed, and every call of a transfer also hangs, in the pool with its deadline.
After each fault: values and no exceptions, nothing wrong, a bystander still served, the
account at or above what is there, and a store over the folder that works again.
"""

from __future__ import annotations

import errno
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fuzz.campaigns.aftermath import Findings, Known, opened, reopen, used
from fuzz.campaigns.command import Progress, finish, parser
from fuzz.campaigns.rows import ROW, is_content_of, judge_of, name_of, row_of
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.tiers import LOAD, Answer, ChunkStore, Outcome, Pool, StoreRefused
from tests.tiers.faults import Action, FaultyOs, Stall, failing, failing_after, short, stalled

ERRORS = (
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.EAGAIN, errno.ENOENT,
    errno.EACCES, errno.ESTALE, errno.EMFILE, errno.ENOMEM,
)  # fmt: skip
BYSTANDER = 50
BOTH = (BYSTANDER, 1)
FULL_NUMBERS = range(20, 26)
CAPACITY = 8 * ROW
DEADLINE_S = 5.0
T = TypeVar("T")
DELAY_S = 0.002
WAIT_S = 20.0
_PAUSE_S = 0.001


@dataclass(frozen=True)
class Operation:
    """Something that a store does: how the folder is made ready, and what is then done.

    `kept` are the numbers that must still be there after it, whatever fails.
    """

    name: str
    ready: Callable[[ChunkStore], object]
    act: Callable[[ChunkStore], object]
    kept: tuple[int, ...] = (BYSTANDER,)

    @property
    def keeps(self) -> bool:
        """Whether the bystander stays."""
        return BYSTANDER in self.kept


def put(store: ChunkStore, number: int) -> Outcome:
    """Store one chunk."""
    return store.put(name_of(number), memoryview(bytearray(row_of(number))))


def get(store: ChunkStore, number: int) -> Outcome:
    """Load one chunk; raises `WrongBytes` if what was accepted is not what was stored."""
    buffer = memoryview(bytearray(ROW))
    outcome = store.get(name_of(number), buffer, judge_of(number))
    if outcome.good and not is_content_of(number, buffer):
        raise WrongBytes(f"chunk {number}")
    return outcome


class WrongBytes(Exception):
    """The store has served what was not stored."""


def _refuse(store: ChunkStore) -> Outcome:
    refusal = Refusal.of(RefusalKind.PAYLOAD_TAG, "payload", "a", "b")
    return store.get(name_of(1), memoryview(bytearray(ROW)), lambda row: refusal)


def _spoil(store: ChunkStore) -> None:
    put(store, 1)
    bucket, file = store.folders.place(name_of(1))
    (Path(store.setting.root) / "objects" / bucket / file).chmod(0o644)


def _fill(store: ChunkStore) -> None:
    for number in FULL_NUMBERS:
        put(store, number)


def _tick(store: ChunkStore) -> None:
    store.keeper._stop = False  # the thread has ended; the work is done here
    store.touch([name_of(1)])
    store.keeper.want_count()
    store.keeper.counted.seconds = 0.0
    store.keeper.tick()


def _nothing(store: ChunkStore) -> None:
    return None


def _one(store: ChunkStore) -> None:
    put(store, 1)


OPERATIONS = (
    Operation("put", _nothing, lambda store: put(store, 1)),
    Operation("put what is there", _one, lambda store: put(store, 1), BOTH),
    Operation("put over a flaw", _spoil, lambda store: put(store, 1)),
    Operation("put that evicts", _fill, lambda store: [put(store, n) for n in (1, 2)], ()),
    Operation("get", _one, lambda store: get(store, 1), BOTH),
    Operation("get what is not there", _nothing, lambda store: get(store, 1)),
    Operation("get a flaw", _spoil, lambda store: get(store, 1)),
    Operation("get and refuse", _one, _refuse),
    Operation("look", _one, lambda store: store.look([name_of(1), name_of(2)]), BOTH),
    Operation("look at a flaw", _spoil, lambda store: store.look([name_of(1)])),
    Operation("discard", _one, lambda store: store.discard(name_of(1))),
    Operation("housekeeping", _one, _tick, BOTH),
    Operation("close", _one, lambda store: store.close(), BOTH),
)
TRANSFERS = tuple(one for one in OPERATIONS if one.name.startswith(("put", "get", "look")))


@dataclass(frozen=True)
class Fault:
    """One call of one operation, and what happens to it."""

    operation: Operation
    call: str
    at: int
    what: str
    action: Action

    @property
    def label(self) -> str:
        """For sentences."""
        return f"{self.operation.name}: {self.call} no. {self.at}: {self.what}"


def delayed(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """The call takes its time."""
    time.sleep(DELAY_S)
    return function(*args, **kwargs)


def actions(call: str) -> Iterator[tuple[str, Action]]:
    """Everything that can happen to a call, but for never returning."""
    for code in ERRORS:
        name = errno.errorcode[code]
        yield f"{name} before", failing(code)
        yield f"{name} after", failing_after(code)
    if call in ("read", "write"):
        yield from (("no bytes", short(0)), ("one byte", short(1)), ("half", short(ROW // 2 + 7)))
    yield "slow", delayed


class Bench:
    """A store over a new folder, made ready for one operation, with a fault layer."""

    def __init__(self, folder: Path, operation: Operation) -> None:
        self.root = folder / "store"
        self.operation = operation
        self.calls = FaultyOs()
        self.store = opened(self.root, CAPACITY, self.calls, sync="full", lock_wait_s=0.2)
        put(self.store, BYSTANDER)
        operation.ready(self.store)
        self.store.keeper.stop(WAIT_S)
        self.store.room.return_unspent()
        self.calls.log.clear()

    def judge(
        self, label: str, found: Findings, *, closed: bool = False, cut: bool = False
    ) -> None:
        """After the fault: this store serves, and so does one that is opened anew.

        `cut`: a read has said that the file ends early, so it may go.
        """
        kept = tuple(number for number in self.operation.kept if not cut or number == BYSTANDER)
        self.calls.calm()
        if not closed:
            self._judge_open(label, found)
            self.store.close()
        begun = [1, 2, BYSTANDER, *FULL_NUMBERS]
        reopen(self.root, Known(begun, kept, capacity=CAPACITY, label=label), found)
        shutil.rmtree(self.root)

    def _judge_open(self, label: str, found: Findings) -> None:
        if self.operation.keeps and not get(self.store, BYSTANDER).good:
            found.lost.append(f"{label}: the bystander")
        account, present = self.store.room.account(), used(self.root)
        if account.known and account.charged < present:
            found.account.append(f"{label}: charged {account.charged}, there {present}")
        outcome = put(self.store, 2)
        if not outcome.good and outcome.answer is not Answer.NO_ROOM:
            found.other.append(f"{label}: the next store: {outcome}")


def faults() -> list[Fault]:
    """Every fault there is, learnt from a run without one."""
    every = []
    for operation in OPERATIONS:
        for call, at in calls_of(operation):
            every += [Fault(operation, call, at, *one) for one in actions(call)]
    return every


def calls_of(operation: Operation) -> list[tuple[str, int]]:
    """The calls of an operation, each with its number among those of its kind."""
    with tempfile.TemporaryDirectory(prefix="kvsafe-calls-") as name:
        bench = Bench(Path(name), operation)
        operation.act(bench.store)
        made = list(bench.calls.log)
        if operation.name != "close":
            bench.store.close()
    seen: Counter[str] = Counter()
    numbered = []
    for call in made:
        seen[call] += 1
        numbered.append((call, seen[call]))
    return numbered


def run(fault: Fault, folder: Path, found: Findings) -> bool:
    """Make one fault and judge; whether the call was met."""
    bench = Bench(folder, fault.operation)
    plan = bench.calls.plan(fault.call, fault.action, fault.at, 1)
    try:
        fault.operation.act(bench.store)
    except WrongBytes as wrong:
        found.wrong.append(f"{fault.label}: {wrong}")
    except Exception as exc:  # the point of the campaign: there must be none
        found.other.append(f"{fault.label}: raised {type(exc).__name__}: {exc}")
    cut = fault.call == "read" and fault.what == "no bytes"
    bench.judge(fault.label, found, closed=fault.operation.name == "close", cut=cut)
    return plan.hits > 0


def run_start(
    call: str, at: int, action: tuple[str, Action], folder: Path, found: Findings
) -> bool:
    """The same while a store opens: it opens or says why not, and then it can be opened."""
    root, calls, label = folder / "store", FaultyOs(), f"start: {call} no. {at}: {action[0]}"
    calls.only_threads = ("MainThread",)
    plan = calls.plan(call, action[1], at, 1)
    with suppress(StoreRefused, TimeoutError):
        try:
            opened(root, CAPACITY, calls).close()
        except (StoreRefused, TimeoutError):
            raise
        except Exception as exc:
            found.other.append(f"{label}: raised {type(exc).__name__}: {exc}")
    with suppress(FileNotFoundError):
        reopen(root, Known((), capacity=CAPACITY, label=label), found)
        shutil.rmtree(root)
    return plan.hits > 0


def starts() -> list[tuple[str, int, tuple[str, Action]]]:
    """Every fault while a store opens."""
    calls = FaultyOs()
    calls.only_threads = ("MainThread",)
    with tempfile.TemporaryDirectory(prefix="kvsafe-calls-") as name:
        opened(Path(name) / "store", CAPACITY, calls).close()
    seen: Counter[str] = Counter()
    every = []
    for call in calls.log:
        seen[call] += 1
        every += [(call, seen[call], action) for action in actions(call)]
    return every


def run_stuck(operation: Operation, call: str, at: int, folder: Path, found: Findings) -> bool:
    """A call that never returns, in the pool: late, others served, nothing lands afterwards."""
    label = f"{operation.name}: {call} no. {at}: stuck"
    bench, stall = Bench(folder, operation), Stall()
    pool = Pool([(LOAD,)], DEADLINE_S, 1, bench.calls.clock)
    bench.calls.only_threads = ("kvsafe-fs",)
    plan = bench.calls.plan(call, stalled(stall), at, 1)
    pool.submit(LOAD, "stuck", lambda ticket: operation.act(bench.store))
    try:
        if not stall.entered.wait(WAIT_S):
            found.other.append(f"{label}: never called")
        bench.calls.clock_skew_s += DEADLINE_S + 1
        _expect_late(pool, label, found)
        pool.submit(LOAD, "next", lambda ticket: get(bench.store, BYSTANDER))
        _expect_next(pool, operation, label, found)
    finally:
        stall.let_go.set()
        pool.stop(WAIT_S)
    bench.judge(label, found)
    return plan.hits > 0


def _answer(pool: Pool) -> object:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        for _, result in pool.poll():
            return result
        time.sleep(_PAUSE_S)
    return None


def _expect_late(pool: Pool, label: str, found: Findings) -> None:
    result = _answer(pool)
    if not (isinstance(result, Outcome) and result.answer is Answer.LATE):
        found.other.append(f"{label}: not late but {result}")


def _expect_next(pool: Pool, operation: Operation, label: str, found: Findings) -> None:
    result = _answer(pool)
    if operation.keeps and not (isinstance(result, Outcome) and result.good):
        found.other.append(f"{label}: the one behind it: {result}")


def campaign(
    share: float = 1.0,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
    base: str | None = None,
    parts: Collection[str] = ("calls", "starts", "stuck"),
) -> tuple[Findings, Counter[str]]:
    """Make a share of all faults, chosen by the seed."""
    found, met, rng = Findings(), Counter[str](), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvsafe-calls-", dir=base) as name:
        folder = Path(name)
        for fault in _some(faults(), share, rng) if "calls" in parts else ():
            met["faults"] += run(fault, folder, found)
            tick()
        for call, at, action in _some(starts(), share, rng) if "starts" in parts else ():
            met["faults at start"] += run_start(call, at, action, folder, found)
            tick()
        stuck = [(one, *place) for one in TRANSFERS for place in calls_of(one)]
        for operation, call, at in _some(stuck, share, rng) if "stuck" in parts else ():
            met["stuck calls"] += run_stuck(operation, call, at, folder, found)
            tick()
    return found, met


def _some(every: list[T], share: float, rng: random.Random) -> list[T]:
    return every if share >= 1 else rng.sample(every, max(1, round(share * len(every))))


def main(argv: list[str]) -> int:
    """The command."""
    options = parser(__doc__)
    options.add_argument("--share", type=float, default=1.0, help="part of all faults, 0 to 1")
    args = options.parse_args(argv)
    total = round(args.share * (len(faults()) + len(starts())))
    with Progress("calls", total, args.json) as progress:
        found, met = campaign(args.share, args.seed, progress.tick)
    return finish([("calls", found, met)], args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

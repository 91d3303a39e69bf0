# SPDX-License-Identifier: Apache-2.0
"""Threads for calls that may never return.

Every piece of work has a deadline. A piece that waits too long in the queue is answered
"late" without running; a thread that is in a call for too long is abandoned: its work is
answered "late", another thread takes its place (as often as the limit allows), and what the
call brings, if it ever returns, goes nowhere. Work that is about to touch memory of somebody
else asks `Ticket.claim()` first: after that it is not abandoned, and before that it may not
touch anything. Deadlines are looked at by `poll`, so they need no thread of their own.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvsafe.tiers.order import Order
from kvsafe.tiers.outcome import LATE, Answer, Outcome

Lane = int
LOOK: Lane = 0
LOAD: Lane = 1
STORE: Lane = 2
_LOOK_S = 0.05


class Ticket(Order):
    """One piece of work on its way. States: waiting, running, claimed, over."""

    __slots__ = ("_clock", "_lock", "_state", "due", "started", "tag", "work")

    def __init__(
        self,
        tag: Hashable,
        work: Callable[["Ticket"], object],
        due: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__()
        self._clock = clock
        self.tag = tag
        self.work = work
        self.due = due
        self.started = 0.0
        self._state = "waiting"
        self._lock = threading.Lock()

    def begin(self, now: float) -> bool:
        """Start running, unless it has been answered already."""
        return self._move(("waiting",), "running") and self._start(now)

    def _start(self, now: float) -> bool:
        self.started = now
        return True

    def claim(self) -> bool:
        """Whether the result is still wanted; if so it will be waited for from now on."""
        return self._move(("running", "claimed"), "claimed")

    def more(self) -> bool:
        """Begin the next part of the work, with a deadline of its own. False if abandoned."""
        self.started = self._clock()
        return self._move(("running", "claimed"), "running")

    @property
    def wanted(self) -> bool:
        """Whether nobody has answered for this work yet."""
        return self._state in ("running", "claimed")

    def abandon(self) -> bool:
        """Answer without the work. False if it is claimed or over."""
        if not self._move(("waiting", "running"), "over"):
            return False
        self.withdraw()
        return True

    def finish(self) -> bool:
        """The work has returned. False if it was abandoned meanwhile."""
        return self._move(("running", "claimed"), "over")

    def _move(self, sources: tuple[str, ...], target: str) -> bool:
        with self._lock:
            if self._state not in sources:
                return False
            self._state = target
            return True


@dataclass(slots=True, eq=False)
class _Worker:
    lanes: tuple[Lane, ...]
    thread: threading.Thread | None = None
    ticket: Ticket | None = None
    replaced: bool = False


@dataclass(slots=True)
class PoolCounts:
    """What the pool has seen, for metrics."""

    late_waiting: int = 0
    late_running: int = 0
    returned: int = 0
    stuck: int = 0


class Pool:
    """Worker threads with deadlines.

    Args:
        teams: the lanes that each worker serves, first choice first.
        deadline_s: longest wait in the queue, and longest run, of one piece of work.
        stuck_limit: how many abandoned threads may exist beside the workers.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        teams: list[tuple[Lane, ...]],
        deadline_s: float,
        stuck_limit: int,
        clock: Callable[[], float],
        name: str = "kvsafe-fs",
    ) -> None:
        self._deadline_s = deadline_s
        self._stuck_limit = stuck_limit
        self._clock = clock
        self._name = name
        self._lock = threading.Lock()
        # One per kind of team: whoever is woken must be able to do the work.
        self._ready = {frozenset(team): threading.Condition(self._lock) for team in teams}
        self._queues: tuple[deque[Ticket], ...] = (deque(), deque(), deque())
        self._done: queue.SimpleQueue[tuple[Hashable, object]] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._stuck: list[_Worker] = []
        self._stop = False
        self._look_again = float("-inf")
        self.counts = PoolCounts()
        with self._lock:
            for lanes in teams:
                self._hire(lanes)

    def _hire(self, lanes: tuple[Lane, ...]) -> None:
        worker = _Worker(lanes)
        worker.thread = threading.Thread(
            target=self._run, args=(worker,), name=self._name, daemon=True
        )
        self._workers.append(worker)
        worker.thread.start()

    def submit(self, lane: Lane, tag: Hashable, work: Callable[[Ticket], object]) -> None:
        """Queue work; its result, or an `Outcome` LATE, comes out of `poll` with its tag."""
        self.submit_all(lane, [(tag, work)])

    def submit_all(
        self, lane: Lane, pieces: list[tuple[Hashable, Callable[[Ticket], object]]]
    ) -> None:
        """Queue several pieces of work at once."""
        due = self._clock() + self._deadline_s
        with self._lock:
            self._queues[lane].extend(Ticket(tag, work, due, self._clock) for tag, work in pieces)
            for lanes, ready in self._ready.items():
                if lane in lanes:
                    ready.notify(len(pieces))

    def poll(self) -> list[tuple[Hashable, object]]:
        """What has been answered since the last call. Never waits."""
        self.expire()
        answered = []
        while True:
            try:
                answered.append(self._done.get_nowait())
            except queue.Empty:
                return answered

    def expire(self) -> None:
        """Answer for everything that is over its deadline (looked at now and then only)."""
        now = self._clock()
        if now < self._look_again:
            return
        self._look_again = now + min(_LOOK_S, self._deadline_s / 20)
        with self._lock:
            for line in self._queues:
                while line and line[0].due < now:
                    self._late(line.popleft())
                    self.counts.late_waiting += 1
            for worker in list(self._workers):
                ticket = worker.ticket
                if ticket is not None and ticket.started + self._deadline_s < now:
                    self._give_up(worker, ticket)

    def _give_up(self, worker: _Worker, ticket: Ticket) -> None:
        if not self._late(ticket):
            return
        self.counts.late_running += 1
        self._workers.remove(worker)
        self._stuck.append(worker)
        self.counts.stuck = len(self._stuck)
        if len(self._stuck) <= self._stuck_limit and not self._stop:
            worker.replaced = True
            self._hire(worker.lanes)

    def _late(self, ticket: Ticket) -> bool:
        if not ticket.abandon():
            return False
        self._done.put((ticket.tag, LATE))
        return True

    def _run(self, worker: _Worker) -> None:
        while True:
            ticket = self._next(worker)
            if ticket is None:
                return
            result = self._result(ticket)
            if ticket.finish():
                worker.ticket = None
                self._done.put((ticket.tag, result))
            elif not self._return(worker):
                return

    def _result(self, ticket: Ticket) -> object:
        try:
            return ticket.work(ticket)
        except Exception as exc:  # our own fault, but a job must end all the same
            return Outcome(Answer.UNREACHABLE, f"{type(exc).__name__}: {exc}"[:200])

    def _next(self, worker: _Worker) -> Ticket | None:
        with self._lock:
            while not self._stop:
                for lane in worker.lanes:
                    while self._queues[lane]:
                        ticket = self._queues[lane].popleft()
                        if ticket.begin(self._clock()):
                            worker.ticket = ticket
                            return ticket
                self._ready[frozenset(worker.lanes)].wait()
            return None

    def _return(self, worker: _Worker) -> bool:
        """An abandoned thread is back. It works on if nobody took its place."""
        with self._lock:
            worker.ticket = None
            if worker in self._stuck:
                self._stuck.remove(worker)
            self.counts.returned += 1
            self.counts.stuck = len(self._stuck)
            if self._stop or (worker.replaced and not self._stands_in(worker)):
                return False
            self._workers.append(worker)
            return True

    def _stands_in(self, worker: _Worker) -> bool:
        """Whether a thread whose own place is taken gets that of one who is stuck unreplaced.

        Else nobody might serve a lane any more whose last threads were stuck beyond the limit.
        """
        left = next((one for one in self._stuck if not one.replaced), None)
        if left is None:
            return False
        left.replaced, worker.replaced, worker.lanes = True, False, left.lanes
        return True

    def stop(self, timeout_s: float) -> bool:
        """End the threads; queued work is answered late. False if a call is still stuck."""
        deadline = self._clock() + timeout_s
        with self._lock:
            self._stop = True
            for line in self._queues:
                while line:
                    self._late(line.popleft())
            for ready in self._ready.values():
                ready.notify_all()
            threads = [worker.thread for worker in (*self._workers, *self._stuck)]
        for thread in threads:
            if thread is not None:
                thread.join(max(0.0, deadline - self._clock()))
        if not any(thread is not None and thread.is_alive() for thread in threads):
            return True
        with self._lock:
            # What comes back after this finds that nobody wants it.
            for worker in self._workers:
                if worker.ticket is not None:
                    self._late(worker.ticket)
        return False

# SPDX-License-Identifier: Apache-2.0
"""The one checked entry point: plans in, outcomes out, conflicting rows one after another."""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvsafe.device.geometry import Geometry
from kvsafe.device.order import CopyTask, TaskOrder
from kvsafe.device.plan import CopyPlan, PlanError, PlanFault, RowPlan, RowWindow, check_plan
from kvsafe.device.work import CopyEngine, CopyFault, CopyOutcome, SourceNotLoaded

SHUTDOWN_TIMEOUT_S = 30.0


class CopierError(RuntimeError):
    """The copier was misused: submitted to after shutdown, or a job id that is in use."""


@dataclass(slots=True)
class _Job:
    plan: CopyPlan
    started: float
    left: int
    bytes: int = 0
    failures: list[tuple[RowPlan, object]] = field(default_factory=list)


class Copier:
    """Checks plans, splits them into rows, keeps their order and collects the outcomes.

    Thread safe.  Tasks on the same row or the same device block run in submission order, never
    two at a time.  A store from a block whose load failed before that was reported is refused.
    """

    def __init__(self, geometry: Geometry, window: RowWindow, engine: CopyEngine) -> None:
        """Raises GeometryError when tensors or rows cannot be used."""
        geometry.check()
        window.check(geometry)
        self._geometry = geometry
        self._window = window
        self._engine = engine
        self._order = TaskOrder(geometry)
        self._jobs: dict[int, _Job] = {}
        self._outcomes: list[CopyOutcome] = []
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, plan: CopyPlan) -> None:
        """Take a job; its end, whatever it is, comes out of `poll`.

        A plan that fails its check becomes a failed outcome.  Raises CopierError on misuse only.
        """
        started = time.monotonic()
        with self._changed:
            self._expect_free(plan.job)
            self._jobs[plan.job] = _Job(plan, started, len(plan.rows))
        try:
            check_plan(plan, self._geometry, self._window)
        except PlanError as error:
            self._refuse(plan, error.fault, error.fault)
        except Exception as error:
            self._refuse(plan, CopyFault("check", type(error).__name__))
        else:
            self._begin(plan)

    def _expect_free(self, job: int) -> None:
        if self._closed:
            raise CopierError("the copier has been shut down")
        if job in self._jobs:
            raise CopierError(f"job {job} is already running")

    def _begin(self, plan: CopyPlan) -> None:
        try:
            ticket = self._engine.admit(plan.direction)
        except Exception as error:
            self._refuse(plan, CopyFault("admit", type(error).__name__))
            return
        tasks = [CopyTask(plan.job, plan.direction, row, ticket) for row in plan.rows]
        with self._changed:
            ready = [task for task in tasks if self._order.add(task)]
        self._launch(ready)

    def _refuse(self, plan: CopyPlan, value: object, fault: PlanFault | None = None) -> None:
        """End a job of which nothing was started."""
        with self._changed:
            job = self._jobs.pop(plan.job)
            job.failures.extend((row, value) for row in plan.rows)
            self._report(job, fault)

    def _report(self, job: _Job, fault: PlanFault | None = None) -> None:
        ok = not job.failures and fault is None
        seconds = time.monotonic() - job.started
        plan = job.plan
        self._outcomes.append(
            CopyOutcome(
                plan.job, plan.direction, ok, job.bytes, seconds, tuple(job.failures), fault
            )
        )
        self._changed.notify_all()

    def _launch(self, ready: list[CopyTask]) -> None:
        """Start tasks whose turn has come; those that must not run end here and free others."""
        while ready:
            go, held = self._sift(ready)
            ready = []
            if go:
                ready += self._start(go)
            for task, value in held:
                ready += self._finish(task, value, 0)

    def _sift(
        self, ready: Iterable[CopyTask]
    ) -> tuple[list[CopyTask], list[tuple[CopyTask, object]]]:
        go: list[CopyTask] = []
        held: list[tuple[CopyTask, object]] = []
        with self._changed:
            for task in ready:
                value = self._hindrance(task)
                if value is None:
                    go.append(task)
                else:
                    held.append((task, value))
        return go, held

    def _hindrance(self, task: CopyTask) -> object | None:
        if self._closed:
            return CopyFault("start", "Shutdown")
        block = self._order.unloaded_source(task)
        return None if block is None else SourceNotLoaded(block)

    def _start(self, tasks: Sequence[CopyTask]) -> list[CopyTask]:
        try:
            self._engine.start(tasks, self._done)
        except Exception as error:
            fault = CopyFault("start", type(error).__name__)
            return [freed for task in tasks for freed in self._finish(task, fault, 0)]
        return []

    def _done(self, task: CopyTask, failure: object | None, moved: int) -> None:
        self._launch(self._finish(task, failure, moved))

    def _finish(self, task: CopyTask, failure: object | None, moved: int) -> list[CopyTask]:
        with self._changed:
            if task.over:
                return []
            task.over = True
            self._account(task, failure, moved)
            return self._order.finish(task, failure is not None)

    def _account(self, task: CopyTask, failure: object | None, moved: int) -> None:
        job = self._jobs[task.job]
        job.left -= 1
        if failure is None:
            job.bytes += moved
        else:
            job.failures.append((task.row, failure))
        if job.left == 0:
            del self._jobs[task.job]
            self._report(job)

    def poll(self) -> list[CopyOutcome]:
        """Outcomes of the jobs that ended since the last call; never blocks on a copy."""
        self._engine.advance()
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
            self._order.reported(outcome.job for outcome in outcomes)
        return outcomes

    def wait(self, jobs: set[int], timeout_s: float) -> bool:
        """Wait until none of these jobs runs; unknown ids do not.  False at the deadline."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._engine.advance()
            with self._changed:
                if self._jobs.keys().isdisjoint(jobs):
                    return True
                left = deadline - time.monotonic()
                if not left > 0:
                    return False
                self._changed.wait(min(left, self._engine.tick_s))

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> bool:
        """Take no more jobs, let running rows end, fail the rest; their outcomes stay pollable.

        Returns False when something still ran at the deadline: then the memory of rows and
        tensors must not be given back.
        """
        with self._changed:
            self._closed = True
        return self._engine.close(timeout_s)

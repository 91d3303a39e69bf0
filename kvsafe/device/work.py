# SPDX-License-Identifier: Apache-2.0
"""What the copier, the engines and the proofs say to one another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvsafe.device.order import CopyTask
from kvsafe.device.plan import Direction, PlanFault, RowPlan


class SliceProof(Protocol):
    """What proves a slice.  Every method is called in host threads, several at a time.

    None means proven; anything else is a refusal value, handed on unread as the row's failure.
    """

    def before_load(self, row: RowPlan) -> object | None:
        """Called before a byte of the row is copied to the device."""

    def fence(self, row: RowPlan) -> object | None:
        """Called just before the copy of a store: does the row still belong to this job?"""

    def after_store(self, row: RowPlan) -> object | None:
        """Called when the slice's bytes, zeroed gaps included, are final in host memory."""


@dataclass(frozen=True, slots=True)
class CopyFault:
    """A step of a row that raised or could not run; the message is left out on purpose."""

    step: str
    error: str


@dataclass(frozen=True, slots=True)
class SourceNotLoaded:
    """A store was refused: the load into `block` had failed and was not yet reported."""

    block: int


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """One finished job.

    bytes: copied for rows that did not fail.  seconds: from submit to the last row's end.
    failures: (row plan, refusal of the proof | CopyFault | SourceNotLoaded | PlanFault).
    plan_fault: why the plan was refused as a whole; then nothing was copied.
    """

    job: int
    direction: Direction
    ok: bool
    bytes: int
    seconds: float
    failures: tuple[tuple[RowPlan, object], ...]
    plan_fault: PlanFault | None = None


TaskDone = Callable[[CopyTask, object | None, int], None]
"""(task, failure or None, bytes copied); called once per task, from any thread."""


class CopyEngine(Protocol):
    """Carries out tasks that the copier has checked and ordered."""

    @property
    def tick_s(self) -> float:
        """How long a waiter may sleep between two calls of `advance`."""

    def admit(self, direction: Direction) -> object:
        """Called in the submitting thread; what it returns is the ticket of the job's tasks."""

    def start(self, tasks: Sequence[CopyTask], done: TaskDone) -> None:
        """Begin tasks; returns without waiting for them."""

    def advance(self) -> None:
        """Notice what the device has finished; never blocks."""

    def close(self, timeout_s: float) -> bool:
        """Finish what runs, drop what waits; False if something still ran at the deadline."""


def ask(step: str, action: Callable[[RowPlan], object | None], row: RowPlan) -> object | None:
    """The action's answer; whatever it raises becomes a CopyFault."""
    try:
        return action(row)
    except BaseException as error:  # a thread that dies here would hang its job
        return CopyFault(step, type(error).__name__)


Step = tuple[str, Callable[[RowPlan], object | None]]


def first_refusal(steps: Sequence[Step], row: RowPlan) -> object | None:
    """Run named steps in order up to the first that does not answer None."""
    for step, action in steps:
        refusal = ask(step, action, row)
        if refusal is not None:
            return refusal
    return None

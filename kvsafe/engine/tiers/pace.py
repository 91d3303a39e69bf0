# SPDX-License-Identifier: Apache-2.0
"""How much of the scheduler's time a tier takes: one that takes too much is left alone for a while.

vLLM calls its tiers in the scheduler's thread, and a call cannot be ended from outside. What can
be bounded is how often that happens: once a tier has taken more than `SLOW_S` in one step, its
lookups are misses, its stores fail and little else is asked of it for twenty times as long as
it took. A call that never returns cannot be survived here (spec/decisions/0011); the overseer's
thread says which tier and which call it is.
"""

import threading
import time
import weakref
from collections.abc import Callable

from kvsafe.engine.journal import logger

SLOW_S = 5.0
"""What the calls of one tier may take in one step."""
LAST_CALL = "on_schedule_end"
"""Comes once per step, after all others."""
REST_FACTOR = 20
LONGEST_REST_S = 600.0
STUCK_S = 30.0
"""After so long a call that has not returned is told to the operator."""
_LOOK_S = 5.0


class Pace:
    """The time that the calls of one tier take. One thread (the scheduler's), but for `stuck`."""

    def __init__(self, label: str, slow: Callable[[str, str], None]) -> None:
        """`slow` is told the call that went over the limit, and what that means, in words."""
        self.label = label
        self.slow_s = SLOW_S
        self._slow = slow
        self._spent = 0.0
        self._resting_until = 0.0
        self._inside: tuple[str, float] | None = None
        OVERSEER.watch(self)

    @property
    def resting(self) -> bool:
        """Whether the tier is left alone now."""
        return self._resting_until > 0.0 and self._still_resting()

    def _still_resting(self) -> bool:
        if time.monotonic() < self._resting_until:
            return True
        self._resting_until = 0.0
        logger.info("kvsafe: tier %s is used again", self.label)
        return False

    def enter(self, call: str) -> None:
        """A call begins."""
        self._inside = call, time.monotonic()

    def leave(self) -> None:
        """It has returned, or raised."""
        if self._inside is None:
            return
        call, began = self._inside
        self._inside = None
        self._spent += time.monotonic() - began
        if self._spent > self.slow_s:
            self._rest(call)
        elif call == LAST_CALL:
            self._spent = 0.0

    def _rest(self, call: str) -> None:
        seconds = min(LONGEST_REST_S, REST_FACTOR * self._spent)
        self._slow(call, f"held the scheduler up for {self._spent:.1f} s in one step")
        logger.error("kvsafe: tier %s is left alone for %.0f s", self.label, seconds)
        self._resting_until = time.monotonic() + seconds
        self._spent = 0.0

    def stuck(self) -> tuple[str, float] | None:
        """The call that is under way, and for how many seconds, if it is too long. Any thread."""
        inside = self._inside
        if inside is None:
            return None
        call, began = inside
        seconds = time.monotonic() - began
        return (call, seconds) if seconds > STUCK_S else None


class Overseer:
    """A thread that tells of calls which do not return: the scheduler's thread cannot."""

    def __init__(self, look_s: float = _LOOK_S) -> None:
        self._look_s = look_s
        self._paces: list[weakref.ref[Pace]] = []
        self._thread: threading.Thread | None = None
        self._told: tuple[str, str] | None = None

    def watch(self, pace: Pace) -> None:
        """Look at this one too, until it is gone."""
        self._paces.append(weakref.ref(pace))
        # A forked child has the object and not the thread.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="kvsafe-overseer", daemon=True)
            self._thread.start()

    def look(self) -> None:
        """Tell of what is stuck, once."""
        found = None
        for ref in list(self._paces):
            pace = ref()
            if pace is None:
                self._paces.remove(ref)
            elif (stuck := pace.stuck()) is not None:
                found = pace.label, *stuck
        if found is None:
            self._told = None
        elif self._told != found[:2]:
            self._told = found[:2]
            self._tell(*found)

    def _tell(self, label: str, call: str, seconds: float) -> None:
        logger.critical(
            "kvsafe: tier %s: %s has not returned for %.0f s; the engine serves nothing until it "
            "does: restart without this tier",
            label,
            call,
            seconds,
        )

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._look_s):
            self.look()


OVERSEER = Overseer()

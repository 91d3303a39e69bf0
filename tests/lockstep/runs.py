# SPDX-License-Identifier: Apache-2.0
"""How a world is driven: by Hypothesis, which makes a difference small, and by plain dice, which
get further in the same time. In the tests both are short and always the same.

`KVSAFE_LONG=N` multiplies the runs by N and takes new random ones each time; what was done is
written to standard output (`-s` shows it).
"""

from __future__ import annotations

import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

T = TypeVar("T")
LONG = int(os.environ.get("KVSAFE_LONG", "0"))
# Generous for one run on a slow machine under load; nothing relies on it.
TIMEOUT_S = 180 + 7200 * bool(LONG)


class Dice(ABC):
    """Where a world's choices come from."""

    @abstractmethod
    def number(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""

    def pick(self, some: Sequence[T]) -> T:
        """One of `some`."""
        return some[self.number(0, len(some) - 1)]

    def rarely(self, times: int) -> bool:
        """True about once in so many times."""
        return self.number(1, times) == times

    def few(self, some: Sequence[T], most: int) -> list[T]:
        """Between one and `most` of them, each once, in any order."""
        left, found = list(some), []
        for _ in range(self.number(1, min(most, len(left)))):
            found.append(left.pop(self.number(0, len(left) - 1)))
        return found


class PlainDice(Dice):
    """Choices from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        """A number from `low` to `high`."""
        return self._random.randint(low, high)


class DrawnDice(Dice):
    """Choices by Hypothesis."""

    def __init__(self, data: Any) -> None:
        self._draw = data.draw

    def number(self, low: int, high: int) -> int:
        """A number from `low` to `high`."""
        return int(self._draw(st.integers(low, high)))


class Drive(ABC):
    """A world that goes on by moves, each a method that takes dice; `weights` has their names."""

    weights: ClassVar[dict[str, int]]

    @abstractmethod
    def look(self) -> None:
        """Raises `AssertionError` at the first difference."""

    def close(self) -> None:  # noqa: B027 - most worlds hold nothing
        """Let go of threads and files."""

    def move(self, name: str, dice: Dice) -> None:
        """One move, and a look."""
        getattr(self, name)(dice)
        self.look()

    def go(self, dice: Dice, moves: int) -> None:
        """So many moves."""
        names = [name for name, weight in self.weights.items() for _ in range(weight)]
        for _ in range(moves):
            self.move(dice.pick(names), dice)


Make = Callable[[Dice], Drive]


def machine_of(make: Make, weights: dict[str, int]) -> type[RuleBasedStateMachine]:
    """A Hypothesis machine whose rules are the moves of a world."""

    class Machine(RuleBasedStateMachine):
        drive: Drive | None = None
        begun = 0

        def _go(self, name: str, data: Any) -> None:
            if self.drive is None:
                Machine.begun += 1
                self.drive = make(DrawnDice(data))
            self.drive.move(name, DrawnDice(data))

        def teardown(self) -> None:
            if self.drive is not None:
                self.drive.close()

    for name in weights:
        setattr(Machine, name, rule(data=st.data())(_rule(name)))
    return Machine


def _rule(name: str) -> Callable[[Any, Any], None]:
    def move(self: Any, data: Any) -> None:
        self._go(name, data)

    move.__name__ = name
    return move


def hold(make: Make, weights: dict[str, int], runs: int, moves: int = 60) -> None:
    """Drive many worlds, by dice and by Hypothesis; raises the first difference."""
    began, times = time.monotonic(), max(1, LONG)
    first = random.SystemRandom().getrandbits(48) if LONG else 0
    for seed in range(first, first + runs * times):
        difference = _driven(make, seed, moves)
        if difference is not None:
            raise AssertionError(f"seed {seed}: {difference}") from difference
    chosen = _settings(max(10, runs // 10) * times, 40, bool(LONG))
    machine = machine_of(make, weights)
    run_state_machine_as_test(machine, settings=chosen)
    took = time.monotonic() - began
    print(f" {runs * times} runs of {moves} moves by dice from seed {first}, ", end="")
    print(f"{machine.begun} by Hypothesis, {took:.0f} s ", end="")  # type: ignore[attr-defined]


def goes_red(make: Make, runs: int, moves: int = 60, first: int = 0) -> str:
    """The words of the first difference that dice find; empty if they find none.

    `first` is the seed to begin with: one that is known to find it saves the runs before it.
    """
    for seed in range(first, first + runs):
        difference = _driven(make, seed, moves)
        if difference is not None:
            return f"seed {seed}: {type(difference).__name__}: {difference}"
    return ""


def _driven(make: Make, seed: int, moves: int) -> Exception | None:
    dice = PlainDice(seed)
    drive = make(dice)
    try:
        drive.go(dice, moves)
    except Exception as difference:
        return difference
    finally:
        drive.close()
    return None


def _settings(runs: int, steps: int, random: bool) -> settings:
    return settings(
        max_examples=runs,
        stateful_step_count=steps,
        derandomize=not random,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )

# SPDX-License-Identifier: Apache-2.0
"""What KV bytes stand for: one number per token and group, derived from all tokens before it.

Real KV at a position depends on every token up to it, on the group's layers and on the weights;
so does the number here. Two requests with the same prefix have the same numbers, and nothing
else has.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

VOCABULARY = 50
_MASK = (1 << 64) - 1

Numbers = npt.NDArray[np.int64]


def mix(value: int) -> int:
    """A well mixed 64-bit number (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Script:
    """All tokens of a request: its prompt, and what greedy decoding makes of it."""

    def __init__(self, prompt: list[int], length: int) -> None:
        self.tokens = list(prompt)
        self._chain: list[int] = []
        state = 0
        for position in range(length):
            if position == len(self.tokens):
                self.tokens.append(mix(state ^ 0x5EED) % VOCABULARY)
            state = mix(state ^ (self.tokens[position] + 1))
            self._chain.append(state)
        self._numbers: dict[tuple[int, int], Numbers] = {}

    def numbers(self, group: int, weights: int) -> Numbers:
        """int64, shape (length,): what each position of this group must hold."""
        found = self._numbers.get((group, weights))
        if found is None:
            salt = mix(group * 1000 + weights + 1)
            values = [mix(state ^ salt) >> 1 for state in self._chain]
            found = self._numbers[group, weights] = np.array(values, dtype=np.int64)
        return found


@cache
def family(number: int, length: int = 512) -> tuple[int, ...]:
    """The tokens that all prompts of one family begin with."""
    return tuple(mix(number * 7919 + index) % VOCABULARY for index in range(length))


def prompt_of(number: int, shared: int, length: int, tail: int) -> list[int]:
    """A prompt: `shared` tokens of a family, then tokens that `tail` decides."""
    own = [mix(tail * 104729 + index) % VOCABULARY for index in range(max(0, length - shared))]
    return [*family(number)[: min(shared, length)], *own]

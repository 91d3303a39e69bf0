# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a setting, in words: problems, and the error that holds all of them.

Values of secrets and of unknown keys are never shown.
"""

import difflib
from collections.abc import Iterable
from typing import Final

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong: where (dotted path), what was found, what is allowed, what to do."""

    key: str
    found: str
    allowed: str = ""
    hint: str = ""

    def __str__(self) -> str:
        allowed = f"; allowed: {self.allowed}" if self.allowed else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.key}: found {self.found}{allowed}{hint}"


class ConfigError(ValueError):
    """The configuration, or the engine under it, is refused. `problems` holds all of them."""

    SHOWN: Final = 40

    def __init__(self, title: str, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        lines = [f"  - {problem}" for problem in self.problems[: self.SHOWN]]
        if len(self.problems) > self.SHOWN:
            lines.append(f"  - and {len(self.problems) - self.SHOWN} more")
        super().__init__("\n".join([title, *lines]))


class Refused(Exception):
    """Raised by a check. The keys of its problems are relative to the option that was checked."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__()
        self.problems = problems


def describe(value: object) -> str:
    """Describe any value in at most some 80 characters, without calling into foreign code."""
    if value is None:
        return "null"
    if type(value) is bool:
        return f"the boolean {str(value).lower()}"
    if type(value) is int:
        # Python refuses to print very long integers.
        long = value.bit_length() > 128
        return f"an integer of {value.bit_length()} bits" if long else f"the integer {value}"
    if type(value) is float:
        return f"the number {value!r}"
    if type(value) is str:
        return f"the text {quote(value)}"
    if type(value) in (list, tuple):
        return "a list"
    if type(value) is dict:
        return "an object"
    return type_name(value)


def quote(text: str) -> str:
    """Show text in quotes, in ASCII and at most some 60 characters of it."""
    return ascii(text if len(text) <= 60 else text[:57] + "...")


def refuse(value: object, allowed: str, hint: str = "") -> Refused:
    """Make the error for one value that is not what its option allows."""
    return Refused(Problem("", describe(value), allowed, hint))


def join(prefix: str, key: str) -> str:
    """Put a key behind its prefix: `tiers` and `[0]`, or `tiers[0]` and `type`."""
    return f"{prefix}{key}" if not prefix or not key or key[0] == "[" else f"{prefix}.{key}"


def under(prefix: str, problems: Iterable[Problem]) -> list[Problem]:
    """Put the problems of one option under that option's key."""
    return [msgspec.structs.replace(p, key=join(prefix, p.key)) for p in problems]


def nearest(text: str, known: Iterable[str]) -> str:
    """Suggest the known word that is most like `text`; empty when none is."""
    near = difflib.get_close_matches(text[:60].lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def type_name(value: object) -> str:
    """Name the type of a value, which is all that is said about foreign objects."""
    return f"a value of type {quote(type(value).__name__)}"

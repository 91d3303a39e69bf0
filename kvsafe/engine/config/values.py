# SPDX-License-Identifier: Apache-2.0
"""Checks of single values. Each takes anything and returns the clean value, or raises `Refused`.

Nothing is converted silently: a boolean is no integer, a quoted number is no number.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Final

from kvsafe.engine.config.problems import (
    ConfigError,
    Problem,
    Refused,
    describe,
    nearest,
    refuse,
    type_name,
    under,
)

MAX_SIZE: Final = 1 << 60
MAX_DEADLINE_S: Final = 3600.0
MAX_THREADS: Final = 256

Check = Callable[[object], object]


def check_bool(value: object) -> bool:
    """Let `true` and `false` through."""
    if type(value) is not bool:
        raise refuse(value, "true or false, without quotes")
    return value


def int_between(low: int, high: int) -> Check:
    """Let integers from `low` to `high` through, both included."""

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise refuse(value, f"an integer from {low} to {high}")
        return value

    return check


def check_seconds(value: object) -> float:
    """Let a deadline through: above 0, at most `MAX_DEADLINE_S`; returns a float."""
    # Not-a-number fails both comparisons.
    if (type(value) is int or type(value) is float) and 0 < value <= MAX_DEADLINE_S:
        return float(value)
    raise refuse(value, f"a number of seconds above 0, at most {MAX_DEADLINE_S:g}")


def number_between(low: float, high: float) -> Check:
    """Let numbers from `low` to `high` through, both included; returns a float."""

    def check(value: object) -> float:
        if (type(value) is int or type(value) is float) and low <= value <= high:
            return float(value)
        raise refuse(value, f"a number from {low:g} to {high:g}")

    return check


def one_of(*choices: str) -> Check:
    """Let one of these texts through."""

    def check(value: object) -> str:
        if type(value) is not str or value not in choices:
            near = nearest(value, choices) if type(value) is str else ""
            raise refuse(value, ", ".join(choices), near)
        return value

    return check


def matching(pattern: str, allowed: str, *, show: bool = True) -> Check:
    """Let text through that the whole of `pattern` matches; `show` may quote what does not."""
    compiled = re.compile(pattern)

    def check(value: object) -> str:
        if type(value) is not str:
            raise refuse(value, allowed)
        if compiled.fullmatch(value) is None:
            found = describe(value) if show else "a text of another form"
            raise Refused(Problem("", found, allowed))
        return value

    return check


_UNITS: Final[Mapping[str, int]] = {
    "B": 1,
    **{f"{letter}B": 1000**n for n, letter in enumerate("kMGT", 1)},
    **{f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", 1)},
    "KB": 1000,
}
_SIZE: Final = re.compile(r" *([0-9]{1,20}(?:\.[0-9]{1,12})?) *([A-Za-z]{0,4}) *")
_SIZE_KIND: Final = 'a number of bytes such as 8589934592, or a text such as "8GiB" or "10 GB"'


def parse_size(value: object) -> int:
    """Read a size in bytes (1 to 2**60) from an int or a text with a unit; refuses anything else.

    Units are exact: kB, MB, GB, TB count in thousands, KiB, MiB, GiB, TiB in 1024. Raises
    `ConfigError` with the key "size".
    """
    try:
        return check_size(value)
    except Refused as refused:
        raise ConfigError("not a size:", under("size", refused.problems)) from None


def check_size(value: object) -> int:
    """Let a size in bytes through, as an integer or a text with a unit (`parse_size`)."""
    if type(value) is int:
        size = Fraction(value)
    elif type(value) is str:
        size = _size_of_text(value)
    else:
        raise refuse(value, _SIZE_KIND)
    if size.denominator != 1:
        raise refuse(value, _SIZE_KIND, "not a whole number of bytes")
    if not 1 <= size <= MAX_SIZE:
        raise refuse(value, _SIZE_KIND, "from 1 byte to 2**60")
    return size.numerator


def _size_of_text(text: str) -> Fraction:
    match = _SIZE.fullmatch(text) if len(text) <= 64 else None
    if match is None:
        raise refuse(text, _SIZE_KIND)
    number, unit = str(match[1]), str(match[2])
    if not unit:
        raise refuse(text, _SIZE_KIND, "a text needs a unit; a plain number has no quotes")
    if unit not in _UNITS:
        raise refuse(text, _SIZE_KIND, _unit_hint(unit))
    return Fraction(number) * _UNITS[unit]


def _unit_hint(unit: str) -> str:
    letter = unit[0].upper()
    if len(unit) == 1 and letter in "KMGT":
        return f"{unit} is ambiguous: {letter}B counts in thousands, {letter}iB in 1024"
    near = [known for known in _UNITS if known.lower() == unit.lower()]
    return f"did you mean {near[0]}?" if near else f"units: {', '.join(sorted(_UNITS))}"


_PATH_KIND: Final = "an absolute path with no '..' (~/ is the home folder)"


def check_path(value: object) -> str:
    """Let an absolute path through, in normal form; a leading `~/` stays as it is."""
    if type(value) is not str:
        raise refuse(value, _PATH_KIND)
    if len(value) > 4096 or not value.isprintable():
        raise Refused(Problem("", "a path too long or with unprintable characters", _PATH_KIND))
    if not value.startswith(("/", "~/")) or ".." in value.split("/"):
        raise refuse(value, _PATH_KIND)
    return value if value.startswith("~/") else os.path.normpath("/" + value.lstrip("/"))


def check_key_file(value: object) -> str:
    """Let a path through as `check_path` does, but never quote what was refused."""
    try:
        return check_path(value)
    except Refused:
        # Not shown: somebody may have put the key itself here.
        raise Refused(Problem("", "no such path (not shown)", _PATH_KIND)) from None


_JSON_DEPTH: Final = 16
_JSON_NODES: Final = 4096


def check_json(value: object) -> object:
    """Copy plain JSON of bounded depth and size: the options of tiers that are not ours."""
    left = [_JSON_NODES]

    def copied(item: object, depth: int) -> object:
        left[0] -= 1
        if depth > _JSON_DEPTH or left[0] < 0:
            limit = f"depth {_JSON_DEPTH}, {_JSON_NODES} values"
            raise Refused(Problem("", "JSON too deep or too large", limit))
        if item is None or type(item) in (bool, int, str):
            return item
        if type(item) is float and math.isfinite(item):
            return item
        if type(item) in (list, tuple) and isinstance(item, Sequence):
            return [copied(part, depth + 1) for part in item]
        if type(item) is dict and all(type(key) is str for key in item):
            return {key: copied(part, depth + 1) for key, part in item.items()}
        raise Refused(Problem("", f"{type_name(item)} inside", "plain JSON"))

    return copied(value, 0)

# SPDX-License-Identifier: Apache-2.0
"""Layer names as ranges: 80 names of 28 bytes each would fill half a header page."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from kvsafe.seal.identity import IdentityError
from kvsafe.seal.refusal import bounded

_NUMBER = re.compile(r"\d+")
_RANGE = re.compile(r"\{(\d+)-(\d+)(?:/(\d+))?\}")
_PERIODS = 8


class _Column(NamedTuple):
    """Names that differ in one number only: `before` start, start + step, ... `after`."""

    before: str
    start: int
    step: int
    after: str

    def name(self, index: int) -> str:
        return f"{self.before}{self.start + index * self.step}{self.after}"

    def text(self, count: int) -> str:
        step = "" if self.step == 1 else f"/{self.step}"
        end = self.start + (count - 1) * self.step
        return f"{self.before}{{{self.start}-{end}{step}}}{self.after}"


def compress_names(names: Sequence[str]) -> list[str]:
    """Shorten layer names reversibly and in order.

    `l.0.attn`, `l.1.attn`, `l.2.attn` become `l.{0-2}.attn`; names that take turns share
    one text, separated by a space; a name that fits no range stands behind `=`.
    """
    out: list[str] = []
    at = 0
    while at < len(names):
        columns, count = _longest_run(names, at)
        if columns:
            out.append(" ".join(column.text(count) for column in columns))
            at += len(columns) * count
        else:
            out.append("=" + names[at])
            at += 1
    return out


def _longest_run(names: Sequence[str], at: int) -> tuple[list[_Column], int]:
    best: tuple[list[_Column], int] = ([], 0)
    for period in range(1, min(_PERIODS, (len(names) - at) // 2) + 1):
        columns = [_column(names[at + i], names[at + i + period]) for i in range(period)]
        sound = [column for column in columns if column is not None]
        if len(sound) < period:
            continue
        count = 2
        while _goes_on(names, at + count * period, sound, count):
            count += 1
        if period * count > len(best[0]) * best[1]:
            best = (sound, count)
    return best


def _goes_on(names: Sequence[str], at: int, columns: list[_Column], count: int) -> bool:
    if at + len(columns) > len(names):
        return False
    return all(names[at + i] == column.name(count) for i, column in enumerate(columns))


def _column(first: str, second: str) -> _Column | None:
    """The column that begins with these two names, or `None`."""
    if any(char in first for char in "{} ="):
        return None
    for match in _NUMBER.finditer(first):
        before, after = first[: match.start()], first[match.end() :]
        if not (second.startswith(before) and second.endswith(after)):
            continue
        middle = second[len(before) : len(second) - len(after)]
        if not middle.isascii() or not middle.isdigit():
            continue
        column = _Column(before, int(match.group()), int(middle) - int(match.group()), after)
        if column.step > 0 and (column.name(0), column.name(1)) == (first, second):
            return column
    return None


def expand_names(texts: Sequence[str], limit: int = 65536) -> list[str]:
    """Undo `compress_names`. Raises `IdentityError` for other text or more than `limit`."""
    out: list[str] = []
    for text in texts:
        if text.startswith("="):
            out.append(text[1:])
            continue
        parsed = [_parse_column(part) for part in text.split(" ")]
        counts = {count for _, count in parsed}
        if len(counts) != 1 or len(out) + len(parsed) * max(counts) > limit:
            raise IdentityError(f"layer names cannot be expanded: {bounded(text)}")
        for index in range(counts.pop()):
            out.extend(column.name(index) for column, _ in parsed)
    return out


def _parse_column(part: str) -> tuple[_Column, int]:
    matches = list(_RANGE.finditer(part))
    if len(matches) != 1 or any(len(group or "") > 9 for group in matches[0].groups()):
        raise IdentityError(f"layer names cannot be expanded: {bounded(part)}")
    match = matches[0]
    start, end, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if step == 0 or end < start or (end - start) % step:
        raise IdentityError(f"layer names cannot be expanded: {bounded(part)}")
    column = _Column(part[: match.start()], start, step, part[match.end() :])
    return column, (end - start) // step + 1

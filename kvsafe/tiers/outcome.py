# SPDX-License-Identifier: Apache-2.0
"""What can come of one operation on the disk store: values, never exceptions."""

import enum
import errno
import os
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Verdict(Protocol):
    """A refusal as this folder sees it: a number and a text. `judge` callbacks return it."""

    @property
    def number(self) -> int:
        """Its number, which becomes part of the name in quarantine."""
        ...


class Answer(enum.Enum):
    """The kinds of outcome."""

    DONE = "done"
    """Stored now, or loaded."""
    PRESENT = "present"
    """Stored before, by this or another process."""
    MISSING = "missing"
    """Nothing of that name, or it has outlived its time."""
    REFUSED = "refused"
    """What is there is not a chunk, or the judge refused it: it was quarantined."""
    UNREACHABLE = "unreachable"
    """A call failed in a way that says nothing about the file: it stays."""
    NO_ROOM = "no room"
    """Capacity, reserve, ENOSPC or EDQUOT."""
    LATE = "late"
    """The deadline passed first."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why something that stands at a chunk's name cannot be one."""

    field: str
    expected: str
    found: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One outcome; `why` is short text without content, `verdict` what refused."""

    answer: Answer
    why: str = ""
    verdict: Verdict | None = None
    quarantined: bool = False

    @property
    def good(self) -> bool:
        """Whether the chunk is where it was asked to be."""
        return self.answer in (Answer.DONE, Answer.PRESENT)


DONE = Outcome(Answer.DONE)
PRESENT = Outcome(Answer.PRESENT)
"""The two that nearly every operation ends with, made once."""
LATE = Outcome(Answer.LATE)
"""For work that nobody wants any more."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GONE = (errno.ENOENT, errno.ENOTDIR)


def outcome_of(error: OSError) -> Outcome:
    """The outcome that an error stands for."""
    code = error.errno or 0
    name = errno.errorcode.get(code, str(code))
    if code in FULL:
        return Outcome(Answer.NO_ROOM, name)
    if code in GONE:
        return Outcome(Answer.MISSING, name)
    return Outcome(Answer.UNREACHABLE, name)


class FileId(NamedTuple):
    """Which file it was: a later one of the same name has another id."""

    inode: int
    written_ns: int

    @classmethod
    def of(cls, info: os.stat_result) -> "FileId":
        """The id of a file. Recency changes the time of access only, so it stays."""
        return cls(info.st_ino, info.st_mtime_ns)

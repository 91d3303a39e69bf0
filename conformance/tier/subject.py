# SPDX-License-Identifier: Apache-2.0
"""What is on trial: a tier over one folder, in one process, behind five calls.

A driver turns a tier into a `Subject`. Chunks have numbers; what belongs to a number is
known here, so whatever comes back can be judged without trusting the tier.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

PAYLOAD = 16384
OURS, OTHER = "model-a", "model-b"
PATIENCE_S = 15.0
"""How long one call on a tier may take before it counts as a hang."""


class Seen(enum.Enum):
    """What came of a trial, the worst first."""

    WRONG = "served wrong"
    CRASH = "crash"
    HANG = "hang"
    SERVED = "served"
    LEFT = "left behind"
    LOST = "lost"
    HIT = "hit"
    REFUSED = "refused"
    MISS = "miss"
    NOT_RUN = "not run"


WORST_FIRST = list(Seen)


def worst(*seen: Seen) -> Seen:
    """The worst of several."""
    return min(seen, key=WORST_FIRST.index)


@dataclass(frozen=True)
class Span:
    """Where the payload of a chunk lies in a file."""

    path: Path
    begin: int
    end: int


class Subject(Protocol):
    """A tier over a folder. Every call ends within `PATIENCE_S` or reports `Seen.HANG`.

    Attributes:
        NAME: for the table.
        PROMISES: the properties that the tier's own documentation or interface promises.
    """

    NAME: ClassVar[str]
    PROMISES: ClassVar[frozenset[str]]

    @classmethod
    def versions(cls) -> Mapping[str, str]:
        """Packages and versions that were tried."""
        ...

    @classmethod
    def open(cls, root: Path, model: str, options: Mapping[str, Any]) -> Subject:
        """The tier over `root` for a model."""
        ...

    def store(self, number: int) -> bool:
        """Store a chunk; whether the tier reported success."""
        ...

    def load(self, number: int) -> Seen:
        """Ask for a chunk as a new request would: HIT (right bytes), WRONG, MISS, REFUSED."""
        ...

    def forge(self, span: Span, number: int, body: bytes) -> bool:
        """Put `body` in the place of a payload and recompute every hash that needs no secret."""
        ...

    def raise_epoch(self) -> bool:
        """Weights have changed: what was stored before is not to be served. False: no such way."""
        ...

    def close(self) -> None:
        """End, as at a shutdown."""
        ...


@cache
def content_of(model: str, number: int) -> bytes:
    """The payload that belongs to a chunk of a model: no two are alike."""
    return random.Random(f"{model} {number}").randbytes(PAYLOAD)


def key_of(number: int) -> bytes:
    """32 bytes that name a chunk, the same for every model."""
    return random.Random(f"key {number}").randbytes(32)

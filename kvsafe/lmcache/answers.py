# SPDX-License-Identifier: Apache-2.0
"""What can come of asking a peer: values, never exceptions.

`Found` is a plain answer. `Lost` says nothing about the chunk: the peer could not be reached,
was silent, or is full. A `Refusal` says that what the peer sent cannot be used.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvsafe.seal.refusal import Refusal


class Found(enum.Enum):
    """The plain answers."""

    HIT = "hit"
    """The peer says that it has it; after `fetch`: every byte is in the buffer."""
    ABSENT = "absent"
    STORED = "stored"
    """The peer has taken it and says that it has it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer: `why` is short text without content, `late` whether a deadline passed."""

    why: str
    late: bool = False


Answer = Found | Lost | Refusal


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """What a value must be, to the byte: LMCache's numbers for format and element type."""

    fmt: int
    dtype: int
    dims: tuple[int, int, int, int]
    length: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """A value wanted: `into` has exactly `shape.length` bytes. Zeros unless the answer is HIT."""

    key: str
    shape: ChunkShape
    into: memoryview


@dataclass(frozen=True, slots=True)
class Offer:
    """A value to be stored: `data` has exactly `shape.length` bytes."""

    key: str
    shape: ChunkShape
    data: memoryview


class PeerStore(Protocol):
    """A store that peers share. Every call ends by its deadline; answers are in order asked."""

    def look(self, keys: Sequence[str]) -> list[Answer]:
        """HIT, ABSENT or Lost for each key."""
        ...

    def fetch(self, items: Sequence[Fetch]) -> list[Answer]:
        """HIT, ABSENT, Lost or a Refusal for each item."""
        ...

    def store(self, items: Sequence[Offer]) -> list[Answer]:
        """STORED, Lost or a Refusal for each item."""
        ...

    def remove(self, keys: Sequence[str]) -> list[Answer]:
        """ABSENT once it is gone; Lost where the store cannot remove."""
        ...

    def close(self) -> None:
        """Let go of connections. Later calls answer Lost."""
        ...

# SPDX-License-Identifier: Apache-2.0
"""What a target is, and what a finding is."""

from __future__ import annotations

from typing import ClassVar

from fuzz.source import ByteSource

__all__ = ["ByteSource", "Finding", "Target", "demand"]


class Finding(Exception):
    """An oracle was broken. `oracle` is one of ORACLES, the text says how, without content."""

    ORACLES: ClassVar[dict[str, str]] = {
        "exception": "no exception but the documented ones",
        "hang": "no execution over its time",
        "memory": "no allocation over its bound",
        "accepted": "nothing is accepted that differs from what was sealed or allowed",
        "wrong": "what is right is accepted, and every answer is the right one",
        "crash": "the process lives",
    }

    def __init__(self, oracle: str, text: str) -> None:
        super().__init__(f"{oracle}: {text}")
        self.oracle = oracle
        self.text = text
        self.where = ""

    @property
    def signature(self) -> str:
        """What stays the same while the input is made smaller."""
        return f"{self.oracle} {self.where or self.text.split(':')[0]}"


class Target:
    """One thing to fuzz. `once` is called with any bytes and raises what `check` sorts out.

    A target keeps nothing between two calls that could change an answer: the same bytes give the
    same end. Documented exceptions are caught inside `once`; whatever leaves it is a finding.
    """

    name: ClassVar[str]
    max_len: ClassVar[int] = 1024
    """Longest input that is worth trying, in bytes."""
    seconds: ClassVar[float] = 20.0
    """Bound of one execution: generous, a loaded machine is no finding."""
    memory_mib: ClassVar[int] = 256
    """What one execution may add to the memory of the process."""

    def once(self, data: bytes) -> None:
        """One execution. Raises `Finding`, or lets an undocumented exception through."""
        raise NotImplementedError

    def seeds(self) -> list[bytes]:
        """Inputs to begin with, beside those in the corpus."""
        return [b"", bytes(range(64))]

    def close(self) -> None:
        """Remove what the target has put on the disk."""


def demand(true: bool, text: str, oracle: str = "wrong") -> None:
    """Raise `Finding` unless `true`."""
    if not true:
        raise Finding(oracle, text)

# SPDX-License-Identifier: Apache-2.0
"""What a driver is: JSON lines in, JSON lines out, one answer per line, standard library only.

    {"op": "open", "wire": "lm", "host": "127.0.0.1", "port": 7000}       -> {"outcome": "open"}
    {"op": "look", "key": K}                       -> yes | no | lost | refused | error
    {"op": "fetch", "key": K, "meta": {...}}       -> hit (with "data") | miss | lost | ...
    {"op": "store", "key": K, "meta": {...}, "data": BASE64}    -> stored | lost | refused | error

`meta` is what the reader expects: length, fmt, dtype, shape. `data` of a hit is everything that
the client hands to its caller, in base64. `lost` is a client's word for "the server cannot be
reached or said nothing", `refused` for "what it said cannot be right"; a client that does not tell
them apart may use either. `note` is free text for people.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Client", "Outcome", "Wanted", "drive"]


@dataclass(frozen=True)
class Wanted:
    """What the reader expects of a chunk."""

    length: int
    fmt: int
    dtype: int
    shape: tuple[int, int, int, int]


@dataclass(frozen=True)
class Outcome:
    """What came of one call."""

    word: str
    data: bytes | None = None
    note: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The answer as a line."""
        body: dict[str, Any] = {"outcome": self.word, "note": self.note[:200], **self.more}
        if self.data is not None:
            body["data"] = base64.b64encode(self.data).decode()
        return json.dumps(body)


class Client(Protocol):
    """What a driver wraps."""

    def open(self, wire: str, host: str, port: int) -> Outcome:
        """Get ready to talk with this server; may connect now or later."""
        ...

    def look(self, key: str) -> Outcome:
        """Ask whether a chunk is there."""
        ...

    def fetch(self, key: str, wanted: Wanted) -> Outcome:
        """Get a chunk."""
        ...

    def store(self, key: str, wanted: Wanted, data: bytes) -> Outcome:
        """Put a chunk."""
        ...


def drive(client: Client) -> None:
    """Answer questions from standard input until it ends; what the client prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            outcome = _ask(client, question)
        except Exception as error:  # a client may raise anything; that is an outcome too
            outcome = Outcome("error", note=f"{type(error).__name__}: {error}")
        answers.write(outcome.line() + "\n")
        answers.flush()


def _ask(client: Client, question: dict[str, Any]) -> Outcome:
    if question["op"] == "open":
        return client.open(question["wire"], question["host"], question["port"])
    if question["op"] == "look":
        return client.look(question["key"])
    meta = question["meta"]
    wanted = Wanted(meta["length"], meta["fmt"], meta["dtype"], tuple(meta["shape"]))
    if question["op"] == "fetch":
        return client.fetch(question["key"], wanted)
    return client.store(question["key"], wanted, base64.b64decode(question["data"]))

# SPDX-License-Identifier: Apache-2.0
"""Sealed rows that tell their number, and the judge that opens them: the store's own oracle.

The judge is the real opener. What it accepts is then compared with the bytes that were
stored, so a fault of the opener would show as wrong bytes and not as a refusal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

from kvsafe.seal.refusal import Refusal
from tests.seal.rows import EPOCH, World

WORLD = World(slices=(4096,), slots=1)
ROW = WORLD.layout.row_bytes

Judge = Callable[[memoryview], Refusal | None]


@cache
def name_of(number: int) -> bytes:
    """The object name of chunk `number`, which is its key as well (36 bytes)."""
    return random.Random(number).randbytes(32) + bytes(4)


@cache
def row_of(number: int) -> bytes:
    """The sealed row of chunk `number`."""
    return bytes(WORLD.chunk(name_of(number), fill=number))


def judge_of(number: int) -> Judge:
    """Opens a row as chunk `number`, all ten steps."""

    def judge(row: memoryview) -> Refusal | None:
        answer = WORLD.opener.open(row, name_of(number), EPOCH)
        return answer if isinstance(answer, Refusal) else None

    return judge


def is_content_of(number: int, row: bytes | bytearray | memoryview) -> bool:
    """Whether the payload in `row` is the one that was stored; the header tells the time."""
    layout = WORLD.layout
    body = bytes(row[layout.header_bytes : layout.header_bytes + layout.payload_bytes])
    return body == WORLD.payload(number)

# SPDX-License-Identifier: Apache-2.0
"""Inputs made from inputs: the edits that the engines share, and a seeded maker of them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from fuzz.source import SPECIAL


class Edit(NamedTuple):
    """One change: what is done, where (any number; it is cut to the length), and with what."""

    kind: int
    at: int
    value: int
    data: bytes = b""


KINDS = 7
_WIDTHS = (1, 2, 4, 8)


def apply_edits(base: bytes, edits: Sequence[Edit], limit: int) -> bytes:
    """`base` after the edits, at most `limit` bytes."""
    out = bytearray(base)
    for edit in edits:
        _apply(out, edit)
    return bytes(out[:limit])


def _apply(out: bytearray, edit: Edit) -> None:
    at = edit.at % (len(out) + 1)
    kind = edit.kind % KINDS
    if kind == 0 and out:
        out[at % len(out)] ^= 1 << (edit.value % 8)
    elif kind == 1 and out:
        out[at % len(out)] = edit.value % 256
    elif kind == 2:
        width = _WIDTHS[edit.value % 4]
        number = SPECIAL[edit.value // 4 % len(SPECIAL)] % (1 << 8 * width)
        out[at : at + width] = number.to_bytes(width, "little")
    elif kind == 3:
        out[at:at] = edit.data
    elif kind == 4:
        del out[at : at + 1 + edit.value % 32]
    elif kind == 5:
        out[at : at + len(edit.data)] = edit.data
    elif kind == 6:
        part = bytes(out[at : at + 1 + edit.value % 64])
        to = edit.value % (len(out) + 1)
        out[to:to] = part


class Maker:
    """Inputs from a seed alone: fresh bytes, and edits of a pool. Same seed, same inputs."""

    def __init__(self, seed: int, max_len: int) -> None:
        self._random = Random(seed)
        self._max_len = max_len

    def next(self, pool: Sequence[bytes]) -> bytes:
        """The next input; `pool` is what to make it from."""
        random = self._random
        if not pool or random.random() < 0.4:
            return self._fresh()
        base = pool[random.randrange(len(pool))]
        if len(pool) > 1 and random.random() < 0.2:
            other = pool[random.randrange(len(pool))]
            base = base[: random.randint(0, len(base))] + other[random.randint(0, len(other)) :]
        edits = [self._edit() for _ in range(1 + int(random.expovariate(0.5)))]
        return apply_edits(base, edits, self._max_len)

    def _fresh(self) -> bytes:
        top = min(self._max_len, self._random.choice((16, 64, 256, self._max_len)))
        return self._random.randbytes(self._random.randint(0, top))

    def _edit(self) -> Edit:
        random = self._random
        data = random.randbytes(random.choice((1, 1, 2, 4, 8, 32)))
        return Edit(random.randrange(KINDS), random.getrandbits(16), random.getrandbits(16), data)

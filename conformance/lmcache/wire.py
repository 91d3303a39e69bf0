# SPDX-License-Identifier: Apache-2.0
"""The lm:// wire as the suites write it: requests of 186 bytes, replies of 36, little-endian.

Written from what LMCache 0.5.6 sends (see `README.md` of this folder), apart from the client in
`kvsafe/lmcache`, so that a mistake of one is not repeated by the other. Nothing is checked here
on purpose: a suite must be able to write frames that no sane peer would.
"""

from __future__ import annotations

import enum
import functools
import math
import struct
from dataclasses import dataclass, field, replace

__all__ = [
    "KEY_BYTES",
    "REPLY_BYTES",
    "REQUEST_BYTES",
    "Command",
    "Dtype",
    "Format",
    "Meta",
    "Reply",
    "Request",
    "chunk_key",
    "pattern",
]

KEY_BYTES = 150
_REQUEST = struct.Struct(f"<9i{KEY_BYTES}s")
_REPLY = struct.Struct("<9i")
REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size

SUCCESS = 200
FAIL = 400


class Command(enum.IntEnum):
    """What a request asks for."""

    PUT = 1
    GET = 2
    EXIST = 3
    LIST = 4
    HEALTH = 5


class Format(enum.IntEnum):
    """How a payload is laid out; only the names that the cases use."""

    UNDEFINED = 0
    KV_2LTD = 1
    KV_T2D = 2
    KV_2TD = 3
    BINARY = 4


class Dtype(enum.IntEnum):
    """Element types; only those that the cases use."""

    NONE = 0
    HALF = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT32 = 4
    UINT8 = 6


WIDTHS = {1: 2, 2: 2, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 1}
"""Bytes per element, by dtype number."""

Shape = tuple[int, int, int, int]
NO_SHAPE: Shape = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Meta:
    """What a frame says about a payload: bytes, format, element type, four dimensions, place."""

    length: int = 0
    fmt: int = Format.KV_2LTD
    dtype: int = Dtype.FLOAT16
    shape: Shape = NO_SHAPE
    location: int = 0

    @property
    def size(self) -> int | None:
        """Bytes that format, type and shape need, None where one of them makes no sense."""
        width = WIDTHS.get(self.dtype)
        if width is None or not 1 <= self.fmt <= 8 or min(self.shape) < 0 or self.shape[0] < 1:
            return None
        return width * math.prod(side or 1 for side in self.shape)

    def but(self, **changes: int | Shape) -> Meta:
        """The same with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


CHUNK = Meta(length=4096, dtype=Dtype.BFLOAT16, shape=(2, 2, 16, 32))


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `key` is text, padded with spaces on the wire."""

    command: int
    key: str = ""
    meta: Meta = field(default_factory=Meta)

    def pack(self, key: bytes | None = None) -> bytes:
        """The 186 bytes; `key` replaces the padded key text, byte for byte."""
        meta = self.meta
        text = self.key.encode() if key is None else key
        return _REQUEST.pack(
            self.command,
            meta.length,
            meta.fmt,
            meta.dtype,
            meta.location,
            *meta.shape,
            text.ljust(KEY_BYTES),
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Request:
        """Read 186 bytes; any text is a key here."""
        command, length, fmt, dtype, location, s0, s1, s2, s3, key = _REQUEST.unpack(raw)
        meta = Meta(length, fmt, dtype, (s0, s1, s2, s3), location)
        return cls(command, key.decode("utf-8", "replace").strip(), meta)


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply header."""

    code: int
    meta: Meta = field(default_factory=Meta)

    def pack(self, order: str = "<") -> bytes:
        """The 36 bytes; `order` is struct's byte order, `<` for all sane peers."""
        meta = self.meta
        return struct.pack(
            f"{order}9i",
            self.code,
            meta.length,
            meta.fmt,
            meta.dtype,
            *meta.shape,
            meta.location,
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Reply:
        """Read 36 bytes."""
        code, length, fmt, dtype, s0, s1, s2, s3, location = _REPLY.unpack(raw)
        return cls(code, Meta(length, fmt, dtype, (s0, s1, s2, s3), location))


def chunk_key(number: int, model: str = "conformance", dtype: str = "bfloat16") -> str:
    """A valid key text; equal numbers give equal keys."""
    return f"{model}@1@0@{number:x}@{dtype}"


def pattern(length: int, seed: int = 0) -> bytes:
    """`length` bytes that differ for every seed and from place to place."""
    page = _page(seed)
    return (page * (length // len(page) + 1))[:length]


@functools.cache
def _page(seed: int) -> bytes:
    return bytes((seed * 31 + i * 7 + (i >> 8) * 13) & 0xFF for i in range(4096))

# SPDX-License-Identifier: Apache-2.0
"""Where everything lies inside a row: the header pages, the payload, each writer's slice.

`spec/chunk.md` says the same in plain words; a change here is a new format version.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvsafe.seal.suites import TAG_BYTES

MAGIC = b"\x89kvsafe\n"
FORMAT_VERSION = 1
PAGE_BYTES = 4096

# magic, version, suite, flags, key id, epoch, generation, sealed at, payload length,
# header length, identity length, geometry length, writers, slots, key length, reserved,
# identity digest, geometry digest
FIXED = struct.Struct("<8sHHI8sQQQQIIIIIHH32s32s")
# rank, reserved, offset in the payload, length, generation, tag
RECORD = struct.Struct("<IIQQQ32s")
# the numbers of a slice context: rank, key length, offset, length, epoch, generation
CONTEXT = struct.Struct("<IIQQQQ")

MAX_KEY_BYTES = 128
MAX_SLOTS = 4096
MAX_WRITERS = 1024
MAX_DOCUMENT_BYTES = 65536
MAX_HEADER_BYTES = 1 << 20
GEOMETRY_RESERVE = 1024
"""Room kept for the geometry document, which is known only after the header length."""


class LayoutError(ValueError):
    """The engine asks for a row layout that the format cannot hold."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a payload that one writer holds: rank, first byte in the payload, bytes."""

    rank: int
    offset: int
    length: int


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


def coverage_bytes(slots: int) -> int:
    """Bytes of a coverage bitmap for `slots` blocks per chunk."""
    return -(-slots // 8)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The constant shape of every row of one engine (all in bytes).

    `header_bytes` is a multiple of 4096; records end right before the header tag, so that a
    writer knows the place of its record before anything else of the header is written.
    """

    header_bytes: int
    payload_bytes: int
    row_bytes: int
    slots: int
    slices: tuple[Slice, ...]

    @classmethod
    def plan(
        cls,
        *,
        identity_bytes: int,
        key_bytes: int,
        slots: int,
        slice_bytes: Sequence[int],
    ) -> "RowLayout":
        """Lay out rows for one engine.

        Args:
            identity_bytes: length of the identity document.
            key_bytes: length of an object key.
            slots: blocks per chunk.
            slice_bytes: one length per writer, in rank order.

        Raises `LayoutError` when a limit of the format is exceeded.
        """
        _within("key bytes", key_bytes, 1, MAX_KEY_BYTES)
        _within("blocks per chunk", slots, 1, MAX_SLOTS)
        _within("writers", len(slice_bytes), 1, MAX_WRITERS)
        _within("identity document bytes", identity_bytes, 1, MAX_DOCUMENT_BYTES)
        used = FIXED.size + key_bytes + coverage_bytes(slots) + identity_bytes
        used += GEOMETRY_RESERVE + RECORD.size * len(slice_bytes) + TAG_BYTES
        header = round_up(used, PAGE_BYTES)
        slices, offset = [], 0
        for rank, length in enumerate(slice_bytes):
            _within(f"slice bytes of rank {rank}", length, 1, 1 << 40)
            slices.append(Slice(rank, offset, length))
            offset += length
        return cls(
            header_bytes=header,
            payload_bytes=offset,
            row_bytes=round_up(header + offset, PAGE_BYTES),
            slots=slots,
            slices=tuple(slices),
        )

    def record_offset(self, index: int) -> int:
        """First byte, in the row, of the record of the writer with this index."""
        return record_offset(self.header_bytes, len(self.slices), index)


def record_offset(header_bytes: int, writers: int, index: int) -> int:
    """First byte of writer record `index` in a header with `writers` records."""
    return header_bytes - TAG_BYTES - RECORD.size * (writers - index)


def _within(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise LayoutError(f"{what}: {value} is outside {low} to {high}")

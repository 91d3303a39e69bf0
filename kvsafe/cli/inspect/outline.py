# SPDX-License-Identifier: Apache-2.0
"""What a header claims, read without any key: bounded places, nothing proven.

The limits are those of step 3 in `spec/chunk.md`. A test holds this reading against
`kvsafe.seal.opening.read_outer` on thousands of damaged headers: both must say the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsafe.seal.header import FixedPart, WriterRecord, read_fixed, read_record
from kvsafe.seal.layout import (
    FIXED,
    FORMAT_VERSION,
    MAGIC,
    MAX_DOCUMENT_BYTES,
    MAX_HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_SLOTS,
    MAX_WRITERS,
    PAGE_BYTES,
    RECORD,
    RowLayout,
    Slice,
    coverage_bytes,
    record_offset,
    round_up,
)
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.suites import Suite

__all__ = ["Outline", "first_look", "layout_of", "outline_of"]


@dataclass(frozen=True, slots=True)
class Outline:
    """The parts of one header, as copies: what was looked at is what is shown."""

    fixed: FixedPart
    key: bytes
    coverage: bytes
    identity: bytes
    geometry: bytes
    records: tuple[WriterRecord, ...]

    @property
    def suite(self) -> Suite:
        """The suite; its number was checked."""
        return Suite(self.fixed.suite)

    def covered(self) -> list[int]:
        """The slots whose bit is set."""
        bits = int.from_bytes(self.coverage, "little")
        return [slot for slot in range(self.fixed.slots) if bits >> slot & 1]


def first_look(head: memoryview, row_bytes: int) -> FixedPart | Refusal:
    """Steps 1 and 2 without the key, and the header's length: how much is worth reading.

    `head` is the beginning of a row of `row_bytes` bytes, the first page of it if there is one.
    """
    if row_bytes < FIXED.size or len(head) < FIXED.size:
        return Refusal.of(RefusalKind.TOO_SHORT, "row", f"at least {FIXED.size}", row_bytes)
    fixed = read_fixed(head)
    return _check_terms(fixed) or _check_header_length(fixed, row_bytes) or fixed


def outline_of(head: memoryview, row_bytes: int) -> Outline | Refusal:
    """Steps 1 to 3 without the key. `head` holds at least the header, where there is one."""
    fixed = first_look(head, row_bytes)
    if isinstance(fixed, Refusal):
        return fixed
    if (refusal := _check_lengths(fixed, row_bytes)) is not None:
        return refusal
    taken, parts = FIXED.size, []
    for length in _part_lengths(fixed):
        parts.append(bytes(head[taken : taken + length]))
        taken += length
    start = record_offset(fixed.header_bytes, fixed.writers, 0)
    records = tuple(read_record(head, start + RECORD.size * n) for n in range(fixed.writers))
    key, coverage, identity, geometry = parts
    return Outline(fixed, key, coverage, identity, geometry, records)


def layout_of(found: Outline) -> RowLayout | Refusal:
    """The layout that the header describes, if its slices tile the payload (step 9)."""
    fixed, slices, offset = found.fixed, [], 0
    for rank, record in enumerate(found.records):
        slices.append(Slice(rank, offset, record.length))
        offset += record.length
        if record.length < 1:
            return Refusal.of(RefusalKind.WRITER, f"writer[{rank}]", "at least one byte", 0)
    if offset != fixed.payload_bytes:
        return Refusal.of(RefusalKind.WRITER, "writers", fixed.payload_bytes, offset)
    return RowLayout(
        header_bytes=fixed.header_bytes,
        payload_bytes=fixed.payload_bytes,
        row_bytes=round_up(fixed.header_bytes + fixed.payload_bytes, PAGE_BYTES),
        slots=fixed.slots,
        slices=tuple(slices),
    )


def _check_terms(fixed: FixedPart) -> Refusal | None:
    if fixed.magic != MAGIC:
        return Refusal.of(RefusalKind.BAD_MAGIC, "magic", MAGIC, fixed.magic)
    if fixed.version != FORMAT_VERSION:
        return Refusal.of(RefusalKind.VERSION, "version", FORMAT_VERSION, fixed.version)
    if fixed.suite not in list(Suite):
        return Refusal.of(RefusalKind.SUITE, "suite", "1, 2 or 3", fixed.suite)
    if fixed.flags or fixed.reserved:
        return Refusal.of(RefusalKind.FLAGS, "flags", 0, fixed.flags or fixed.reserved)
    return None


def _check_header_length(fixed: FixedPart, row_bytes: int) -> Refusal | None:
    length = fixed.header_bytes
    if length % PAGE_BYTES or not PAGE_BYTES <= length <= min(row_bytes, MAX_HEADER_BYTES):
        allowed = f"pages within {row_bytes}"
        return Refusal.of(RefusalKind.HEADER_LENGTH, "header_bytes", allowed, length)
    return None


def _check_lengths(fixed: FixedPart, row_bytes: int) -> Refusal | None:
    for name, value, high in (
        ("key_bytes", fixed.key_bytes, MAX_KEY_BYTES),
        ("slots", fixed.slots, MAX_SLOTS),
        ("identity_bytes", fixed.identity_bytes, MAX_DOCUMENT_BYTES),
        ("geometry_bytes", fixed.geometry_bytes, MAX_DOCUMENT_BYTES),
    ):
        if not 1 <= value <= high:
            return Refusal.of(RefusalKind.DOCUMENT_LENGTH, name, f"1 to {high}", value)
    if not 1 <= fixed.writers <= MAX_WRITERS:
        return Refusal.of(RefusalKind.WRITER_COUNT, "writers", f"1 to {MAX_WRITERS}", fixed.writers)
    end = FIXED.size + sum(_part_lengths(fixed))
    records = record_offset(fixed.header_bytes, fixed.writers, 0)
    if end > records:
        return Refusal.of(RefusalKind.DOCUMENT_LENGTH, "header", records, end)
    room = row_bytes - fixed.header_bytes
    if not 1 <= fixed.payload_bytes <= room:
        return Refusal.of(
            RefusalKind.PAYLOAD_LENGTH, "payload_bytes", f"1 to {room}", fixed.payload_bytes
        )
    return None


def _part_lengths(fixed: FixedPart) -> tuple[int, int, int, int]:
    """Bytes of key, coverage, identity and geometry."""
    coverage = coverage_bytes(fixed.slots)
    return fixed.key_bytes, coverage, fixed.identity_bytes, fixed.geometry_bytes

# SPDX-License-Identifier: Apache-2.0
"""What a header claims, read without any key: bounded places, nothing proven."""

from __future__ import annotations

from dataclasses import dataclass

from kvsafe.seal.header import FixedPart, WriterRecord, read_record
from kvsafe.seal.layout import PAGE_BYTES, RECORD, RowLayout, Slice, round_up
from kvsafe.seal.opening import read_claims
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.suites import Suite

__all__ = ["Outline", "layout_of", "outline_of"]


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


def outline_of(head: memoryview, row_bytes: int) -> Outline | Refusal:
    """Steps 1 to 3 without the key. `head` holds at least the header, where there is one."""
    claims = read_claims(head, row_bytes)
    if isinstance(claims, Refusal):
        return claims
    fixed, spans = claims
    return Outline(
        fixed,
        bytes(head[spans.key : spans.coverage]),
        bytes(head[spans.coverage : spans.identity]),
        bytes(head[spans.identity : spans.geometry]),
        bytes(head[spans.geometry : spans.filler]),
        tuple(read_record(head, spans.records + RECORD.size * n) for n in range(fixed.writers)),
    )


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

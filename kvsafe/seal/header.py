# SPDX-License-Identifier: Apache-2.0
"""The chunk header as values: the fixed part and the writer records, read and written.

Parsing here never judges; it reads numbers from bounded places. The judging, in its fixed
order, is `kvsafe.seal.opening`.
"""

from typing import NamedTuple

from kvsafe.seal.layout import FIXED, RECORD
from kvsafe.seal.suites import Bytes


class FixedPart(NamedTuple):
    """The first 144 bytes of a header, field by field (little-endian)."""

    magic: bytes
    version: int
    suite: int
    flags: int
    key_id: bytes
    epoch: int
    generation: int
    sealed_at: int
    payload_bytes: int
    header_bytes: int
    identity_bytes: int
    geometry_bytes: int
    writers: int
    slots: int
    key_bytes: int
    reserved: int
    identity_digest: bytes
    geometry_digest: bytes


class WriterRecord(NamedTuple):
    """What one writer says about its slice: place, generation of the row, payload tag."""

    rank: int
    reserved: int
    offset: int
    length: int
    generation: int
    tag: bytes


class Header(NamedTuple):
    """A header whose tag was right: the values that a reader may now rely on."""

    fixed: FixedPart
    key: bytes
    coverage: bytes
    records: tuple[WriterRecord, ...]

    def covers(self, slot: int) -> bool:
        """Whether the block in this slot of the chunk was written."""
        return bool(self.coverage[slot >> 3] >> (slot & 7) & 1)


def read_fixed(row: Bytes) -> FixedPart:
    """Read the fixed part from the first bytes of a row of at least that length."""
    return FixedPart._make(FIXED.unpack_from(row, 0))


def read_record(row: Bytes, offset: int) -> WriterRecord:
    """Read one writer record at a byte offset that the caller has bounded."""
    return WriterRecord._make(RECORD.unpack_from(row, offset))


def read_records(head: bytes, start: int, end: int) -> tuple[WriterRecord, ...]:
    """Read the writer records that fill bytes `start .. end`, which the caller has bounded."""
    return tuple(map(WriterRecord._make, RECORD.iter_unpack(head[start:end])))


def bitmap(slots: int, written: range | tuple[int, ...] | list[int]) -> bytes:
    """Coverage bitmap of `slots` bits, least significant bit first, with `written` set.

    Raises `ValueError` for a slot that the chunk does not have.
    """
    bits = bytearray(-(-slots // 8))
    for slot in written:
        if not 0 <= slot < slots:
            raise ValueError(f"slot {slot} of {slots}")
        bits[slot >> 3] |= 1 << (slot & 7)
    return bytes(bits)

# SPDX-License-Identifier: Apache-2.0
"""Parses a row and judges it in the ten steps of spec/chunk.md, section 6."""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from conformance.reader import suites
from conformance.reader.canonical import DocumentError, entries

MAGIC = b"\x89kvsafe\n"
PAGE = 4096
FIXED = struct.Struct("<8sHHI8sQQQQIIIIIHH32s32s")
RECORD = struct.Struct("<IIQQQ32s")
CONTEXT = struct.Struct("<IIQQQQ32s")
TAG_BYTES = 32
MAX_HEADER = 1 << 20
LIMITS = {"identity_bytes": 65536, "geometry_bytes": 65536, "slots": 4096, "key_bytes": 128}


class Verdict(NamedTuple):
    """`step` and `number` (spec/refusals.md) of a refusal, or zeros for a row that is accepted."""

    step: int = 0
    number: int = 0
    reason: str = "ok"
    field: str = ""


OK = Verdict()


def _no(number: int, reason: str, field: str = "") -> Verdict:
    return Verdict(number // 100, number, reason, field)


@dataclass(frozen=True)
class Expected:
    """What the reader was set to accept; lengths in bytes.

    `slices` are (offset, length) in the payload in rank order; `wanted` are the slots that must
    be covered; `ranks` limits step 10 to some slices, None checks all.
    """

    suite: str
    secrets: tuple[bytes, ...]
    key: bytes
    epoch: int
    identity: bytes
    geometry: bytes
    header_bytes: int
    payload_bytes: int
    slots: int
    slices: tuple[tuple[int, int], ...]
    wanted: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """ValueError if the caller's own documents or secrets could match nothing."""
        entries(self.identity)
        entries(self.geometry)
        if any(len(secret) != 32 for secret in self.secrets):
            raise ValueError("a secret is 32 bytes")

    @property
    def row_bytes(self) -> int:
        """Length of the whole row: up to the next page after the payload."""
        return -(-(self.header_bytes + self.payload_bytes) // PAGE) * PAGE


class Fixed(NamedTuple):
    """Bytes 0 .. 144, in their order."""

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


class Writer(NamedTuple):
    """One writer record."""

    rank: int
    reserved: int
    offset: int
    length: int
    generation: int
    tag: bytes


class Header:
    """Places in a header; only `fixed` may be used before step 3 has bounded the rest."""

    def __init__(self, row: memoryview) -> None:
        self.row = row
        self.fixed = Fixed._make(FIXED.unpack_from(row))
        fixed = self.fixed
        self.coverage_at = FIXED.size + fixed.key_bytes
        self.identity_at = self.coverage_at + (fixed.slots + 7) // 8
        self.geometry_at = self.identity_at + fixed.identity_bytes
        self.filler_at = self.geometry_at + fixed.geometry_bytes
        self.tag_at = fixed.header_bytes - TAG_BYTES
        self.writers_at = self.tag_at - RECORD.size * fixed.writers

    def part(self, start: int, end: int) -> bytes:
        """A copy of bytes `start .. end`."""
        return bytes(self.row[start:end])

    def key(self) -> bytes:
        """The key of the chunk."""
        return self.part(FIXED.size, self.coverage_at)

    def coverage(self) -> int:
        """The bitmap as a number: bit `i` is slot `i`."""
        return int.from_bytes(self.part(self.coverage_at, self.identity_at), "little")

    def identity(self) -> bytes:
        """The identity document."""
        return self.part(self.identity_at, self.geometry_at)

    def geometry(self) -> bytes:
        """The geometry document."""
        return self.part(self.geometry_at, self.filler_at)

    def writers(self) -> Iterator[Writer]:
        """The writer records, in order."""
        for at in range(self.writers_at, self.tag_at, RECORD.size):
            yield Writer._make(RECORD.unpack_from(self.row, at))


def _terms(head: Header, expected: Expected) -> Verdict:
    fixed = head.fixed
    if fixed.version != 1:
        return _no(201, "version is not 1", "version")
    if fixed.suite != suites.NUMBERS[expected.suite]:
        return _no(202, "another suite", "suite")
    for name in ("flags", "reserved"):
        if getattr(fixed, name):
            return _no(203, "must be 0", name)
    if fixed.key_id not in suites.ring(expected.suite, expected.secrets):
        return _no(204, "key is not in the ring", "key_id")
    return OK


def _lengths(head: Header, expected: Expected) -> Verdict:
    fixed, row = head.fixed, len(head.row)
    if fixed.header_bytes % PAGE or not PAGE <= fixed.header_bytes <= min(row, MAX_HEADER):
        return _no(301, "not whole pages inside the row", "header_bytes")
    for name, most in LIMITS.items():
        if not 1 <= getattr(fixed, name) <= most:
            return _no(302, "outside its limits", name)
    if not 1 <= fixed.writers <= 1024:
        return _no(304, "outside its limits", "writers")
    if head.filler_at > head.writers_at:
        return _no(302, "parts do not fit", "header_bytes")
    if not 1 <= fixed.payload_bytes <= row - fixed.header_bytes:
        return _no(303, "does not fit behind the header", "payload_bytes")
    return OK


def _subkey(head: Header, expected: Expected, purpose: str) -> bytes:
    secret = suites.ring(expected.suite, expected.secrets)[head.fixed.key_id]
    return suites.subkey(expected.suite, secret, purpose)


def _header_tag(head: Header, expected: Expected) -> Verdict:
    right = suites.tag(expected.suite, _subkey(head, expected, "header"), head.row[: head.tag_at])
    if hmac.compare_digest(right, head.part(head.tag_at, head.fixed.header_bytes)):
        return OK
    return _no(401, "header tag is wrong", "header_tag")


def _key(head: Header, expected: Expected) -> Verdict:
    return OK if head.key() == expected.key else _no(501, "another key", "key")


def _epoch(head: Header, expected: Expected) -> Verdict:
    if head.fixed.epoch < expected.epoch:
        return _no(601, "revoked", "epoch")
    if head.fixed.epoch > expected.epoch:
        return _no(602, "unknown", "epoch")
    return OK


def _document(suite: str, found: bytes, declared: bytes, own: bytes) -> tuple[bool, list[str]]:
    """Whether the document is sound, and the names of the entries that are not the reader's."""
    if found == own and declared == suites.digest(suite, own):
        return True, []
    if declared != suites.digest(suite, found):
        return False, []
    try:
        theirs = entries(found)
    except DocumentError:
        return False, []
    ours = entries(own)
    return True, [n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)]


def _identity(head: Header, expected: Expected) -> Verdict:
    found, declared = head.identity(), head.fixed.identity_digest
    sound, differ = _document(expected.suite, found, declared, expected.identity)
    if not sound:
        return _no(702, "identity document is damaged", "identity")
    return _no(701, "another identity", ", ".join(differ)) if differ else OK


def _geometry(head: Header, expected: Expected) -> Verdict:
    for name in ("header_bytes", "payload_bytes", "slots"):
        if getattr(head.fixed, name) != getattr(expected, name):
            return _no(801, "another geometry", name)
    if len(head.row) != expected.row_bytes:
        return _no(801, "another length of the row", "row_bytes")
    found, declared = head.geometry(), head.fixed.geometry_digest
    sound, differ = _document(expected.suite, found, declared, expected.geometry)
    if not sound:
        return _no(802, "geometry document is damaged", "geometry")
    return _no(801, "another geometry", ", ".join(differ)) if differ else OK


def _writers(head: Header, expected: Expected) -> Verdict:
    if head.fixed.writers != len(expected.slices):
        return _no(901, "not the number of this engine", "writers")
    for rank, (writer, place) in enumerate(zip(head.writers(), expected.slices, strict=True)):
        if writer[:4] != (rank, 0, *place):
            return _no(901, "not the slice of this writer", f"writers[{rank}]")
        if writer.generation != head.fixed.generation:
            return _no(902, "another generation", f"writers[{rank}].generation")
    return OK


def _padding(head: Header, expected: Expected) -> Verdict:
    coverage = head.coverage()
    if coverage >> head.fixed.slots:
        return _no(904, "bits past the last slot", "coverage")
    for slot in expected.wanted:
        if not 0 <= slot < head.fixed.slots or not coverage >> slot & 1:
            return _no(903, f"slot {slot} was not written", "coverage")
    if any(head.part(head.filler_at, head.writers_at)):
        return _no(904, "must be zero", "filler")
    if any(head.row[head.fixed.header_bytes + head.fixed.payload_bytes :]):
        return _no(904, "must be zero", "tail")
    return OK


def _payload(head: Header, expected: Expected) -> Verdict:
    fixed, key = head.fixed, head.key()
    slice_key = _subkey(head, expected, "slice")
    for w in head.writers():
        if expected.ranks is not None and w.rank not in expected.ranks:
            continue
        numbers = (w.rank, len(key), w.offset, w.length, fixed.epoch, w.generation)
        context = CONTEXT.pack(*numbers, fixed.identity_digest)
        start = fixed.header_bytes + w.offset
        content = head.row[start : start + w.length]
        right = suites.slice_tag(expected.suite, slice_key, context + key, content)
        if not hmac.compare_digest(w.tag, right):
            return _no(1001, "not what the writer tagged", f"slices[{w.rank}]")
    return OK


STEPS: tuple[Callable[[Header, Expected], Verdict], ...] = (
    _terms,
    _lengths,
    _header_tag,
    _key,
    _epoch,
    _identity,
    _geometry,
    _writers,
    _padding,
    _payload,
)


def judge(row: bytes | bytearray | memoryview, expected: Expected) -> Verdict:
    """Accept a whole row, or name the first step that refuses it; never raises for `row`."""
    view = memoryview(row).toreadonly().cast("B")
    if len(view) < FIXED.size:
        return _no(101, "shorter than a header")
    if view[:8] != MAGIC:
        return _no(102, "another magic", "magic")
    head = Header(view)
    return next((no for no in (step(head, expected) for step in STEPS) if no.step), OK)

# SPDX-License-Identifier: Apache-2.0
"""Open: the ten numbered steps between bytes from a tier and bytes that may be used.

1 length and magic; 2 version, suite, flags and key id; 3 declared lengths inside the row;
4 header tag; 5 the key asked for; 6 epoch; 7 identity; 8 geometry; 9 writers, coverage and
zero padding; 10 payload tags. Cheap and bounded steps come first, and nothing that is
declared inside the bytes is used before step 3 has bounded it. Up to step 4 the answer is
the same for an accident and for an attack; after step 4 (in a keyed suite) the header is
authentic and a refusal says what it honestly is: another key, another model, an old epoch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from kvsafe.seal.explaining import explain_geometry, explain_identity
from kvsafe.seal.header import FixedPart, Header, WriterRecord, read_fixed, read_records
from kvsafe.seal.keyring import Keyring, SealKey
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
    RowLayout,
    coverage_bytes,
    record_offset,
)
from kvsafe.seal.layout import Slice as WriterSlice
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.sealing import require_suite, slice_context
from kvsafe.seal.suites import TAG_BYTES, Bytes, Suite, tags_equal

__all__ = ["Expectation", "Opener", "Spans", "explain_identity", "read_claims", "read_outer"]

_SUITES = [suite.value for suite in Suite]
_FIRST_BYTES = PAGE_BYTES
"""What is read of a row before its lengths are known; no header is shorter."""
_KEPT_SPANS = 64
"""Far more sets of lengths than one engine meets; foreign ones cost time, not memory."""
_SHAPE = ("header_bytes", "payload_bytes", "slots", "row_bytes")
"""What step 8 compares of a layout, in this order."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a chunk must be for this engine to accept it."""

    suite: Suite
    keyring: Keyring
    layout: RowLayout
    identity_document: bytes
    identity_digest: bytes
    geometry_document: bytes
    geometry_digest: bytes = field(init=False)
    _zeros: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_suite(self.suite, self.keyring)
        object.__setattr__(self, "geometry_digest", self.suite.digest(self.geometry_document))
        layout = self.layout
        longest = max(layout.header_bytes, layout.row_bytes - layout.payload_bytes)
        object.__setattr__(self, "_zeros", bytes(longest))

    def zeros(self, length: int) -> bytes:
        """`length` zero bytes, at most one header or row tail."""
        return self._zeros[:length]


@dataclass(frozen=True, slots=True)
class Spans:
    """First byte, in the header, of each variable part (all bounded by step 3)."""

    key: int
    coverage: int
    identity: int
    geometry: int
    filler: int
    records: int
    tag: int


class Opener:
    """Opens rows for one engine. Stateless between calls; safe to use from threads."""

    def __init__(self, expectation: Expectation) -> None:
        self._want = expectation
        layout = expectation.layout
        self._shape = tuple(getattr(layout, name) for name in _SHAPE)
        self._tail_at = layout.header_bytes + layout.payload_bytes

    def open(
        self, row: memoryview, key: bytes, epoch: int, wanted: Iterable[int] = ()
    ) -> Header | Refusal:
        """All ten steps on a whole row (uint8). `wanted` are slots that must be covered."""
        header = self.open_header(row, key, epoch, wanted)
        if isinstance(header, Refusal):
            return header
        for index in range(len(header.records)):
            if refusal := self.open_slice(row, header, index):
                return refusal
        return header

    def open_header(
        self, row: memoryview, key: bytes, epoch: int, wanted: Iterable[int] = ()
    ) -> Header | Refusal:
        """Steps 1 to 9: everything except the payload bytes."""
        want = self._want
        outer = read_outer(row, want.suite, want.keyring)
        if isinstance(outer, Refusal):
            return outer
        fixed, spans, head = outer
        header = Header(
            fixed,
            head[spans.key : spans.coverage],
            head[spans.coverage : spans.identity],
            read_records(head, spans.records, spans.tag),
        )
        return (
            _check_key(header, key)
            or _check_epoch(fixed.epoch, epoch)
            or self._check_identity(head, fixed, spans)
            or self._check_geometry(head, fixed, spans, len(row))
            or self._check_writers(header)
            or _check_coverage(header, wanted)
            or self._check_padding(row, head, spans)
            or header
        )

    def open_slice(self, row: memoryview, header: Header, index: int) -> Refusal | None:
        """Step 10 for the slice of one writer (by index in the layout)."""
        want = self._want
        place, record = want.layout.slices[index], header.records[index]
        seal_key = want.keyring.get(header.fixed.key_id)
        if seal_key is None:
            return Refusal.of(RefusalKind.KEY_ID, "key_id", "in the ring", header.fixed.key_id)
        context = slice_context(
            header.fixed.identity_digest,
            header.fixed.epoch,
            header.fixed.generation,
            place,
            header.key,
        )
        start = want.layout.header_bytes + place.offset
        tag = want.suite.tag_slice(
            want.keyring.subkey(seal_key, "slice"),
            context,
            row[start : start + place.length],
        )
        if tags_equal(tag, record.tag):
            return None
        return Refusal.of(
            RefusalKind.PAYLOAD_TAG,
            f"writer[{place.rank}].tag",
            "the tag of these bytes",
            "another",
        )

    def _check_identity(self, head: bytes, fixed: FixedPart, spans: Spans) -> Refusal | None:
        want = self._want
        document = head[spans.identity : spans.geometry]
        if fixed.identity_digest == want.identity_digest and document == want.identity_document:
            return None
        return explain_identity(want.suite, want.identity_document, document, fixed.identity_digest)

    def _check_geometry(
        self, head: bytes, fixed: FixedPart, spans: Spans, row_bytes: int
    ) -> Refusal | None:
        want = self._want
        shape = (fixed.header_bytes, fixed.payload_bytes, fixed.slots, row_bytes)
        if shape != self._shape:
            pairs = zip(_SHAPE, self._shape, shape, strict=True)
            name, live, found = next(pair for pair in pairs if pair[1] != pair[2])
            return Refusal.of(RefusalKind.GEOMETRY, name, live, found)
        document = head[spans.geometry : spans.filler]
        if fixed.geometry_digest == want.geometry_digest and document == want.geometry_document:
            return None
        return explain_geometry(want.suite, want.geometry_document, document, fixed.geometry_digest)

    def _check_writers(self, header: Header) -> Refusal | None:
        slices, records = self._want.layout.slices, header.records
        generation = header.fixed.generation
        if len(records) != len(slices):
            return Refusal.of(RefusalKind.WRITER, "writers", len(slices), len(records))
        for index, place in enumerate(slices):
            if refusal := _check_writer(place, records[index], generation):
                return refusal
        return None

    def _check_padding(self, row: memoryview, head: bytes, spans: Spans) -> Refusal | None:
        want = self._want
        filler = head[spans.filler : spans.records]
        if filler != want.zeros(len(filler)):
            return Refusal.of(RefusalKind.PADDING, "filler", "zero bytes", "other bytes")
        # As bytes: comparing memoryviews goes element by element and costs more than the tag.
        tail = row[self._tail_at : want.layout.row_bytes].tobytes()
        if tail != want.zeros(len(tail)):
            return Refusal.of(RefusalKind.PADDING, "tail", "zero bytes", "other bytes")
        return None


def read_outer(
    row: memoryview, suite: Suite, keyring: Keyring
) -> tuple[FixedPart, Spans, bytes] | Refusal:
    """Steps 1 to 4 without any expectation of an engine: is this an authentic header?

    Returns its fixed part, the places of its variable parts, and a copy of its bytes. Each of
    them is read once: what was checked is what is used, also if the row changes meanwhile.

    Used by `open_header` and by tools that look at chunks of unknown engines.
    """
    head = row[:_FIRST_BYTES].tobytes()
    fixed = _read_magic(head, len(row))
    if isinstance(fixed, Refusal):
        return fixed
    seal_key = _check_terms(fixed, suite, keyring)
    if isinstance(seal_key, Refusal):
        return seal_key
    spans = _check_lengths(fixed, len(row))
    if isinstance(spans, Refusal):
        return spans
    head += row[_FIRST_BYTES : fixed.header_bytes].tobytes()
    tag = suite.tag(keyring.subkey(seal_key, "header"), memoryview(head)[: spans.tag])
    if not tags_equal(tag, head[spans.tag :]):
        return Refusal.of(RefusalKind.HEADER_TAG, "header tag", "the tag of these bytes", "another")
    return fixed, spans, head


def read_claims(head: memoryview, row_bytes: int) -> tuple[FixedPart, Spans] | Refusal:
    """Steps 1 to 3 without a key ring: what a header of any suite claims, within bounds.

    `head` (uint8) is the beginning of a row of `row_bytes` bytes; the fixed part of it is enough.
    Nothing is proven. A refusal is the one that `read_outer` would give, but for the key id.
    """
    fixed = _read_magic(head, row_bytes)
    if isinstance(fixed, Refusal):
        return fixed
    if refusal := _check_format(fixed, None):
        return refusal
    spans = _check_lengths(fixed, row_bytes)
    return spans if isinstance(spans, Refusal) else (fixed, spans)


def _read_magic(head: Bytes, row_bytes: int) -> FixedPart | Refusal:
    if row_bytes < FIXED.size or len(head) < FIXED.size:
        return Refusal.of(RefusalKind.TOO_SHORT, "row", f"at least {FIXED.size}", row_bytes)
    fixed = read_fixed(head)
    if fixed.magic != MAGIC:
        return Refusal.of(RefusalKind.BAD_MAGIC, "magic", MAGIC, fixed.magic)
    return fixed


def _check_format(fixed: FixedPart, suite: Suite | None) -> Refusal | None:
    """Version, suite (None: any that there is) and flags."""
    if fixed.version != FORMAT_VERSION:
        return Refusal.of(RefusalKind.VERSION, "version", FORMAT_VERSION, fixed.version)
    if suite is None:
        if fixed.suite not in _SUITES:
            return Refusal.of(RefusalKind.SUITE, "suite", f"one of {_SUITES}", fixed.suite)
    elif fixed.suite != suite:
        # Also the refusal of a downgrade: a keyed reader never accepts an unkeyed chunk.
        return Refusal.of(RefusalKind.SUITE, "suite", suite.value, fixed.suite)
    if fixed.flags or fixed.reserved:
        return Refusal.of(RefusalKind.FLAGS, "flags", 0, fixed.flags or fixed.reserved)
    return None


def _check_terms(fixed: FixedPart, suite: Suite, keyring: Keyring) -> SealKey | Refusal:
    if refusal := _check_format(fixed, suite):
        return refusal
    seal_key = keyring.get(fixed.key_id)
    if seal_key is None:
        return Refusal.of(RefusalKind.KEY_ID, "key_id", "one in the key ring", fixed.key_id)
    return seal_key


def _check_lengths(fixed: FixedPart, row_bytes: int) -> Spans | Refusal:
    header = fixed.header_bytes
    if header % PAGE_BYTES or not PAGE_BYTES <= header <= MAX_HEADER_BYTES or header > row_bytes:
        return Refusal.of(
            RefusalKind.HEADER_LENGTH,
            "header_bytes",
            f"pages within {row_bytes}",
            header,
        )
    if refusal := _check_counts(fixed):
        return refusal
    spans = _spans(fixed)
    if spans.filler > spans.records:
        return Refusal.of(RefusalKind.DOCUMENT_LENGTH, "header", spans.records, spans.filler)
    if not 1 <= fixed.payload_bytes <= row_bytes - header:
        return Refusal.of(
            RefusalKind.PAYLOAD_LENGTH,
            "payload_bytes",
            f"1 to {row_bytes - header}",
            fixed.payload_bytes,
        )
    return spans


def _check_counts(fixed: FixedPart) -> Refusal | None:
    """Each declared number by itself against the limit of the format."""
    if not 1 <= fixed.key_bytes <= MAX_KEY_BYTES:
        return _outside("key_bytes", MAX_KEY_BYTES, fixed.key_bytes)
    if not 1 <= fixed.slots <= MAX_SLOTS:
        return _outside("slots", MAX_SLOTS, fixed.slots)
    if not 1 <= fixed.identity_bytes <= MAX_DOCUMENT_BYTES:
        return _outside("identity_bytes", MAX_DOCUMENT_BYTES, fixed.identity_bytes)
    if not 1 <= fixed.geometry_bytes <= MAX_DOCUMENT_BYTES:
        return _outside("geometry_bytes", MAX_DOCUMENT_BYTES, fixed.geometry_bytes)
    if not 1 <= fixed.writers <= MAX_WRITERS:
        return Refusal.of(RefusalKind.WRITER_COUNT, "writers", f"1 to {MAX_WRITERS}", fixed.writers)
    return None


def _outside(name: str, limit: int, found: int) -> Refusal:
    return Refusal.of(RefusalKind.DOCUMENT_LENGTH, name, f"1 to {limit}", found)


def _spans(fixed: FixedPart) -> Spans:
    return _spans_of(
        fixed.header_bytes,
        fixed.key_bytes,
        fixed.slots,
        fixed.identity_bytes,
        fixed.geometry_bytes,
        fixed.writers,
    )


@lru_cache(maxsize=_KEPT_SPANS)
def _spans_of(
    header: int, key: int, slots: int, identity: int, geometry: int, writers: int
) -> Spans:
    """The places that follow from the lengths, which are the same for all chunks of an engine."""
    at_coverage = FIXED.size + key
    at_identity = at_coverage + coverage_bytes(slots)
    at_geometry = at_identity + identity
    return Spans(
        key=FIXED.size,
        coverage=at_coverage,
        identity=at_identity,
        geometry=at_geometry,
        filler=at_geometry + geometry,
        records=record_offset(header, writers, 0),
        tag=header - TAG_BYTES,
    )


def _check_key(header: Header, key: bytes) -> Refusal | None:
    if header.key == key:
        return None
    return Refusal.of(RefusalKind.KEY, "key", "the key asked for", "the key of another chunk")


def _check_epoch(found: int, epoch: int) -> Refusal | None:
    if found == epoch:
        return None
    kind = RefusalKind.EPOCH_REVOKED if found < epoch else RefusalKind.EPOCH_UNKNOWN
    return Refusal.of(kind, "epoch", epoch, found)


def _check_writer(place: WriterSlice, record: WriterRecord, generation: int) -> Refusal | None:
    wanted = (place.rank, 0, place.offset, place.length)
    if record[:4] != wanted:
        return Refusal.of(RefusalKind.WRITER, f"writer[{place.rank}]", wanted, record[:4])
    if record.generation != generation:
        return Refusal.of(
            RefusalKind.WRITER_GENERATION,
            f"writer[{place.rank}].generation",
            generation,
            record.generation,
        )
    return None


def _check_coverage(header: Header, wanted: Iterable[int]) -> Refusal | None:
    slots = header.fixed.slots
    if slots % 8 and header.coverage[-1] >> (slots % 8):
        return Refusal.of(RefusalKind.PADDING, "coverage", "no bit past the slots", "a bit")
    for slot in wanted:
        if not 0 <= slot < slots or not header.covers(slot):
            return Refusal.of(RefusalKind.COVERAGE, f"slot[{slot}]", "written", "not written")
    return None

# SPDX-License-Identifier: Apache-2.0
"""Contracts of `kvsafe.seal`: lengths, places, bitmaps, names, tags, bounded text."""

from __future__ import annotations

from kvsafe.seal.header import FixedPart, Header, bitmap
from kvsafe.seal.layer_names import compress_names, expand_names
from kvsafe.seal.layout import (
    FIXED,
    MAX_DOCUMENT_BYTES,
    MAX_HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_SLOTS,
    MAX_WRITERS,
    PAGE_BYTES,
    RECORD,
    RowLayout,
    coverage_bytes,
    record_offset,
    round_up,
)
from kvsafe.seal.opening import _check_epoch, _check_lengths
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.suites import TAG_BYTES, tags_equal


def rounding_is_the_least_multiple(value: int, step: int) -> None:
    """`round_up` gives the smallest multiple of `step` that is not below `value`."""
    assert 0 <= value <= 1 << 40
    assert 1 <= step <= 1 << 20
    found = round_up(value, step)
    assert found % step == 0
    assert value <= found < value + step


def coverage_holds_every_slot(slots: int) -> None:
    """A bitmap has room for every slot and no byte too many."""
    assert 1 <= slots <= MAX_SLOTS
    size = coverage_bytes(slots)
    assert 8 * size >= slots
    assert 8 * (size - 1) < slots


def records_end_at_the_header_tag(pages: int, writers: int, index: int) -> None:
    """Writer records lie side by side and end where the header tag begins."""
    assert 1 <= pages <= MAX_HEADER_BYTES // PAGE_BYTES
    assert 1 <= writers <= MAX_WRITERS
    assert 0 <= index < writers
    header = pages * PAGE_BYTES
    here = record_offset(header, writers, index)
    after = record_offset(header, writers, index + 1)
    assert after - here == RECORD.size
    assert after <= header - TAG_BYTES
    assert record_offset(header, writers, writers) == header - TAG_BYTES


def _fixed(
    header: int, payload: int, identity: int, geometry: int, writers: int, slots: int, key: int
) -> FixedPart:
    return FixedPart(
        magic=b"",
        version=1,
        suite=1,
        flags=0,
        key_id=b"",
        epoch=0,
        generation=0,
        sealed_at=0,
        payload_bytes=payload,
        header_bytes=header,
        identity_bytes=identity,
        geometry_bytes=geometry,
        writers=writers,
        slots=slots,
        key_bytes=key,
        reserved=0,
        identity_digest=b"",
        geometry_digest=b"",
    )


def accepted_lengths_lie_inside_the_row(
    row: int, header: int, payload: int, identity: int, geometry: int, writers: int
) -> None:
    """Step 3: whatever lengths a header declares, those that pass never leave the row."""
    assert FIXED.size <= row <= 1 << 40
    assert min(header, payload, identity, geometry, writers) >= 0
    fixed = _fixed(header, payload, identity, geometry, writers, 3, 36)
    spans = _check_lengths(fixed, row)
    if isinstance(spans, Refusal):
        return
    assert FIXED.size == spans.key < spans.coverage < spans.identity
    assert spans.identity + identity == spans.geometry
    assert spans.geometry + geometry == spans.filler <= spans.records
    assert spans.records + writers * RECORD.size == spans.tag
    assert spans.tag + TAG_BYTES == header <= row - payload
    assert payload >= 1


def accepted_keys_and_slots_are_bounded(slots: int, key: int) -> None:
    """Step 3: key and bitmap lengths out of their limits never pass, those within do."""
    assert 0 <= slots < 1 << 32
    assert 0 <= key < 1 << 32
    fixed = _fixed(2 * PAGE_BYTES, 4096, 100, 100, 1, slots, key)
    passed = not isinstance(_check_lengths(fixed, 3 * PAGE_BYTES), Refusal)
    assert passed == (1 <= slots <= MAX_SLOTS and 1 <= key <= MAX_KEY_BYTES)


def planned_rows_hold_their_parts(identity: int, slots: int, first: int, second: int) -> None:
    """A planned row has whole pages and slices that tile its payload."""
    assert 1 <= identity <= MAX_DOCUMENT_BYTES
    assert 1 <= slots <= MAX_SLOTS
    assert 1 <= first <= 1 << 30
    assert 1 <= second <= 1 << 30
    layout = RowLayout.plan(
        identity_bytes=identity, key_bytes=36, slots=slots, slice_bytes=(first, second)
    )
    assert layout.header_bytes % PAGE_BYTES == 0 == layout.row_bytes % PAGE_BYTES
    assert layout.slices[0].offset == 0
    assert layout.slices[1].offset == first
    assert layout.payload_bytes == first + second
    assert layout.header_bytes + layout.payload_bytes <= layout.row_bytes
    used = FIXED.size + 36 + coverage_bytes(slots) + identity
    assert used <= layout.record_offset(0)


def a_bitmap_says_what_was_written(slots: int, written: int, asked: int) -> None:
    """Exactly the slots that were written are covered."""
    assert 1 <= slots <= 20
    assert 0 <= written < slots
    assert 0 <= asked < slots
    header = Header(_fixed(0, 0, 0, 0, 0, slots, 0), b"", bitmap(slots, (written,)), ())
    assert header.covers(asked) == (asked == written)


def only_the_present_epoch_passes(found: int, epoch: int) -> None:
    """Step 6: an older epoch is revoked, a newer one unknown, the same one fine."""
    assert 0 <= found < 1 << 64
    assert 0 <= epoch < 1 << 64
    verdict = _check_epoch(found, epoch)
    if found == epoch:
        assert verdict is None
    else:
        assert verdict is not None
        older = verdict.kind is RefusalKind.EPOCH_REVOKED
        assert older == (found < epoch)


def equal_tags_are_equal_bytes(left: bytes, right: bytes) -> None:
    """Two tags are taken for equal only when they are."""
    assert len(left) <= 2
    assert len(right) <= 2
    assert tags_equal(left, right) == (left == right)


def names_come_back(first: str, second: str, third: str) -> None:
    """Compressed layer names expand to what they were."""
    assert len(first) <= 4
    assert len(second) <= 4
    assert len(third) <= 4
    names = [first, second, third]
    assert expand_names(compress_names(names)) == names


def numbered_names_come_back(start: int, step: int) -> None:
    """Names in a row, as models have them, too."""
    assert 0 <= start <= 1000
    assert 1 <= step <= 100
    names = [f"l.{start + index * step}.attn" for index in range(3)]
    texts = compress_names(names)
    assert len(texts) == 1
    assert expand_names(texts) == names

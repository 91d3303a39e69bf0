# SPDX-License-Identifier: Apache-2.0
"""Seal: workers tag their slices, the scheduler side closes the header.

A row is sealed in two movements. Each writer tags its finished slice and leaves a record in
the header page. When all have reported, the sealer checks the records, writes the rest of
the header and its tag. Before the tag stands, no reader can accept the row.
"""

import time
from dataclasses import dataclass

from kvsafe.seal.header import FixedPart, WriterRecord, read_record
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.layout import (
    CONTEXT,
    FIXED,
    FORMAT_VERSION,
    MAGIC,
    MAX_KEY_BYTES,
    RECORD,
    LayoutError,
    RowLayout,
    Slice,
    coverage_bytes,
)
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.suites import TAG_BYTES, Suite


def slice_context(
    identity_digest: bytes, epoch: int, generation: int, place: Slice, key: bytes
) -> bytes:
    """The bytes that go before a slice under its tag: whose, which place, which chunk.

    Binding them here as well as in the header keeps a slice from standing for another one
    even before its header exists.
    """
    numbers = CONTEXT.pack(place.rank, len(key), place.offset, place.length, epoch, generation)
    return numbers + identity_digest + key


def require_suite(suite: Suite, keyring: Keyring) -> None:
    """Raises `ValueError` when the ring was made for another suite.

    Else public subkeys could make tags that pass for keyed ones.
    """
    if keyring.suite != suite.label:
        raise ValueError(f"suite {suite.label} with a key ring of suite {keyring.suite}")


@dataclass(frozen=True, slots=True)
class SealSetting:
    """What is the same for every chunk that this engine seals."""

    suite: Suite
    keyring: Keyring
    layout: RowLayout
    identity_document: bytes
    identity_digest: bytes

    def __post_init__(self) -> None:
        require_suite(self.suite, self.keyring)


class SliceSealer:
    """The writer's half: tag one slice of a row and leave the record.

    One object per writer; it touches nothing of a row but its own record.
    """

    def __init__(self, setting: SealSetting, index: int) -> None:
        self._suite = setting.suite
        self._subkey = setting.keyring.subkey(setting.keyring.active, "slice")
        self._identity_digest = setting.identity_digest
        self._place = setting.layout.slices[index]
        self._start = setting.layout.header_bytes + self._place.offset
        self._record = setting.layout.record_offset(index)

    def seal_slice(self, row: memoryview, key: bytes, epoch: int, generation: int) -> None:
        """Tag the finished slice in `row` (uint8, a whole row) for this key and generation."""
        place = self._place
        context = slice_context(self._identity_digest, epoch, generation, place, key)
        body = row[self._start : self._start + place.length]
        tag = self._suite.tag_slice(self._subkey, context, body)
        RECORD.pack_into(
            row,
            self._record,
            place.rank,
            0,
            place.offset,
            place.length,
            generation,
            tag,
        )


class HeaderSealer:
    """The scheduler side's half: check the records and close the header."""

    def __init__(self, setting: SealSetting, geometry_document: bytes) -> None:
        """Raises `LayoutError` when the documents leave no room for a key in the header."""
        self._setting = setting
        self._layout = setting.layout
        self._subkey = setting.keyring.subkey(setting.keyring.active, "header")
        self._geometry_digest = setting.suite.digest(geometry_document)
        self._documents = setting.identity_document + geometry_document
        self._geometry_bytes = len(geometry_document)
        layout = setting.layout
        self._tag_at = layout.header_bytes - TAG_BYTES
        self._records_at = layout.record_offset(0)
        self._tail = memoryview(
            bytes(layout.row_bytes - layout.header_bytes - layout.payload_bytes)
        )
        used = FIXED.size + coverage_bytes(layout.slots) + len(self._documents)
        self._key_room = min(self._records_at - used, MAX_KEY_BYTES)
        if self._key_room < 1:
            raise LayoutError(
                f"geometry document of {len(geometry_document)} bytes: too long by "
                f"{1 - self._key_room} for a header of {layout.header_bytes}"
            )

    def seal(
        self, row: memoryview, key: bytes, epoch: int, generation: int, coverage: bytes
    ) -> Refusal | None:
        """Close the header of `row`, or say which writer's record is missing.

        `generation` is the number of the present allocation of the row; a record that
        carries another one was left by an earlier use and does not count. Raises
        `LayoutError` for a key or a coverage that does not fit the layout.
        """
        if not 1 <= len(key) <= self._key_room:
            raise LayoutError(f"key of {len(key)} bytes, room for {self._key_room}")
        if len(coverage) != coverage_bytes(self._layout.slots):
            raise LayoutError(f"coverage of {len(coverage)} bytes for {self._layout.slots} slots")
        for index, place in enumerate(self._layout.slices):
            record = read_record(row, self._layout.record_offset(index))
            if refusal := _check_record(record, place, generation):
                return refusal
        self._write(row, key, epoch, generation, coverage)
        return None

    def _write(
        self, row: memoryview, key: bytes, epoch: int, generation: int, coverage: bytes
    ) -> None:
        setting, layout = self._setting, self._layout
        fixed = FixedPart(
            magic=MAGIC,
            version=FORMAT_VERSION,
            suite=setting.suite.value,
            flags=0,
            key_id=setting.keyring.active.key_id,
            epoch=epoch,
            generation=generation,
            sealed_at=int(time.time()),
            payload_bytes=layout.payload_bytes,
            header_bytes=layout.header_bytes,
            identity_bytes=len(setting.identity_document),
            geometry_bytes=self._geometry_bytes,
            writers=len(layout.slices),
            slots=layout.slots,
            key_bytes=len(key),
            reserved=0,
            identity_digest=setting.identity_digest,
            geometry_digest=self._geometry_digest,
        )
        head = b"".join((FIXED.pack(*fixed), key, coverage, self._documents))
        row[: self._records_at] = head.ljust(self._records_at, b"\0")
        row[layout.header_bytes + layout.payload_bytes : layout.row_bytes] = self._tail
        row[self._tag_at : layout.header_bytes] = setting.suite.tag(
            self._subkey, row[: self._tag_at]
        )


def _check_record(record: WriterRecord, place: Slice, generation: int) -> Refusal | None:
    if record.generation != generation:
        return Refusal.of(
            RefusalKind.WRITER_GENERATION,
            f"writer[{place.rank}].generation",
            generation,
            record.generation,
        )
    found = (record.rank, record.offset, record.length)
    wanted = (place.rank, place.offset, place.length)
    if found != wanted:
        return Refusal.of(RefusalKind.WRITER, f"writer[{place.rank}]", wanted, found)
    return None

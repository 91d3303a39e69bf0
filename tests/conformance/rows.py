# SPDX-License-Identifier: Apache-2.0
"""Writes rows from spec/chunk.md alone, also wrong ones that carry right tags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.reader import suites
from conformance.reader.chunk_reader import (
    CONTEXT,
    FIXED,
    MAGIC,
    PAGE,
    RECORD,
    TAG_BYTES,
    Expected,
    Fixed,
)


def pad(data: bytes) -> bytes:
    """Zero bytes up to the next page."""
    return data.ljust(-(-len(data) // PAGE) * PAGE, b"\0")


def key_of(suite: str, secret: bytes) -> tuple[bytes, bytes]:
    """Key id and key that a writer with `secret` uses."""
    return next(iter(suites.ring(suite, (secret,)).items()))


def retag_header(row: bytes, suite: str, secret: bytes, header_bytes: int) -> bytes:
    """`row` with a header tag that is right for what the header now says."""
    subkey = suites.subkey(suite, key_of(suite, secret)[1], "header")
    end = header_bytes - TAG_BYTES
    return row[:end] + suites.tag(suite, subkey, row[:end]) + row[header_bytes:]


@dataclass(frozen=True)
class Draft:
    """All that a row says. `fixed` and `records` override single fields of what follows from it.

    `records` maps the index of a writer to fields of its record that are written as given; slice
    tags are made for what the header says, unless `records` gives a `tag`.
    """

    suite: str
    secret: bytes
    key: bytes
    epoch: int
    generation: int
    identity: bytes
    geometry: bytes
    slots: int
    coverage: bytes
    slices: tuple[bytes, ...]
    header_bytes: int = PAGE
    sealed_at: int = 0
    fixed: dict[str, Any] = field(default_factory=dict)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    filler: bytes = b""
    tail: bytes = b""

    def fixed_part(self) -> bytes:
        """Bytes 0 .. 144."""
        values = {
            "magic": MAGIC,
            "version": 1,
            "suite": suites.NUMBERS[self.suite],
            "flags": 0,
            "key_id": key_of(self.suite, self.secret)[0],
            "epoch": self.epoch,
            "generation": self.generation,
            "sealed_at": self.sealed_at,
            "payload_bytes": sum(map(len, self.slices)),
            "header_bytes": self.header_bytes,
            "identity_bytes": len(self.identity),
            "geometry_bytes": len(self.geometry),
            "writers": len(self.slices),
            "slots": self.slots,
            "key_bytes": len(self.key),
            "reserved": 0,
            "identity_digest": suites.digest(self.suite, self.identity),
            "geometry_digest": suites.digest(self.suite, self.geometry),
        }
        return FIXED.pack(*{**values, **self.fixed}.values())

    def record(self, rank: int, identity_digest: bytes) -> bytes:
        """One writer record."""
        subkey = suites.subkey(self.suite, key_of(self.suite, self.secret)[1], "slice")
        values: dict[str, Any] = {
            "rank": rank,
            "reserved": 0,
            "offset": sum(map(len, self.slices[:rank])),
            "length": len(self.slices[rank]),
            "generation": self.generation,
            "tag": b"",
        }
        values.update(self.records.get(rank, {}))
        if not values["tag"]:
            place = (values["rank"], len(self.key), values["offset"], values["length"])
            context = CONTEXT.pack(*place, self.epoch, values["generation"], identity_digest)
            values["tag"] = suites.slice_tag(
                self.suite, subkey, context + self.key, self.slices[rank]
            )
        return RECORD.pack(*values.values())

    def row(self) -> bytes:
        """The whole row."""
        start = self.fixed_part()
        digest = Fixed._make(FIXED.unpack(start)).identity_digest
        parts = (start, self.key, self.coverage, self.identity, self.geometry, self.filler)
        records = b"".join(self.record(rank, digest) for rank in range(len(self.slices)))
        space = self.header_bytes - TAG_BYTES - len(records)
        header = b"".join(parts)[:space].ljust(space, b"\0") + records + bytes(TAG_BYTES)
        whole = pad(header + b"".join(self.slices) + self.tail)
        return retag_header(whole, self.suite, self.secret, self.header_bytes)

    def but(self, **changes: Any) -> Draft:
        """A copy with other fields."""
        return replace(self, **changes)

    def expected(self, wanted: Sequence[int] = ()) -> Expected:
        """The expectation of a reader that the draft's row was made for."""
        lengths = [len(content) for content in self.slices]
        places = tuple((sum(lengths[:rank]), length) for rank, length in enumerate(lengths))
        return Expected(
            suite=self.suite,
            secrets=() if self.suite == "blake3" else (self.secret,),
            key=self.key,
            epoch=self.epoch,
            identity=self.identity,
            geometry=self.geometry,
            header_bytes=self.header_bytes,
            payload_bytes=sum(lengths),
            slots=self.slots,
            slices=places,
            wanted=tuple(wanted),
        )

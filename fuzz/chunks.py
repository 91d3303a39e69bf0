# SPDX-License-Identifier: Apache-2.0
"""Small engines that seal and open, and an editor that forges their rows.

Offsets and tags are written down again from `spec/chunk.md`: an editor that followed a wrong
struct of the code under test would hide the fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache

from blake3 import blake3

from conformance.reader import suites
from conformance.reader.chunk_reader import Expected
from kvsafe.seal import cbor, header, opening, sealing
from kvsafe.seal.identity import IDENTITY_FIELDS, Identity
from kvsafe.seal.keyring import Keyring, SealKey
from kvsafe.seal.layout import RowLayout
from kvsafe.seal.suites import Suite

SECRETS = tuple(hashlib.sha256(bytes([number])).digest() for number in range(3))
NAMES = hashlib.sha256(b"names").digest()
KEY = bytes(range(32)) + (1).to_bytes(4, "big")
EPOCH = 7
GENERATION = 11

FIXED = {
    "magic": (0, 8), "version": (8, 2), "suite": (10, 2), "flags": (12, 4), "key_id": (16, 8),
    "epoch": (24, 8), "generation": (32, 8), "sealed_at": (40, 8), "payload_bytes": (48, 8),
    "header_bytes": (56, 4), "identity_bytes": (60, 4), "geometry_bytes": (64, 4),
    "writers": (68, 4), "slots": (72, 4), "key_bytes": (76, 2), "reserved": (78, 2),
    "identity_digest": (80, 32), "geometry_digest": (112, 32),
}  # fmt: skip
RECORD = {
    "rank": (0, 4), "reserved": (4, 4), "offset": (8, 8), "length": (16, 8),
    "generation": (24, 8), "tag": (32, 32),
}  # fmt: skip
SHAPES = (((96, 64), 5), ((64, 64), 8), ((300,), 1), ((40, 4056), 9))
"""Slice bytes and slots of each engine; the last one fills its page to the end."""

_SAMPLES: dict[str, object] = {
    "text": "a", "count": 1, "flag": False, "number": 1.5, "digest": bytes(32), "list": ["x", 2],
    "map": {"b": 1, "a": [True, None, 2.5]},
}  # fmt: skip


def identity_values(number: int = 0) -> dict[str, object]:
    """Values of a whole identity; another `number` gives another model."""
    values = {field.name: _SAMPLES[field.kind] for field in IDENTITY_FIELDS}
    return {**values, "model": f"model-{number}", "groups": [{"kind": "full", "window": number}]}


class Engine:
    """One engine with its keys, its layout and its documents."""

    def __init__(self, suite: Suite, slices: tuple[int, ...], slots: int) -> None:
        self.suite, self.slices, self.slots = suite, slices, slots
        self.document = Identity.of(identity_values()).document
        pages = {"pages": 4096, "slices": list(slices)}
        ranks = list(range(len(slices)))
        self.geometry = cbor.encode({"workers": [[ranks, cbor.encode(pages)]]})
        self.keyring = self._ring()
        self.layout = RowLayout.plan(
            identity_bytes=len(self.document), key_bytes=len(KEY), slots=slots, slice_bytes=slices
        )
        digest = suite.digest(self.document)
        what = (suite, self.keyring, self.layout, self.document, digest)
        self.setting = sealing.SealSetting(*what)
        self.opener = opening.Opener(opening.Expectation(*what, self.geometry))

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """What the independent reader is given: the active secret and one older."""
        return () if self.suite is Suite.BLAKE3 else SECRETS[:2]

    def _ring(self) -> Keyring:
        if self.suite is Suite.BLAKE3:
            return Keyring.unkeyed()
        active, older = (SealKey.of(secret) for secret in SECRETS[:2])
        return Keyring(self.suite.label, active, name_secret=NAMES, older=[older])

    def chunk(
        self, key: bytes, epoch: int, generation: int, fill: int, covered: Iterable[int]
    ) -> bytearray:
        """A row that kvsafe sealed over what an earlier use left in it."""
        layout = self.layout
        body = blake3(bytes([fill])).digest(layout.payload_bytes)
        row = bytearray(b"\xee" * layout.header_bytes + body).ljust(layout.row_bytes, b"\xee")
        view = memoryview(row)
        for index in range(len(self.slices)):
            sealer = sealing.SliceSealer(self.setting, index)
            sealer.seal_slice(view, key, epoch, generation)
        head = sealing.HeaderSealer(self.setting, self.geometry)
        refusal = head.seal(view, key, epoch, generation, header.bitmap(self.slots, [*covered]))
        if refusal is not None:
            raise ValueError(f"our own row was refused: {refusal}")
        return row

    def expected(self, key: bytes, epoch: int, wanted: tuple[int, ...]) -> Expected:
        """The same expectation, as the independent reader takes it."""
        layout = self.layout
        places = tuple((place.offset, place.length) for place in layout.slices)
        return Expected(
            self.suite.label, self.secrets, key, epoch, self.document, self.geometry,
            layout.header_bytes, layout.payload_bytes, self.slots, places, wanted,
        )  # fmt: skip

    def record_at(self, index: int) -> int:
        """First byte of a writer record of this engine's rows."""
        return self.layout.header_bytes - 32 - 64 * (len(self.slices) - index)

    def places(self) -> dict[str, int]:
        """First byte of every part of this engine's rows."""
        key = 144 + len(KEY)
        identity = key + (self.slots + 7) // 8
        geometry = identity + len(self.document)
        end = self.layout.header_bytes + self.layout.payload_bytes
        return {
            "key": 144, "coverage": key, "identity": identity, "geometry": geometry,
            "filler": geometry + len(self.geometry), "records": self.record_at(0),
            "payload": self.layout.header_bytes, "tail": min(end, self.layout.row_bytes - 1),
        }  # fmt: skip

    def retag_header(self, row: bytearray, secret: int = 0) -> None:
        """Give the header, at whatever length it declares, the right tag."""
        at = int.from_bytes(row[56:60], "little")
        if 32 <= at <= len(row):
            row[at - 32 : at] = suites.tag(
                self.suite.label, self.subkey("header", secret), bytes(row[: at - 32])
            )

    def retag_slices(self, row: bytearray, secret: int = 0) -> None:
        """Give every slice of this engine's layout the tag that its own header asks for."""
        number = int.from_bytes(row[76:78], "little")
        key = bytes(row[144 : 144 + number])
        for index, place in enumerate(self.layout.slices):
            start = self.layout.header_bytes + place.offset
            context = (
                place.rank.to_bytes(4, "little") + len(key).to_bytes(4, "little")
                + place.offset.to_bytes(8, "little") + place.length.to_bytes(8, "little")
                + bytes(row[24:40]) + bytes(row[80:112]) + key
            )  # fmt: skip
            body = bytes(row[start : start + place.length])
            tag = suites.slice_tag(self.suite.label, self.subkey("slice", secret), context, body)
            at = self.record_at(index) + 32
            row[at : at + 32] = tag

    def subkey(self, purpose: str, secret: int = 0) -> bytes:
        """A subkey, derived by the independent reader's own code."""
        return _subkey(self.suite.label, purpose, secret)


@cache
def _subkey(suite: str, purpose: str, secret: int) -> bytes:
    ring = suites.ring(suite, () if suite == "blake3" else (SECRETS[secret],))
    return suites.subkey(suite, next(iter(ring.values())), purpose)


@cache
def engines() -> tuple[Engine, ...]:
    """Every suite with every shape."""
    return tuple(Engine(suite, *shape) for shape in SHAPES for suite in Suite)


@cache
def sealed(engine: int, variant: int) -> bytes:
    """A chunk of `engines()[engine]`; variant 0 is asked for, the others differ in one thing."""
    made = engines()[engine]
    key, epoch, generation, fill = KEY, EPOCH, GENERATION, 1
    covered: Iterable[int] = range(made.slots)
    if variant == 1:
        key = KEY[:-5] + b"\xff" + KEY[-4:]
    elif variant == 2:
        epoch -= 1
    elif variant == 3:
        generation += 1
    elif variant == 4:
        fill = 2
    elif variant == 5:
        covered = range(0, made.slots, 2)
    return bytes(made.chunk(key, epoch, generation, fill, covered))


VARIANTS = 6

# SPDX-License-Identifier: Apache-2.0
"""Small sealed rows for the tests of `seal/`, and an editor that forges them.

Offsets and tags are written down here again from `spec/chunk.md`, not taken from the code: an
edit that followed a wrong struct would hide the fault that it is to show.
"""

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

from kvsafe.seal import cbor
from kvsafe.seal.header import Header, bitmap
from kvsafe.seal.keyring import Keyring, SealKey, derive_subkey
from kvsafe.seal.layout import RowLayout
from kvsafe.seal.opening import Expectation, Opener
from kvsafe.seal.refusal import Refusal
from kvsafe.seal.sealing import HeaderSealer, SealSetting, SliceSealer
from kvsafe.seal.suites import Suite
from tests.seal.test_identity import sample

SECRET = bytes.fromhex("00a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8f")
OLD_SECRET = SECRET[::-1]
NAMES = bytes(byte ^ 0x5A for byte in SECRET)
KEY = bytes(range(32)) + (1).to_bytes(4, "big")
OTHER_KEY = bytes(range(1, 33)) + (1).to_bytes(4, "big")
EPOCH = 7
GENERATION = 11
GEOMETRY = cbor.encode({"workers": [[[0, 1], cbor.encode({"pages": 4096, "tensors": 2})]]})

FIELDS = {
    "magic": (0, 8),
    "version": (8, 2),
    "suite": (10, 2),
    "flags": (12, 4),
    "key_id": (16, 8),
    "epoch": (24, 8),
    "generation": (32, 8),
    "sealed_at": (40, 8),
    "payload_bytes": (48, 8),
    "header_bytes": (56, 4),
    "identity_bytes": (60, 4),
    "geometry_bytes": (64, 4),
    "writers": (68, 4),
    "slots": (72, 4),
    "key_bytes": (76, 2),
    "reserved": (78, 2),
    "identity_digest": (80, 32),
    "geometry_digest": (112, 32),
}
RECORD_FIELDS = {
    "rank": (0, 4),
    "reserved": (4, 4),
    "offset": (8, 8),
    "length": (16, 8),
    "generation": (24, 8),
    "tag": (32, 32),
}


def keyring(suite: Suite, secrets: Sequence[bytes] = (SECRET,)) -> Keyring:
    """A ring of `suite` whose first secret is the active one; public constants if unkeyed."""
    if suite is Suite.BLAKE3:
        return Keyring.unkeyed()
    active, *older = (SealKey.of(secret) for secret in secrets)
    return Keyring(suite.label, active, name_secret=NAMES, older=older)


def identity(**changes: object) -> bytes:
    """A whole identity document with `changes`."""
    return cbor.encode({**sample(), **changes})


@dataclass
class World:
    """One engine: its layout, what it seals with, what it expects."""

    suite: Suite = Suite.BLAKE3_KEYED
    slices: tuple[int, ...] = (96, 64)
    slots: int = 5
    secrets: tuple[bytes, ...] = (SECRET,)
    document: bytes = field(default_factory=identity)
    geometry: bytes = GEOMETRY

    def __post_init__(self) -> None:
        self.keyring = keyring(self.suite, self.secrets)
        self.layout = RowLayout.plan(
            identity_bytes=len(self.document),
            key_bytes=len(KEY),
            slots=self.slots,
            slice_bytes=self.slices,
        )
        digest = self.suite.digest(self.document)
        self.setting = SealSetting(self.suite, self.keyring, self.layout, self.document, digest)
        self.opener = Opener(
            Expectation(self.suite, self.keyring, self.layout, self.document, digest, self.geometry)
        )

    def payload(self, fill: int = 1) -> bytes:
        """Some content, another one for every `fill`."""
        return blake3(fill.to_bytes(8, "big")).digest(self.layout.payload_bytes)

    def chunk(
        self,
        key: bytes = KEY,
        *,
        epoch: int = EPOCH,
        generation: int = GENERATION,
        fill: int = 1,
        covered: Iterable[int] | None = None,
    ) -> bytearray:
        """A row that kvsafe sealed."""
        layout = self.layout
        row = bytearray(b"\xee" * layout.header_bytes + self.payload(fill)).ljust(
            layout.row_bytes, b"\xee"
        )
        view = memoryview(row)
        for index in range(len(self.slices)):
            SliceSealer(self.setting, index).seal_slice(view, key, epoch, generation)
        slots = list(range(self.slots) if covered is None else covered)
        sealer = HeaderSealer(self.setting, self.geometry)
        refusal = sealer.seal(view, key, epoch, generation, bitmap(self.slots, slots))
        assert refusal is None
        return row

    def open(
        self,
        row: bytes | bytearray,
        key: bytes = KEY,
        epoch: int = EPOCH,
        wanted: Iterable[int] = (),
    ) -> Header | Refusal:
        """All ten steps, as this engine."""
        return self.opener.open(memoryview(row), key, epoch, wanted)

    def part(self, name: str) -> tuple[int, int]:
        """First byte and length of a variable part of this world's rows."""
        lengths = {
            "key": len(KEY),
            "coverage": (self.slots + 7) // 8,
            "identity": len(self.document),
            "geometry": len(self.geometry),
        }
        at = 144
        for part, length in lengths.items():
            if part == name:
                return at, length
            at += length
        records = self.layout.header_bytes - 32 - 64 * len(self.slices)
        places = {
            "filler": (at, records - at),
            "records": (records, 64 * len(self.slices)),
            "header tag": (self.layout.header_bytes - 32, 32),
            "payload": (self.layout.header_bytes, self.layout.payload_bytes),
        }
        end = self.layout.header_bytes + self.layout.payload_bytes
        return {**places, "tail": (end, self.layout.row_bytes - end)}[name]

    def retag(self, row: bytearray, secret: bytes = SECRET) -> bytearray:
        """Give the header, at whatever length it declares, the right tag."""
        header_bytes = get(row, "header_bytes")
        if 32 <= header_bytes <= len(row):
            message = bytes(row[: header_bytes - 32])
            row[header_bytes - 32 : header_bytes] = spec_tag(
                self.suite, self.subkey(secret, "header"), message
            )
        return row

    def subkey(self, secret: bytes, purpose: str) -> bytes:
        """The subkey of `secret`; that of the public constant in the unkeyed suite."""
        if self.suite is Suite.BLAKE3:
            secret = Keyring.unkeyed().active.secret
        return derive_subkey(secret, self.suite.label, purpose)  # type: ignore[arg-type]

    def forge(self, row: bytearray, **fields: int | bytes) -> bytearray:
        """Set fields of the fixed part, then give the header the right tag."""
        for name, value in fields.items():
            put(row, name, value)
        return self.retag(row)

    def forge_record(self, row: bytearray, index: int, **fields: int | bytes) -> bytearray:
        """Set fields of a writer record, then give the header the right tag."""
        at = self.part("records")[0] + 64 * index
        for name, value in fields.items():
            offset, length = RECORD_FIELDS[name]
            row[at + offset : at + offset + length] = as_bytes(value, length)
        return self.retag(row)

    def forge_part(self, row: bytearray, name: str, data: bytes, at: int = 0) -> bytearray:
        """Overwrite bytes of a variable part, then give the header the right tag."""
        start = self.part(name)[0] + at
        row[start : start + len(data)] = data
        return self.retag(row)

    def with_document(self, row: bytearray, name: str, document: bytes) -> bytearray:
        """Put another identity or geometry document of any length into the row, digest too."""
        parts = {"identity": self.document, "geometry": self.geometry, name: document}
        start = self.part("identity")[0]
        records = self.part("records")[0]
        both = parts["identity"] + parts["geometry"]
        row[start:records] = both.ljust(records - start, b"\0")
        put(row, f"{name}_bytes", len(document))
        put(row, f"{name}_digest", self.suite.digest(document))
        return self.retag(row)


def as_bytes(value: int | bytes, length: int) -> bytes:
    """A field's bytes: numbers are little-endian."""
    return value if isinstance(value, bytes) else value.to_bytes(length, "little")


def put(row: bytearray, name: str, value: int | bytes) -> None:
    """Set one field of the fixed part."""
    offset, length = FIELDS[name]
    row[offset : offset + length] = as_bytes(value, length)


def get(row: bytes | bytearray, name: str) -> int:
    """Read one number of the fixed part."""
    offset, length = FIELDS[name]
    return int.from_bytes(row[offset : offset + length], "little")


def spec_tag(suite: Suite, subkey: bytes, message: bytes) -> bytes:
    """The tag of section 4, written down again."""
    if suite in (Suite.HMAC_SHA256, Suite.AES256_GMAC):
        return hmac.digest(subkey, message, "sha256")
    if suite is Suite.BLAKE3_KEYED:
        return blake3(message, key=subkey).digest()
    return blake3(subkey + message).digest()


def spec_slice_tag(suite: Suite, subkey: bytes, context: bytes, content: bytes) -> bytes:
    """The tag of section 4.3, written down again."""
    if suite is not Suite.AES256_GMAC:
        return spec_tag(suite, subkey, context + content)
    mac = spec_gmac(hmac.digest(subkey, b"\1" + context, "sha256"), content)
    return hmac.digest(subkey, b"\2" + context + mac, "sha256")


def spec_gmac(key: bytes, message: bytes) -> bytes:
    """GMAC by the book (SP 800-38D, 6.3, 6.4 and 7.1), from AES on single blocks; slow."""
    encryptor = Cipher(AES(key), ECB()).encryptor()
    hash_key, mask = (encryptor.update(block) for block in (bytes(16), bytes(15) + b"\1"))
    state = 0
    padded = message + bytes(-len(message) % 16) + (8 * len(message)).to_bytes(8, "big") + bytes(8)
    for at in range(0, len(padded), 16):
        state = _times(state ^ int.from_bytes(padded[at : at + 16], "big"), hash_key)
    return (state ^ int.from_bytes(mask, "big")).to_bytes(16, "big")


def _times(left: int, right: bytes) -> int:
    """Product in the field of GCM: bits are counted from the left."""
    product, power = 0, int.from_bytes(right, "big")
    for place in range(127, -1, -1):
        product ^= power if left >> place & 1 else 0
        power = power >> 1 ^ (0xE1 << 120 if power & 1 else 0)
    return product


def kind_of(answer: Header | Refusal) -> str:
    """`opened`, or the refusal as `number field`."""
    return f"{answer.number} {answer.field}" if isinstance(answer, Refusal) else "opened"

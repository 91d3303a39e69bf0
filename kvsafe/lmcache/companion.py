# SPDX-License-Identifier: Apache-2.0
"""Companion entries: what makes a chunk on a peer's server an attested one.

A companion is the header of the sealed row, byte for byte, and a tail that binds it to the names
under which the chunk's parts lie on the server. Header and chunk together are the row again, so a
reader opens it in all ten steps, like a row from any other place; the header's tags cover every
byte of the chunk, since the conversion between row and chunk loses none.

Tail, little-endian: magic (8), version (2), parts (2), zero (4), digest over the parts' names and
lengths (32), tag (32). The tag has the subkey of the header's own key and a label that no header
begins with.
"""

import struct
from collections.abc import Sequence
from typing import Final

from kvsafe.seal.header import read_fixed
from kvsafe.seal.keyring import Keyring, SealKey
from kvsafe.seal.layout import FIXED
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.suites import TAG_BYTES, Suite, tags_equal

MAGIC: Final = b"\x89kvs-lm\n"
VERSION: Final = 1
TAIL: Final = struct.Struct("<8sHHI32s32s")
TAIL_BYTES: Final = TAIL.size
_LABEL: Final = b"kvsafe 1 lmcache companion"

Part = tuple[str, int]
"""Name and length of one part of a chunk: one worker's."""


class Companions:
    """Makes and judges the companions of one engine. Thread-safe."""

    def __init__(self, suite: Suite, keyring: Keyring, header_bytes: int) -> None:
        self._suite = suite
        self._keyring = keyring
        self._header_bytes = header_bytes

    @property
    def length(self) -> int:
        """Bytes of every companion of this engine."""
        return self._header_bytes + TAIL_BYTES

    def make(self, header: memoryview, parts: Sequence[Part]) -> bytes:
        """The companion of a sealed row's header. Raises `ValueError` for an unsealed one."""
        key = self._keyring.get(read_fixed(header).key_id)
        if key is None or len(header) != self._header_bytes:
            raise ValueError("no sealed header of this engine")
        names = self._names(parts)
        tag = self._tag(key, header, names)
        return bytes(header) + TAIL.pack(MAGIC, VERSION, len(parts), 0, names, tag)

    def judge(self, companion: memoryview, parts: Sequence[Part]) -> Refusal | None:
        """Whether this companion was made for a chunk with these parts; None if it was."""
        if len(companion) != self.length:
            return _refuse("length", self.length, len(companion))
        header, tail = companion[: self._header_bytes], companion[self._header_bytes :]
        magic, version, count, zero, names, tag = TAIL.unpack(tail)
        if magic != MAGIC:
            return _refuse("magic", MAGIC, magic)
        if (version, zero) != (VERSION, 0):
            return _refuse("version", VERSION, version)
        key = self._keyring.get(read_fixed(header[: FIXED.size]).key_id)
        if key is None:
            return Refusal.of(RefusalKind.KEY_ID, "companion.key_id", "one in the key ring", "none")
        if not tags_equal(tag, self._tag(key, header, names)):
            return _refuse("tag", "the tag of these bytes", "another")
        if count != len(parts) or not tags_equal(names, self._names(parts)):
            return _refuse("names", "the names asked for", "those of another chunk")
        return None

    def _names(self, parts: Sequence[Part]) -> bytes:
        lines = "".join(f"{length} {name}\n" for name, length in parts)
        return self._suite.digest(lines.encode())

    def _tag(self, key: SealKey, header: memoryview, names: bytes) -> bytes:
        subkey = self._keyring.subkey(key, "header")
        return self._suite.tag_parts(subkey, (_LABEL, header[-TAG_BYTES:], names))


def _refuse(field: str, expected: object, found: object) -> Refusal:
    return Refusal.of(RefusalKind.PEER_COMPANION, field, expected, found)

# SPDX-License-Identifier: Apache-2.0
"""Chunk files of the disk tier, looked at and damaged from outside the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvsafe.seal.header import FixedPart
from kvsafe.seal.identity import IdentityDamaged, decode_identity
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.layout import MAGIC
from kvsafe.seal.opening import read_outer
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.suites import Suite

__all__ = ["ChunkFile", "chunk_files", "flip_byte", "look_at", "quarantined_files"]

QUARANTINE = "kvsafe-quarantine"
SHOWN_FIELDS = (
    "model_type",
    "layers",
    "kv_heads",
    "head_size",
    "dtype",
    "rope",
    "block_size",
    "weights",
)


@dataclass(frozen=True)
class ChunkFile:
    """One authentic chunk: where it lies and what its header says. Lengths in bytes."""

    path: Path
    size: int
    start: bytes
    fixed: FixedPart
    key: bytes
    identity: Mapping[str, object]

    @property
    def tokens(self) -> int:
        """Tokens whose KV this chunk holds."""
        blocks, block = self.identity["blocks_per_chunk"], self.identity["block_size"]
        return int(str(blocks)) * int(str(block))

    def lines(self) -> Iterator[str]:
        """The file and its header, for people."""
        fixed, suite = self.fixed, Suite(self.fixed.suite)
        yield f"file      {self.path.name[:16]}...{self.path.suffix}, {self.size:,} bytes"
        yield f"begins    {self.start.hex(' ')}   {_printable(self.start)}   (the kvsafe magic)"
        key_id = f"{fixed.key_id.hex()[:8]}..."
        yield f"header    {fixed.header_bytes:,} bytes, its tag is right under key {key_id}"
        yield f"  suite   {suite.value} ({suite.label}), epoch {fixed.epoch}"
        yield f"  key     {self.key[:6].hex()}... (block hash), group {_group(self.key)}"
        yield f"  identity {len(self.identity)} fields, digest {fixed.identity_digest[:6].hex()}..."
        for name in SHOWN_FIELDS:
            yield f"    {name:<11} {_value(self.identity.get(name))}"
        yield f"payload   {fixed.payload_bytes:,} bytes, under a tag of its own:"
        yield f"  the KV of {self.tokens} tokens of the prompt"


def chunk_files(store: Path) -> list[Path]:
    """Every whole chunk file of a disk tier, without those in quarantine."""
    return sorted(path for path in store.rglob("*.bin") if QUARANTINE not in path.parts)


def quarantined_files(store: Path) -> list[Path]:
    """Every file that was moved aside after a refusal."""
    return sorted((store / QUARANTINE).glob("*.bin"))


def look_at(path: Path, keyring: Keyring) -> ChunkFile | Refusal:
    """Check the header of a chunk file (steps 1 to 4) and read it. Raises `OSError`."""
    row = memoryview(path.read_bytes())
    outer = read_outer(row, Suite.named(keyring.suite), keyring)
    if isinstance(outer, Refusal):
        return outer
    fixed, spans, _ = outer
    identity = decode_identity(row[spans.identity : spans.geometry])
    if isinstance(identity, IdentityDamaged):
        return Refusal.of(RefusalKind.IDENTITY_DAMAGED, "identity", "a document", identity)
    return ChunkFile(
        path=path,
        size=len(row),
        start=bytes(row[: len(MAGIC)]),
        fixed=fixed,
        key=bytes(row[spans.key : spans.coverage]),
        identity=identity,
    )


def flip_byte(path: Path, offset: int) -> tuple[int, int]:
    """Invert one bit of the byte at `offset`; returns the byte before and after."""
    with path.open("r+b") as file:
        file.seek(offset)
        before = file.read(1)[0]
        after = before ^ 0x01
        file.seek(offset)
        file.write(bytes([after]))
    return before, after


def _group(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")


def _printable(data: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 else "." for byte in data)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, bytes):
        return f"{value[:6].hex()}..."
    return str(value)

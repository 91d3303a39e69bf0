# SPDX-License-Identifier: Apache-2.0
"""Chunk files as the demo sees them: authentic ones are told, others are refused."""

from __future__ import annotations

from pathlib import Path

from kvsafe.cli.demo.chunkfile import (
    QUARANTINE,
    ChunkFile,
    chunk_files,
    flip_byte,
    look_at,
    quarantined_files,
)
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.seal.rows import KEY, SECRET, World, identity, keyring


def _chunk(folder: Path, world: World) -> Path:
    path = folder / "ab" / "cdef.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(world.chunk())
    return path


def test_an_authentic_chunk_is_told(tmp_path: Path) -> None:
    world = World(document=identity(blocks_per_chunk=2, block_size=16))
    found = look_at(_chunk(tmp_path, world), world.keyring)
    assert isinstance(found, ChunkFile)
    assert (found.key, found.tokens) == (KEY, 32)
    text = "\n".join(found.lines())
    assert "89 6b 76 73 61 66 65 0a" in text
    assert KEY[:6].hex() in text and "blake3-keyed" in text and "32 tokens" in text
    assert SECRET.hex() not in text


def test_a_flipped_bit_changes_one_bit_and_the_header_still_stands(tmp_path: Path) -> None:
    world = World()
    path = _chunk(tmp_path, world)
    before = path.read_bytes()
    offset = world.layout.header_bytes + 5
    was, is_now = flip_byte(path, offset)
    after = path.read_bytes()
    assert [
        place for place, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]
    ] == [offset]
    assert (was, is_now) == (before[offset], after[offset])
    assert (was ^ is_now).bit_count() == 1
    assert isinstance(look_at(path, world.keyring), ChunkFile)
    answer = world.open(after)
    assert isinstance(answer, Refusal) and answer.kind is RefusalKind.PAYLOAD_TAG


def test_a_damaged_header_and_a_foreign_key_are_refused(tmp_path: Path) -> None:
    world = World()
    path = _chunk(tmp_path, world)
    other = look_at(path, keyring(world.suite, (SECRET[::-1],)))
    assert isinstance(other, Refusal) and other.kind is RefusalKind.KEY_ID
    flip_byte(path, 200)
    damaged = look_at(path, world.keyring)
    assert isinstance(damaged, Refusal) and damaged.kind is RefusalKind.HEADER_TAG


def test_quarantine_and_unfinished_files_are_no_chunks(tmp_path: Path) -> None:
    path = _chunk(tmp_path, World())
    (path.parent / "cdef.bin_17.tmp").touch()
    aside = tmp_path / QUARANTINE / "1001-cdef.bin"
    aside.parent.mkdir()
    aside.touch()
    assert chunk_files(tmp_path) == [path]
    assert quarantined_files(tmp_path) == [aside]
    assert chunk_files(tmp_path / "nothing") == quarantined_files(tmp_path / "nothing") == []

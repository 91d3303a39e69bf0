# SPDX-License-Identifier: Apache-2.0
"""Chunks that were sealed long ago still open, here and in kvsafe."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest

from conformance.reader.__main__ import from_json, main
from conformance.reader.chunk_reader import Expected
from tests.conformance import vectors, worlds

# The files are pinned here as well: whoever changes one must say so in two places.
SHA256 = {
    "blake3-keyed": "7912097de9b5ccd09240daf12ae0db656bb06867e7db5f8973b51f339c6d6d81",
    "aes256-gmac": "14c3f7a8043607ea82f1936315c1eee14c9fb94609895ce857eec1b157a05aaf",
    "aes256-gmac-two-writers": "d3d21d1c9da4f9d4c23d441e23a2146d86c06ef9c13d7e7eb2c3098167bc0ca4",
    "hmac-sha256": "14c2046546c86c41c33a0f2670316ae4f3c9c3d815214bc56ee8b5bd43babee9",
    "blake3": "55d81ffcbd1b0709b253fd702463f083da5100978e8bde504730e6fda8abb55c",
    "blake3-keyed-two-writers": "990a76fd67dddfe57f75d6da8da0b3d06f679dbd8493edd4e1ed621737e6dbb0",
}


def golden(name: str) -> tuple[bytes, Expected, list[dict[str, int]]]:
    """A golden row, the expectation that accepts it, and the edits that must be refused."""
    text = (vectors.FOLDER / f"{name}.json").read_text("utf-8")
    about: dict[str, Any] = json.loads(text)
    row = (vectors.FOLDER / f"{name}.bin").read_bytes()
    assert about["sha256"] == hashlib.sha256(row).hexdigest()
    return row, Expected(**from_json(text)), about["refused"]


@pytest.mark.parametrize("name", vectors.NAMES)
def test_both_readers_accept(name: str) -> None:
    row, expected, _ = golden(name)
    assert worlds.ask(row, expected) == worlds.Both(0, 0)


@pytest.mark.parametrize("name", vectors.NAMES)
def test_both_readers_refuse_each_edit(name: str) -> None:
    row, expected, refused = golden(name)
    assert len(refused) >= 10
    for edit in refused:
        changed = bytearray(row)
        changed[edit["byte"]] ^= edit["xor"]
        both = worlds.ask(bytes(changed), expected)
        assert both == worlds.Both(edit["number"], edit["number"])


@pytest.mark.parametrize("name", vectors.NAMES)
def test_kvsafe_still_seals_the_same_bytes(name: str) -> None:
    row, _, _ = golden(name)
    made = vectors.drafts()[name]
    assert hashlib.sha256(row).hexdigest() == SHA256[name]
    assert made.row() == row
    sealed = worlds.seal_with_kvsafe(made)
    (now,) = struct.unpack_from("<Q", sealed, 40)
    assert sealed == made.but(sealed_at=now).row()


@pytest.mark.parametrize("name", vectors.NAMES)
def test_the_command_accepts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    row, expect = (str(vectors.FOLDER / f"{name}{end}") for end in (".bin", ".json"))
    assert main([row, "--expect", expect, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["accepted"] is True
    assert answer["not_checked"] == []


def test_there_are_no_others() -> None:
    files = {path.name for path in vectors.FOLDER.iterdir() if path.suffix in (".bin", ".json")}
    assert files == {f"{name}{end}" for name in vectors.NAMES for end in (".bin", ".json")}

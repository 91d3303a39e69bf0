# SPDX-License-Identifier: Apache-2.0
"""The inputs in the repository: small, and quiet: what once found something finds it no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.corpus import HOME, in_folder, keep, stored
from fuzz.execute import check
from fuzz.targets import PLACES, make

FAST = [name for name in PLACES if name != "lifecycle"]


@pytest.mark.parametrize("name", FAST)
def test_the_corpus_of_a_target_is_quiet(name: str) -> None:
    target = make(name)
    try:
        found = {data.hex(): str(check(target, data)) for data in stored(name)}
        assert {data: text for data, text in found.items() if text != "None"} == {}
    finally:
        target.close()


def test_every_file_belongs_to_a_target_and_all_are_small() -> None:
    files = [path for path in HOME.iterdir() if path.is_file()]
    assert {path.stem for path in files} <= set(PLACES)
    assert {path.suffix for path in files} <= {".hex"}
    assert sum(path.stat().st_size for path in files) < 500_000


def test_a_folder_of_inputs_is_kept_and_read(tmp_path: Path) -> None:
    first = keep(tmp_path / "x", b"long input")
    keep(tmp_path / "x", b"short")
    assert keep(tmp_path / "x", b"long input") == first
    assert list(in_folder(tmp_path / "x")) == [b"short", b"long input"]
    assert list(in_folder(tmp_path / "none")) == []

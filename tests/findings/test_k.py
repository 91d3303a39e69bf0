# SPDX-License-Identifier: Apache-2.0
"""K: a batch of the file tier ends with its first bad key; a torn file counts as stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block

ROW = 4096
OFFSETS = [0, ROW, 2 * ROW]


def _rows() -> memoryview:
    return np.full((3, ROW), 7, dtype=np.uint8).data


def _paths(folder: Path) -> list[str]:
    return [str(folder / name / "chunk.bin") for name in ("a", "b", "c")]


def _block(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"a file where a folder should be")


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(
            "b", marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason="finding K")
        ),
        pytest.param("c", id="the last one"),
    ],
)
def test_a_key_that_cannot_be_stored_costs_no_other_key(tmp_path: Path, bad: str) -> None:
    _block(tmp_path, bad)
    with pytest.raises(OSError):
        batch_store_block(_paths(tmp_path), _rows(), OFFSETS, ROW, use_o_direct=False)
    stored = {name for name in "abc" if (tmp_path / name / "chunk.bin").is_file()}
    assert stored == {"a", "b", "c"} - {bad}


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(
            1, marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason="finding K")
        ),
        pytest.param(2, id="the last one"),
    ],
)
def test_a_key_that_cannot_be_loaded_costs_no_other_key(tmp_path: Path, bad: int) -> None:
    paths, rows = _paths(tmp_path), np.zeros((3, ROW), dtype=np.uint8).data
    batch_store_block(paths, _rows(), OFFSETS, ROW, use_o_direct=False)
    Path(paths[bad]).unlink()
    with pytest.raises(OSError) as caught:
        batch_load_block(paths, rows, OFFSETS, ROW, use_o_direct=False)
    assert caught.value.num_succeeded == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "torn",
    [
        pytest.param(
            True, marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason="finding K")
        ),
        pytest.param(False, id="nothing there"),
    ],
)
def test_a_store_that_succeeded_can_be_loaded(tmp_path: Path, torn: bool) -> None:
    path = tmp_path / "a" / "chunk.bin"
    if torn:
        path.parent.mkdir()
        path.write_bytes(b"half a chunk")
    batch_store_block([str(path)], _rows(), [0], ROW, use_o_direct=False)
    assert path.stat().st_size == ROW

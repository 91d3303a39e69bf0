# SPDX-License-Identifier: Apache-2.0
"""H: names of temporary files come from the global, seeded random numbers."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import numpy as np
from vllm.v1.kv_offload.tiering.fs import io

ROW = 4096


def suffix_of_a_process(seed: int) -> str:
    """What a process that was seeded as vLLM seeds every worker calls its temporary files.

    The name is kept per thread, so that a fresh thread is as good as a fresh process.
    """
    found: list[str] = []
    state = random.getstate()

    def start() -> None:
        random.seed(seed)
        found.append(io._get_tmp_suffix())

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    random.setstate(state)
    return found[0]


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="finding H")
def test_two_engines_with_one_seed_use_two_names() -> None:
    assert suffix_of_a_process(0) != suffix_of_a_process(0)


def test_two_seeds_use_two_names() -> None:
    assert suffix_of_a_process(0) != suffix_of_a_process(1)


def _store(path: Path) -> None:
    rows = np.ones((1, ROW), dtype=np.uint8).data
    io.batch_store_block([str(path)], rows, [0], ROW, use_o_direct=False)


@pytest.mark.xfail(strict=True, raises=OSError, reason="finding H")
def test_what_a_killed_process_left_behind_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "a" / "chunk.bin"
    path.parent.mkdir()
    (path.parent / f"{path.name}{io._get_tmp_suffix()}").write_bytes(b"half a chunk")
    _store(path)


def test_nothing_left_behind_nothing_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "a" / "chunk.bin"
    _store(path)
    assert path.read_bytes() == b"\x01" * ROW

# SPDX-License-Identifier: Apache-2.0
"""Our manager over a proven `kvsafe-fs`, with real files, is what the machine says."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.lockstep.ours_disk import OursOnDisk, ours_on_disk
from tests.lockstep.runs import TIMEOUT_S, hold


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_our_manager_over_files_is_the_machine(policy: str, tmp_path: Path) -> None:
    hold(ours_on_disk(policy, tmp_path / "world"), OursOnDisk.weights, 40, 80)

# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiering manager over its file tier, with real files, is what the machine says."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.lockstep.disk import OnDisk, on_disk
from tests.lockstep.runs import TIMEOUT_S, hold


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_file_tier_is_the_machine(policy: str, tmp_path: Path) -> None:
    hold(on_disk(policy, tmp_path / "store"), OnDisk.weights, 60, 80)

# SPDX-License-Identifier: Apache-2.0
"""vLLM's `CPUOffloadingManager`, LRU and ARC, is what the machine says."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.lockstep.primary import Primary, primary
from tests.lockstep.runs import TIMEOUT_S, hold


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_primary_tier_is_the_machine(policy: str) -> None:
    hold(primary(policy), Primary.weights, 600)

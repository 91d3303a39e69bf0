# SPDX-License-Identifier: Apache-2.0
"""vLLM's `TieringOffloadingManager` over tiers by hand is what the machine says."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.lockstep.hand import Tiered, tiered
from tests.lockstep.runs import TIMEOUT_S, hold


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_tiering_manager_is_the_machine(policy: str) -> None:
    hold(tiered(policy), Tiered.weights, 400, 80)

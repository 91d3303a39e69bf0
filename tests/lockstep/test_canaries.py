# SPDX-License-Identifier: Apache-2.0
"""A fault in a real class, and each of vLLM's known differences, is seen by the lockstep."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.lockstep.book import DIVERGENCES
from tests.lockstep.canaries import PRIMARY, TIERED
from tests.lockstep.hand import tiered
from tests.lockstep.primary import primary
from tests.lockstep.runs import goes_red

RUNS = 400


@pytest.mark.parametrize("fault", PRIMARY, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_primary_tier_is_seen(fault: type[Any]) -> None:
    policy = "arc" if "Learns" in fault.__name__ else "lru"
    assert goes_red(primary(policy, fault), RUNS)


@pytest.mark.parametrize("fault", TIERED, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_tiering_manager_is_seen(fault: type[Any]) -> None:
    assert goes_red(tiered("lru", manager=fault), RUNS, 80)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_known_difference_is_a_difference(name: str) -> None:
    """Where vLLM does as the machine, its name has to go from the list."""
    others = tuple(other for other in DIVERGENCES if other != name)
    assert goes_red(tiered("lru", as_vllm=others), RUNS, 80)

# SPDX-License-Identifier: Apache-2.0
"""Our manager over proven tiers is what the machine says, and a fault in it is seen."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvsafe.engine.manager import KVSafeManager
from kvsafe.engine.requests.parking import Parking
from kvsafe.engine.requests.waits import Claims, Waits
from kvsafe.engine.rows.shield import Shield
from kvsafe.engine.tiers.proving import ProvingTier
from tests.lockstep.ours import Ours, ours
from tests.lockstep.runs import TIMEOUT_S, goes_red, hold


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_our_manager_is_the_machine(policy: str, tmp_path: Path) -> None:
    hold(ours(policy, tmp_path / "world"), Ours.weights, 60, 100)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _keys(self: Parking, request: str, keys: Collection[Any]) -> list[Any]:
    return list(keys)


# The last is the first seed that finds it, as of today; the search goes on from there.
FAULTS: dict[str, tuple[type[Any], str, Callable[..., Any], int]] = {
    "a proof accepts anything": (ProvingTier, "_open", _nothing, 278),
    "nothing shields what is awaited": (Shield, "lift", _nothing, 215),
    "no claims": (Claims, "make", _nothing, 96),
    "promotions are begun again": (Waits, "start_promotion", _nothing, 300),
    "a key is parked on": (Parking, "waiting", _keys, 62),
    "a reset does not wait for seals": (KVSafeManager, "settle", _nothing, 7),
    "a refused chunk is not withdrawn": (KVSafeManager, "fail_chunks", _nothing, 5),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_ours_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, wrong, first = FAULTS[name]
    monkeypatch.setattr(owner, method, wrong)
    assert goes_red(ours("lru", tmp_path / "world"), 400, 100, first)

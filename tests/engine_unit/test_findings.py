# SPDX-License-Identifier: Apache-2.0
"""The findings of the world are clean on ours: a miss, a recompute or a refusal, never more."""

from __future__ import annotations

import pytest

from tests.support.scenes import SCENES, demand_clean

# A2 plants chunks without a seal; its sequence is in test_waits.py. What each of the others must
# still have done, so that clean does not mean idle.
DONE = {
    "B": {"load": 2},
    "C": {"did_reset_connector": 2},
    "E": {"promotion": 1, "announcement": 1},
    "N": {"load": 1},
    "Q": {"row_audited": 3},
    "R": {"promotion": 2, "did_reset_connector": 1},
    "S": {"tried_reset_connector": 1, "step": 8},
    "T": {"promotion": 1},
}


def test_every_scene_is_here() -> None:
    assert {*DONE, "A2"} == set(SCENES)


@pytest.mark.parametrize("name", sorted(DONE))
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_sequence_of_a_finding_is_clean(name: str, policy: str) -> None:
    scene = SCENES[name]
    plan = scene.in_setting(policy=policy).plan("kvsafe")
    outcome = demand_clean(plan)
    for what, least in DONE[name].items():
        assert outcome.counts[what] >= least, (what, outcome.counts)

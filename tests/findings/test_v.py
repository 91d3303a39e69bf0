# SPDX-License-Identifier: Apache-2.0
"""V: two requests that have loaded hold the blocks that either needs, for ever."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

pytest.importorskip("vllm")

from fuzz.world import Event, Plan, Setting, from_seed
from kvsafe.engine.requests.turns import Turns
from tests.support.scenes import WrongWorld, demand, demand_clean

SETTING = Setting(
    windows=(0, 12), blocks_per_chunk=2, rows=5, blocks=24, seats=1, no_prefix_cache=True
)
# The first stores a prefix; the second and the third load it at the same time.
ARRIVALS = (
    Event("arrive", 231, 175, 0),
    Event("arrive", 32, 33, 0),
    Event("arrive", 29, 53, 0),
)
PLAN = Plan("stock", SETTING, ARRIVALS)
OURS = replace(PLAN, flavour="kvsafe")
FOUND_BY = 310861


@pytest.mark.xfail(strict=True, raises=WrongWorld, reason="finding V")
def test_two_requests_that_load_at_once_both_run() -> None:
    demand(PLAN, "starved")


def test_one_that_loads_runs() -> None:
    demand_clean(PLAN.without(2, 3))


def test_both_run_with_more_blocks() -> None:
    demand_clean(replace(PLAN, setting=replace(SETTING, blocks=25)))


@pytest.mark.parametrize("plan", [OURS, from_seed(FOUND_BY, "kvsafe")], ids=["cut", "as found"])
def test_with_ours_one_waits_for_its_turn(plan: Plan) -> None:
    demand_clean(plan)


def test_without_turns_they_do_not_run_with_ours_either() -> None:
    with mock.patch.object(Turns, "fits", lambda *_: True), pytest.raises(WrongWorld):
        demand(OURS, "starved")


def test_the_one_that_waits_loads_all_the_same() -> None:
    loads = demand_clean(OURS).counts["load"]
    assert loads == demand_clean(OURS.without(2, 3)).counts["load"] + 1

# SPDX-License-Identifier: Apache-2.0
"""V: two requests that have loaded hold the blocks that either needs, for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from fuzz.world import Event, Plan, Setting
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


@pytest.mark.xfail(strict=True, raises=WrongWorld, reason="finding V")
def test_two_requests_that_load_at_once_both_run() -> None:
    demand(PLAN, "starved")


@pytest.mark.xfail(strict=True, raises=WrongWorld, reason="finding V")
def test_they_do_not_with_ours_either() -> None:
    demand(replace(PLAN, flavour="kvsafe"), "starved")


def test_one_that_loads_runs() -> None:
    demand_clean(PLAN.without(2, 3))


def test_both_run_with_more_blocks() -> None:
    demand_clean(replace(PLAN, setting=replace(SETTING, blocks=25)))

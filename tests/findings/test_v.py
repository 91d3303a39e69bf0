# SPDX-License-Identifier: Apache-2.0
"""V: two requests that have loaded hold the blocks that either needs, for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
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


def _burst(blocks: int) -> Plan:
    """A stored prefix of 32 tokens, and two requests that load 24 of them at the same time."""
    asked = (("ask", 32), ("idle", 19), ("ask", 34), ("ask", 31))
    events = [Event(name, 0, n, 1) if name == "ask" else Event(name, n) for name, n in asked]
    return Plan("kvsafe", replace(SETTING, rows=12, blocks=blocks), tuple(events))


@pytest.mark.parametrize(("blocks", "later"), [(24, True), (25, False)])
def test_nobody_waits_where_both_fit_and_both_load(blocks: int, *, later: bool) -> None:
    told: list[bool] = []
    fits = Turns.fits

    def listen(self: Turns, request: Any, computed: int) -> bool:
        told.append(fits(self, request, computed))
        return told[-1]

    with mock.patch.object(Turns, "fits", listen):
        assert demand_clean(_burst(blocks)).counts["load"] == 2
    assert told.count(True) == 2
    assert (False in told) is later


# Two load at the same time; both loads fail, and there is room for one of them at a time.
FAILING = Plan(
    "kvsafe",
    Setting(windows=(12, 12, 0), rows=26, blocks=39, budget=8, seats=1, no_prefix_cache=True),
    (
        *(Event("ask", 0, 59, 1), Event("idle")),
        *(Event("ask", 0, tokens, 1) for tokens in (39, 37, 57)),
        Event("damage_row"),
    ),
)


def test_a_request_whose_load_failed_lets_others_pass() -> None:
    demand_clean(FAILING)
    with mock.patch.object(Turns, "stands_back", lambda *_: False), pytest.raises(WrongWorld):
        demand(FAILING, "starved")

# SPDX-License-Identifier: Apache-2.0
"""Loads that workers have not ended: whose failure concerns whom."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import OffloadKey

from fuzz.world import Event, Plan, Setting
from kvsafe.engine.requests.waits import Waits
from kvsafe.engine.rows.loads import OpenLoads
from tests.support.scenes import demand_clean

KEYS = [OffloadKey(bytes([number]) * 36) for number in range(3)]
BAD = frozenset((bytes(KEYS[1]),))

ABORTED_THEN_FAILED = Plan(
    "kvsafe",
    Setting(windows=(0,), blocks_per_chunk=1, rows=1, blocks=26, tiers=(), budget=16, seats=1),
    (
        Event("arrive", 3, 0, 0),
        Event("idle", 0, 0, 0),
        Event("arrive", 7, 96, 0),
        Event("step", 0, 0, 0),
        Event("abort", 0, 0, 0),
        Event("copy", 0, 0, 0),
        Event("copy_fault", 0, 0, 0),
    ),
)


@pytest.fixture
def loads() -> OpenLoads:
    made = OpenLoads(30.0)
    made.begin("one", KEYS)
    made.begin("other", KEYS[2:])
    return made


def test_an_open_load_and_one_that_ended_just_now_have_failed(loads: OpenLoads) -> None:
    assert loads.take_failed(BAD) == ["one"]
    loads.end("one", KEYS)
    assert loads.take_failed(BAD) == ["one"]
    assert loads.take_failed(BAD) == []


def test_who_has_ended_before_its_load_is_not_told(loads: OpenLoads) -> None:
    loads.leave("one")
    assert loads.take_failed(BAD) == []
    loads.end("one", KEYS)
    assert loads.take_failed(BAD) == []


def test_who_ends_with_its_load_is_not_told(loads: OpenLoads) -> None:
    loads.end("one", KEYS)
    loads.leave("one")
    assert loads.take_failed(BAD) == []


def test_a_request_of_the_same_name_is_told_again(loads: OpenLoads) -> None:
    loads.leave("one")
    loads.begin("one", KEYS)
    assert loads.take_failed(BAD) == ["one"]


def test_a_reset_does_not_make_vllm_forget_what_it_has_reserved() -> None:
    waits = Waits(30.0)
    waits.fails("one")
    waits.clear()
    assert waits.failed == {"one": 0}
    waits.forget("one")
    assert waits.failed == {}


def test_the_failed_load_of_an_aborted_request_is_not_remembered() -> None:
    demand_clean(ABORTED_THEN_FAILED)


def test_the_world_notices_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenLoads, "leave", lambda self, request: None)
    with pytest.raises(LookupError, match="remembered for ever"):
        demand_clean(ABORTED_THEN_FAILED)


def test_who_only_waits_is_not_barred() -> None:
    """A promotion takes a few steps: the chunk may be good in a tier, and is fetched from there."""
    waits = Waits(30.0)
    waits.fails("one")
    for _ in range(5):
        waits.begin("one")
        waits.end("one")
    assert not waits.is_barred("one")
    waits.begin("one")
    waits.end("one", offered=True)
    assert waits.is_barred("one")
    waits.loads("one")
    assert not waits.is_barred("one")

# SPDX-License-Identifier: Apache-2.0
"""The whole connector as one world: clean on ours, repeatable, busy, and able to find a fault.

The long run is `python -m fuzz.world --flavour kvsafe --runs N`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from fuzz.world import FLAVOURS, Event, Plan, Setting, from_bytes, from_seed, read, run
from fuzz.world.ours import HandEngine
from fuzz.world.shrink import shrink
from kvsafe.engine import scheduler as scheduler_module
from kvsafe.engine.manager import KVSafeManager
from kvsafe.engine.requests.waits import Waits
from kvsafe.engine.scheduler import KVSafeConnectorScheduler
from tests.support.scenes import SCENES

RUNS = 70


@contextlib.contextmanager
def _nothing(self: Any, scheduler_output: Any) -> Iterator[None]:
    yield


def _forgetful_reset(self: Any) -> None:
    super(KVSafeConnectorScheduler, self).reset_cache()


def _ready_at_once(self: Any, keys: Any, req_context: Any, success: bool = True) -> None:
    TieringOffloadingManager.complete_store(self, keys, req_context, success)


def _no_bytes(self: Any, row: Any) -> None:
    self.landed += [block for _, block in row.blocks]


# What is switched off, what stands in its place, and seeds of which one finds it.
SEEDED = {
    "a request never tires": (Waits, "tires", lambda *_: False, range(20, 30)),
    "a load copies nothing": (HandEngine, "copy_in", _no_bytes, range(6)),
    "a load is never unpinned": (KVSafeManager, "complete_load", lambda *_: None, range(6)),
    "ready before it is sealed": (KVSafeManager, "complete_store", _ready_at_once, range(4)),
    "resets do not count (C)": (
        KVSafeConnectorScheduler,
        "reset_cache",
        _forgetful_reset,
        range(8),
    ),
    "given up blocks stay (S)": (
        scheduler_module,
        "give_up_stored_blocks",
        lambda *_: None,
        range(46, 58),
    ),
}
# The same for guards whose finding has a scene.
STAGED = {
    "T": (Waits, "is_spent", lambda *_: False),
    "Q": (KVSafeConnectorScheduler, "_is_covered", lambda *_: True),
    "N": (KVSafeConnectorScheduler, "_reloading_requests_spared", _nothing),
    "C": (KVSafeConnectorScheduler, "reset_cache", _forgetful_reset),
}


def test_many_worlds_are_clean_and_busy() -> None:
    total: Counter[str] = Counter()
    for seed in range(RUNS):
        outcome = run(seed)
        assert outcome.clean, f"seed {seed}: {outcome.finding}"
        total.update(outcome.counts)
    for what in ("load", "promotion_done", "cascade_done", "row_audited", "did_reset_blocks"):
        assert total[what] > 10, (what, total[what])


@pytest.mark.parametrize("name", sorted(SEEDED))
def test_a_seeded_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, fault, seeds = SEEDED[name]
    monkeypatch.setattr(owner, attribute, fault)
    assert any(run(seed).finding is not None for seed in seeds)


@pytest.mark.parametrize("name", sorted(STAGED))
def test_a_guard_that_is_off_is_missed_in_its_scene(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = SCENES[name].plan("kvsafe")
    assert run(plan).clean
    owner, attribute, fault = STAGED[name]
    monkeypatch.setattr(owner, attribute, fault)
    assert run(plan).finding is not None


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_same_plan_is_the_same_world(flavour: str) -> None:
    for seed in (3, 4):
        plan = from_seed(seed, flavour)
        again = read(plan.line())
        assert again == plan
        assert run(plan).digest == run(again).digest
    assert run(3, flavour).digest != run(4, flavour).digest


def test_any_bytes_are_a_world() -> None:
    assert from_bytes(b"", "kvsafe").events == ()
    for data in (b"", bytes(range(256)), b"\xff" * 120):
        assert run(data, "kvsafe").clean
    with pytest.raises(ValueError, match="not a plan"):
        read('["stock", {}, []]')


def test_an_engine_sleeps_although_a_tier_hangs() -> None:
    asked = (Event("ask", 0, 16, 2), Event("step"), Event("hang"), Event("go", 3))
    later = (Event("clock", 29), Event("step")) * 12
    for policy in ("lru", "arc"):
        setting = Setting(rows=8, tiers=(False,), policy=policy)
        outcome = run(Plan("kvsafe", setting, (*asked, *later)))
        assert outcome.clean, outcome.finding
        assert outcome.counts["cascade"] > 0 == outcome.counts["promotion"]
        # Awake until the job was given up and the tier has had its time, then no more.
        assert 4 < outcome.counts["did_step"] < 10 < outcome.counts["tried_step"]


def test_a_finding_gets_smaller_and_stays_the_same() -> None:
    noise = tuple(Event("ask", 2, 8, 1) for _ in range(6))
    scene = SCENES["C"]
    plan = Plan("stock", Setting(policy="arc", rows=6), (*noise, *scene.acts))
    found = run(plan).finding
    assert found is not None and found.kind == "died"

    def finds(smaller: Plan) -> bool:
        finding = run(smaller).finding
        return finding is not None and finding.signature == found.signature

    small = shrink(plan, finds, 120)
    assert len(small.events) <= len(scene.acts) and small.setting.policy == "lru"
    assert finds(small)

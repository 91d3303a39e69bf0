# SPDX-License-Identifier: Apache-2.0
"""Bytes by chance are worlds in which something happens: damage, resets, dead and bad tiers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

pytest.importorskip("vllm")

from fuzz.world import from_bytes, read, run
from fuzz.world.driver import Driver
from fuzz.world.raw import ACT_BYTES, HEAD_BYTES, MIXES, THEMES

RUNS = 40
# What a driver did, and what came of it: in how many of the runs at least. Some half of what
# `python -m fuzz.world --bytes` finds, so that a change of one theme does not fail here.
KINDS = {
    "damage": (("did_damage_row", "did_damage_object", "did_copy_fault"), 5),
    "resets": (("did_reset_connector", "did_reset_all", "did_reset_running", "did_pause"), 7),
    "kills": (("did_kill",), 4),
    "bad tiers": (("did_tier_fail", "did_lose", "did_lie", "did_mute", "did_hang"), 8),
    "loads": (("load",), 10),
    "promotions": (("promotion",), 8),
    "refusals": (("refused",), 8),
    "failed transfers": (("load_failed", "promotion_failed", "cascade_failed"), 4),
}


def _inputs(seed: int) -> list[bytes]:
    dice = random.Random(seed)
    return [dice.randbytes(dice.randint(64, 420)) for _ in range(RUNS)]


def test_bytes_by_chance_reach_every_kind_of_trouble() -> None:
    seen: Counter[str] = Counter()
    for data in _inputs(1):
        outcome = run(data, "kvsafe")
        for kind, (names, _) in KINDS.items():
            seen[kind] += any(outcome.counts[name] for name in names)
    few = {kind: seen[kind] for kind, (_, least) in KINDS.items() if seen[kind] < least}
    assert few == {}


def test_no_bytes_are_a_world_in_which_nothing_is_done() -> None:
    assert from_bytes(b"", "kvsafe").events == ()
    assert from_bytes(b"\0", "kvsafe").events != ()


@pytest.mark.parametrize("flavour", ["kvsafe", "stock"])
def test_every_act_is_one_that_the_driver_knows(flavour: str) -> None:
    known = {name for theme in THEMES.values() for phrase in theme.phrases for name in phrase}
    for mix in range(len(MIXES)):
        for data in _inputs(mix)[:5]:
            plan = from_bytes(bytes([mix]) + data, flavour)
            assert read(plan.line()) == plan
            known |= {event.name for event in plan.events}
    assert [name for name in known if not hasattr(Driver, f"_{name}")] == []


def test_five_bytes_change_one_act_and_nothing_else() -> None:
    head = bytes((5, 40, 1, 2, 3, 4))
    assert len(head) == HEAD_BYTES
    story = from_bytes(head, "kvsafe").events
    act = bytes((7, 3, 11, 12, 13))
    assert len(act) == ACT_BYTES
    changed = from_bytes(head + act, "kvsafe").events
    unlike = [at for at, pair in enumerate(zip(story, changed, strict=True)) if pair[0] != pair[1]]
    assert unlike == [7] and changed[7][1:] == (11, 12, 13)
    # Behind the end of the story, and a part of an act: nothing.
    for nothing in (bytes((255, 3, 11, 12, 13)), act[:4]):
        assert from_bytes(head + nothing, "kvsafe").events == story


def test_seeds_of_setting_and_story_are_two() -> None:
    plans = [from_bytes(bytes((6, 40, *seeds)), "kvsafe") for seeds in ((1, 0, 1, 0), (1, 0, 2, 0))]
    assert plans[0].setting == plans[1].setting and plans[0].events != plans[1].events
    other = from_bytes(bytes((6, 40, 2, 0, 1, 0)), "kvsafe")
    assert other.events == plans[0].events and other.setting != plans[0].setting

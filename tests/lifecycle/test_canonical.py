# SPDX-License-Identifier: Apache-2.0
"""Tiers that change places are the same world: the representative does not depend on numbers."""

from __future__ import annotations

import random

import pytest

from kvsafe.lifecycle.canonical import _rename, canonical
from kvsafe.lifecycle.explorer import moves_of, successors
from kvsafe.lifecycle.words import State
from kvsafe.lifecycle.worlds import LRU, default, small


@pytest.mark.parametrize(
    ("size", "name"), [(default, "both ways"), (small, "damage"), (default, "promotions")]
)
def test_tiers_may_change_places(size: object, name: str) -> None:
    [world] = [world for world in size(LRU) if world.name == name]  # type: ignore[operator]
    assert world.tiers == 2
    dice, moves, unlike = random.Random(1), moves_of(world), 0
    state: State = world.start()
    for step in range(800):
        follows = [after for _, after in successors(world, moves, state) if after is not None]
        state = dice.choice(follows) if follows and step % 40 else world.start()
        swapped = _rename(world, state, tuple(range(world.keys)), (1, 0))
        assert canonical(world, swapped) == canonical(world, state)
        assert canonical(world, canonical(world, state)) == canonical(world, state)
        unlike += swapped != state
    assert unlike > 20

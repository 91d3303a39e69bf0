# SPDX-License-Identifier: Apache-2.0
"""Every target finds its seeded faults, in time, and is quiet where none is seeded."""

from __future__ import annotations

from itertools import islice

import pytest

from fuzz.canaries import Canary, Hunt, every, hunt, inputs, named, of_target
from fuzz.execute import check
from fuzz.targets import PLACES, make

# Starting vLLM's scheduler takes longer than all the others together.
SLOW = ("lifecycle",)
QUIET = 60
# Executions over a folder are slow; those that need many of them are for `kvsafe fuzz canaries`.
PATIENCE = {"disk": 600, "machine": 600}
FAST = [name for name in PLACES if name not in SLOW]


def _problem(found: Hunt) -> str:
    name, within = found.canary.name, found.canary.within
    if not found.at:
        return f"'{name}' was not found in {within} executions"
    return f"'{name}': the input that finds it finds something without it as well"


@pytest.mark.parametrize("name", FAST)
def test_a_target_finds_its_canaries_and_nothing_else(name: str) -> None:
    canaries = of_target(name)
    assert canaries, "a target without canaries proves nothing"
    target = make(name)
    try:
        loud = [data.hex() for data in islice(inputs(target, 5), QUIET) if check(target, data)]
        assert loud == [], "the real code was found wrong"
        near = [one for one in canaries if one.within <= PATIENCE.get(name, 4000)]
        assert 2 * len(near) >= len(canaries)
        hunts = [hunt(canary, target=target) for canary in near]
        assert [_problem(one) for one in hunts if not one.good] == []
        quiet = [check(target, data) for data in islice(inputs(target, 5), 9)]
        assert quiet == [None] * 9, "a fault stayed switched on"
    finally:
        target.close()


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_target_finds_one_canary(name: str) -> None:
    target = make(name)
    try:
        found = hunt(of_target(name)[0], target=target)
        assert found.good, _problem(found)
    finally:
        target.close()


def test_there_are_many_and_each_has_a_name() -> None:
    names = [canary.name for canary in every()]
    assert len(names) == len(set(names)) >= 25
    assert {canary.target for canary in every()} == set(PLACES)
    assert named(names[0], every()[0].target).name == names[0]
    with pytest.raises(KeyError):
        named("no such fault", "rows")


def test_a_fault_that_changes_nothing_is_not_found() -> None:
    idle = Canary("idle", "order", "nothing is wrong", 30, lambda patch, target: None)
    found = hunt(idle)
    assert (found.at, found.clean, found.good) == (0, True, False)

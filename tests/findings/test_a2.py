# SPDX-License-Identifier: Apache-2.0
"""A2: the engine's own lookups evict what they have just called a hit."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.support.scenes import SCENES, WrongWorld, demand, demand_clean

SCENE = SCENES["A2"]


@pytest.mark.xfail(strict=True, raises=WrongWorld, reason="finding A2")
def test_a_hit_is_there_when_it_is_loaded() -> None:
    demand(SCENE.plan("stock"), SCENE.kind)


def test_the_same_without_the_decisive_act() -> None:
    demand_clean(SCENE.twin())

# SPDX-License-Identifier: Apache-2.0
"""C: a second reset before the next step kills the engine."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.support.scenes import SCENES, WrongWorld, demand, demand_clean

SCENE = SCENES["C"]


@pytest.mark.xfail(strict=True, raises=WrongWorld, reason="finding C")
def test_two_resets_in_a_row_are_two_resets() -> None:
    demand(SCENE.plan("stock"), SCENE.kind)


def test_the_same_without_the_decisive_act() -> None:
    demand_clean(SCENE.twin())

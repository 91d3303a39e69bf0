# SPDX-License-Identifier: Apache-2.0
"""T: a tier whose reads fail is asked again for ever."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.support.scenes import SCENES, WrongWorld, demand, demand_clean

SCENE = SCENES["T"]


@pytest.mark.xfail(strict=True, raises=WrongWorld, reason="finding T")
def test_a_failed_promotion_is_a_miss() -> None:
    demand(SCENE.plan("stock"), SCENE.kind)


def test_the_same_without_the_decisive_act() -> None:
    demand_clean(SCENE.twin())

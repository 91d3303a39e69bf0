# SPDX-License-Identifier: Apache-2.0
"""E: a reset announces a chunk that it then drops."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.support.scenes import SCENES, WrongWorld, demand, demand_clean

SCENE = SCENES["E"]


@pytest.mark.xfail(strict=True, raises=WrongWorld, reason="finding E")
def test_what_is_announced_is_there() -> None:
    demand(SCENE.plan("stock"), SCENE.kind)


def test_the_same_without_the_decisive_act() -> None:
    demand_clean(SCENE.twin())

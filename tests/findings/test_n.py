# SPDX-License-Identifier: Apache-2.0
"""N: a reset of running requests whose prefix is in host memory kills the engine."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.support.scenes import SCENES, WrongWorld, demand, demand_clean

SCENE = SCENES["N"]


@pytest.mark.xfail(strict=True, raises=WrongWorld, reason="finding N")
def test_a_reset_request_may_load_its_prefix() -> None:
    demand(SCENE.plan("stock"), SCENE.kind)


def test_the_same_without_the_decisive_act() -> None:
    demand_clean(SCENE.twin())

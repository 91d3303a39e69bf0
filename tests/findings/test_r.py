# SPDX-License-Identifier: Apache-2.0
"""R: a row is given away by a reset while a worker still reads it: silent wrong KV."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.support.scenes import SCENES, WrongWorld, demand, demand_clean

SCENE = SCENES["R"]


@pytest.mark.xfail(strict=True, raises=WrongWorld, reason="finding R")
def test_a_row_that_is_read_is_nobody_elses() -> None:
    demand(SCENE.plan("stock"), SCENE.kind)


def test_the_same_without_the_decisive_act() -> None:
    demand_clean(SCENE.twin())

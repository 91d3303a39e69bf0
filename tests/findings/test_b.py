# SPDX-License-Identifier: Apache-2.0
"""B: a prefix longer than the rows is promoted in circles and never runs."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.support.scenes import SCENES, WrongWorld, demand, demand_clean

SCENE = SCENES["B"]


@pytest.mark.xfail(strict=True, raises=WrongWorld, reason="finding B")
def test_a_prefix_longer_than_the_rows_runs() -> None:
    demand(SCENE.plan("stock"), SCENE.kind)


def test_the_same_without_the_decisive_act() -> None:
    demand_clean(SCENE.twin())

# SPDX-License-Identifier: Apache-2.0
"""Q: a chunk with holes is loaded as if it were whole: silent wrong KV."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.support.scenes import SCENES, WrongWorld, demand, demand_clean

SCENE = SCENES["Q"]


@pytest.mark.xfail(strict=True, raises=WrongWorld, reason="finding Q")
def test_a_load_brings_what_the_request_demands() -> None:
    demand(SCENE.plan("stock"), SCENE.kind)


def test_the_same_without_the_decisive_act() -> None:
    demand_clean(SCENE.twin())

# SPDX-License-Identifier: Apache-2.0
"""S: after a reset a request stores blocks that are no longer its own: silent wrong KV."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.support.scenes import SCENES, WrongWorld, demand, demand_clean

SCENE = SCENES["S"]


@pytest.mark.xfail(strict=True, raises=WrongWorld, reason="finding S")
def test_what_is_stored_is_what_the_key_says() -> None:
    demand(SCENE.plan("stock"), SCENE.kind)


def test_the_same_without_the_decisive_act() -> None:
    demand_clean(SCENE.twin())

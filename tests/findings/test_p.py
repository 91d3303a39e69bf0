# SPDX-License-Identifier: Apache-2.0
"""P: a key parked for a write that failed can stay parked for ever."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import OffloadPolicy

from tests.findings.stock import Stage, key

K = key(0)
STEPS = 50


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(
            True, marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason="finding P")
        ),
        pytest.param(False, id="nobody writes it again"),
    ],
)
def test_a_request_is_finished_although_the_write_it_waited_for_failed(again: bool) -> None:
    """One request waits for another's write. It fails; others begin new ones of the same key."""
    stage = Stage(rows=2)
    tier = stage.tier(policy=OffloadPolicy.REQUEST_LEVEL)
    writer, waiting = stage.begin("writer 0"), stage.begin("waiting")
    stage.manager.prepare_store([K], writer)
    stage.manager.prepare_store([K], waiting)
    stage.manager.on_request_finished(waiting)
    for number in range(1, STEPS):
        stage.manager.complete_store([K], writer, success=False)
        stage.manager.on_request_finished(writer)
        writer = stage.begin(f"writer {number}")
        if again:
            stage.manager.prepare_store([K], writer)
        stage.step()
        if not again:
            stage.manager.prepare_store([K], writer)
    assert "waiting" in tier.finished

# SPDX-License-Identifier: Apache-2.0
"""A1: a lookup may evict what the same request was just told is a hit."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import ParentManager

from tests.findings.stock import Stage, key

K0, K1, K2 = key(0), key(1), key(2)


@pytest.mark.parametrize(
    "elsewhere",
    [
        pytest.param(
            {K1},
            marks=pytest.mark.xfail(raises=AssertionError, strict=True, reason="finding A1"),
        ),
        pytest.param(set(), id="nothing to promote"),
    ],
)
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_peer_gets_what_it_was_told_is_there(policy: str, elsewhere: set[bytes]) -> None:
    """The calls of vLLM's p2p tier: look up what a peer asks for, then pin what was a hit."""
    served: list[int] = []

    def serve(parent: ParentManager) -> None:
        context = ReqContext(req_id="peer")
        parent.on_new_request(context)
        hits = [k for k in (K0, K1) if parent.lookup(k, context) is LookupResult.HIT]
        served.extend(int(row) for row in parent.create_store_job(hits, context).chunk_ids)

    stage = Stage(rows=2, policy=policy)
    peer = stage.tier()
    stage.tier(has=elsewhere)
    request = stage.begin("r")
    stage.store(request, K0, K2)
    stage.step(2)
    peer._serve = serve
    stage.step()
    assert len(served) == 1

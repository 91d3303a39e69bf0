# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel 2: two writers per chunk, and a miss in both directions against one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsafe.seal.header import read_fixed
from kvsafe.seal.refusal import RefusalKind
from tests.support import models
from tests.support.engine import Engine, Nursery, Place, prompt

pytestmark = pytest.mark.engine

QUESTION = prompt(401, 400)
OTHER = prompt(402, 400)
WHOLE = 384
TWO: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    "distributed_executor_backend": "mp",
}


def test_two_workers_store_and_serve(nursery: Nursery, tmp_path: Path) -> None:
    place, model = Place(tmp_path), models.qwen3()
    settings = place.settings()
    with nursery.running(model, kv_transfer_config=settings, **TWO) as engine:
        cold = engine.stored(QUESTION)
        assert cold.cached == 0
        engine.drop_device()
        host = engine.ask(QUESTION)
        assert (host.tokens, host.cached) == (cold.tokens, WHOLE)
        files = engine.paths(QUESTION)
        # A row that one of the two workers cannot prove is refused for both.
        engine.drop_device()
        half = engine.do("describe")["row_bytes"] // 2
        engine.do("damage_row", prompt=QUESTION, chunk=1, at=half + 4096 + 7)
        before = engine.metrics()
        again = engine.ask(QUESTION)
        assert again.tokens == cold.tokens
        added = engine.metrics().since(before).refusals()
        assert {k: v for k, v in added.items() if v} == {int(RefusalKind.PAYLOAD_TAG): 1}
        engine.settle()
    assert [read_fixed(path.read_bytes()).writers for path in files] == [2, 2, 2]
    one_worker = _alone(nursery, place)
    assert one_worker.cached == 0
    with nursery.running(model, kv_transfer_config=settings, **TWO) as engine:
        disk = engine.ask(QUESTION)
        assert (disk.tokens, disk.cached) == (cold.tokens, WHOLE)
        assert engine.metrics().total("chunks_opened_total", place="1:fs") == 3
        # What only the single worker has stored is a miss here, and then served as our own.
        assert engine.stored(OTHER).cached == 0
        _expect_named(engine)
        engine.drop_host()
        assert engine.ask(OTHER).cached == WHOLE


def _alone(nursery: Nursery, place: Place) -> Any:
    """One worker over the store of two: a miss that names `tp`; its own chunks are served."""
    with nursery.running(models.qwen3(), kv_transfer_config=place.settings()) as engine:
        done = engine.stored(QUESTION)
        _expect_named(engine)
        engine.stored(OTHER)
        engine.drop_host()
        assert engine.ask(QUESTION).cached == WHOLE
        assert engine.ask(OTHER).cached == WHOLE
        return done


def _expect_named(engine: Engine) -> None:
    for _ in range(200):
        if engine.metrics().refusals():
            break
    assert engine.metrics().refusals() == {int(RefusalKind.IDENTITY_ELSEWHERE): 1}
    assert any("refusal 703" in line and "tp" in line for line in engine.log().splitlines())

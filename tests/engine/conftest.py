# SPDX-License-Identifier: Apache-2.0
"""The nursery for the session, and the engines that several tests share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import Bench
from tests.support import models
from tests.support.engine import Engine, EngineGone, Nursery, Place, prompt

_SEEDS = itertools.count(1)

# vLLM's MLA on CPU ignores a loaded prefix, and kvsafe refuses it. The bytes can be compared.
CPU_MLA = {"allow_unproven_groups": True}

BENCHES: dict[str, dict[str, Any]] = {
    "qwen3": {"model": models.qwen3},
    "qwen3-fail": {"model": models.qwen3, "policy": "fail"},
    "gemma3-fail": {"model": models.gemma3, "policy": "fail"},
    "qwen3-2-arc": {
        "model": models.qwen3,
        "extra": {"blocks_per_chunk": 2, "eviction_policy": "arc"},
    },
    "gemma3": {"model": models.gemma3},
    "gemma3-2": {"model": models.gemma3, "extra": {"blocks_per_chunk": 2}},
    # In bfloat16 its payload does not end on a page: rows have a tail.
    "mla": {
        "model": models.deepseek_mla,
        "extra": {"eviction_policy": "arc", **CPU_MLA},
        "settings": {"dtype": "bfloat16"},
    },
    "mla-2": {"model": models.deepseek_mla, "extra": {"blocks_per_chunk": 2, **CPU_MLA}},
}


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The process that forks engines."""
    pytest.importorskip("vllm")
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def benches(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Engines by name, started when first asked for; a dead one is replaced."""
    running: dict[str, Bench] = {}

    def get(name: str) -> Bench:
        bench = running.get(name)
        if bench is None or not bench.alive:
            running[name] = bench = _start(nursery, tmp_path_factory.mktemp(name), name)
        return bench

    yield get
    for bench in running.values():
        bench.engine.stop()


def _start(nursery: Nursery, root: Path, name: str) -> Bench:
    chosen = BENCHES[name]
    place = Place(root, chosen.get("extra", {}))
    engine = nursery.engine()
    transfer = place.settings(chosen.get("policy", "recompute"))
    engine.start(chosen["model"](), kv_transfer_config=transfer, **chosen.get("settings", {}))
    return Bench(name, engine, place, engine.do("describe"))


@pytest.fixture
def bench(request: pytest.FixtureRequest, benches: Callable[[str], Bench]) -> Iterator[Bench]:
    """The shared engine of the name in `request.param` (default: qwen3), clean of faults."""
    found = benches(getattr(request, "param", "qwen3"))
    yield found
    try:
        found.engine.do("restore")
        found.engine.settle()
    except EngineGone:
        found.alive = False


@pytest.fixture
def engine(bench: Bench) -> Engine:
    """The engine of the bench."""
    return bench.engine


@pytest.fixture
def fresh() -> Callable[[int], list[int]]:
    """Prompts of a given length that no test has used."""
    return lambda tokens: prompt(next(_SEEDS), tokens)

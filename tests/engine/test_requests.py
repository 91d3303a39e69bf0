# SPDX-License-Identifier: Apache-2.0
"""F18, F19, F20: aborts and preemptions at every moment; blocks come back, tokens stay right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import Bench, Fresh, refused
from tests.support import models
from tests.support.engine import Engine, Nursery, Place, prompt

pytestmark = pytest.mark.engine


def free_blocks(engine: Engine) -> int:
    """Blocks that nobody holds, when all is quiet and the prefix cache is empty."""
    engine.settle()
    engine.drop_device()
    return int(engine.do("free_blocks"))


def expect_healthy(bench: Bench, fresh: Fresh, free: int) -> None:
    """All blocks are back and a new prompt is stored and served."""
    assert free_blocks(bench.engine) == free
    bench.stored(fresh).expect_whole()
    bench.stored(fresh).expect_whole(lower=False)


def test_abort_of_a_request_that_was_never_scheduled(bench: Bench, fresh: Fresh) -> None:
    stored, free = bench.stored(fresh), free_blocks(bench.engine)
    for question in (stored.prompt, fresh(400)):
        name = bench.engine.do("submit", prompt=question, count=4)
        bench.engine.do("abort", name=name)
        bench.engine.do("step", count=2)
    expect_healthy(bench, fresh, free)
    stored.expect_whole()


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("moment", ["in flight", "copied and not reported"])
def test_abort_around_a_transfer(bench: Bench, fresh: Fresh, direction: str, moment: str) -> None:
    engine, stored = bench.engine, bench.stored(fresh)
    free = free_blocks(engine)
    question = stored.prompt if direction == "load" else fresh(400)
    engine.do("hold", direction=direction)
    name = engine.do("submit", prompt=question, count=200)
    while not engine.do("entered"):
        engine.do("step")
    if moment == "in flight":
        engine.do("abort", name=name)
        engine.do("step", count=2)
        if direction == "load":
            # The copy still runs: its blocks must not be given to anybody.
            assert engine.do("free_blocks") < free
        engine.do("release")
    else:
        engine.do("release")
        engine.do("finish_copies")
        engine.do("abort", name=name)
    engine.settle()
    engine.do("restore")
    expect_healthy(bench, fresh, free)
    stored.expect_whole()


def test_abort_while_a_promotion_is_under_way(bench: Bench, fresh: Fresh) -> None:
    engine, stored = bench.engine, bench.stored(fresh)
    free = free_blocks(engine)
    for steps in (1, 2, 3, 4):
        engine.drop_host()
        name = engine.do("submit", prompt=stored.prompt, count=50)
        engine.do("step", count=steps)
        engine.do("abort", name=name)
        engine.settle()
    expect_healthy(bench, fresh, free)
    stored.expect_whole()


@pytest.mark.parametrize("bench", ["qwen3", "gemma3"], indirect=True)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_abort_storm(bench: Bench, fresh: Fresh, seed: int) -> None:
    """A random schedule of arrivals, steps, aborts and resets of the accelerator's cache."""
    engine, draw = bench.engine, random.Random(seed)
    known = [bench.stored(fresh, chunks=2) for _ in range(3)]
    free = free_blocks(engine)
    before = engine.metrics()
    running: list[str] = []
    for _ in range(60):
        deed = draw.choice(["arrive", "arrive", "step", "step", "abort", "drop"])
        if deed == "arrive":
            question = draw.choice([item.prompt for item in known] + [fresh(300)])
            running.append(engine.do("submit", prompt=question, count=draw.randint(1, 20)))
        elif deed == "step":
            ended = engine.do("step", count=draw.randint(1, 3))
            running = [name for name in running if name not in {item["name"] for item in ended}]
        elif deed == "abort" and running:
            engine.do("abort", name=running.pop(draw.randrange(len(running))))
        elif deed == "drop" and not running:
            engine.do("drop_host")
    for name in running:
        engine.do("abort", name=name)
    engine.settle()
    assert refused(before, engine) == {}
    assert free_blocks(engine) == free
    for item in known:
        assert item.again().tokens == item.cold.tokens


@pytest.mark.parametrize("model", [models.qwen3, models.gemma3], ids=["qwen3", "gemma3"])
def test_preempted_while_stores_are_in_flight(nursery: Nursery, tmp_path: Path, model: Any) -> None:
    """F20: too few blocks for the running requests, and copies slower than the steps."""
    questions = [prompt(500 + index, 240 + 3 * index) for index in range(5)]
    with nursery.running(model()) as roomy:
        wanted = [roomy.ask(question, 40).tokens for question in questions]
    place = Place(tmp_path)
    blocks = 11 if model is models.qwen3 else 45
    tight: dict[str, Any] = {"num_gpu_blocks_override": blocks, "max_model_len": 512}
    transfer = place.settings(offload_prompt_only=False)
    with nursery.running(model(), kv_transfer_config=transfer, **tight) as engine:
        free = free_blocks(engine)
        engine.do("count_preemptions")
        engine.do("slow", direction="store", seconds=0.05)
        engine.do("slow", direction="load", seconds=0.02)
        done = engine.ask_all(questions, 40)
        preemptions, in_flight = engine.do("preemptions")
        assert preemptions > 0
        assert in_flight > 0
        assert [item.tokens for item in done] == wanted
        assert [item.finish for item in done] == ["length"] * len(questions)
        engine.do("restore")
        assert free_blocks(engine) == free
        again = engine.ask_all(questions, 40)
        assert [item.tokens for item in again] == wanted
        assert engine.metrics().total("chunks_served_total") > 0
        assert engine.metrics().refusals() == {}

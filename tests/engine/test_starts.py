# SPDX-License-Identifier: Apache-2.0
"""F25 and the start itself: killed at any point, twice at once, or refused with clear words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import models
from tests.support.engine import Engine, EngineFailed, EngineGone, Nursery, Place, prompt

pytestmark = pytest.mark.engine

QUESTION = prompt(301, 400)
WHOLE = 384
FIXED = {"engine_id": "one-fixed-engine"}


def transfer(place: Place, **settings: Any) -> dict[str, Any]:
    """`kv_transfer_config` with an engine id that every start shares."""
    return {**place.settings(), **FIXED, **settings}


def regions(engine: Engine) -> list[Path]:
    """The region files that a process has named in its log before it died."""
    return [Path(name) for name in re.findall(r"^REGION (/\S+)$", engine.log(), re.MULTILINE)]


@pytest.mark.parametrize("phase", ["created", "registered", "unlinked", "managed"])
def test_killed_while_starting(nursery: Nursery, tmp_path: Path, phase: str) -> None:
    place, killed = Place(tmp_path), nursery.engine()
    killed.do("kill_at", phase=phase)
    with pytest.raises(EngineGone):
        killed.start(models.qwen3(), kv_transfer_config=transfer(place))
    killed.kill()
    left = regions(killed)
    if phase in ("created", "registered"):
        assert [path.exists() for path in left] == [True], "the kill came too late to test"
    with nursery.running(models.qwen3(), kv_transfer_config=transfer(place)) as engine:
        cold = engine.stored(QUESTION)
        assert cold.cached == 0
        engine.drop_host()
        again = engine.ask(QUESTION)
        assert (again.tokens, again.cached) == (cold.tokens, WHOLE)
    assert not any(path.exists() for path in left)


def test_killed_while_serving(nursery: Nursery, tmp_path: Path) -> None:
    """With requests, stores and loads in flight; what was complete before is served after."""
    place, killed = Place(tmp_path), nursery.engine()
    killed.start(models.qwen3(), kv_transfer_config=transfer(place))
    cold = killed.stored(QUESTION)
    killed.drop_host()
    killed.do("slow", direction="store", seconds=0.5)
    killed.do("submit", prompt=QUESTION, count=50)
    killed.do("submit", prompt=prompt(302, 900), count=50)
    killed.do("step", count=4)
    with pytest.raises(EngineGone):
        killed.do("die")
    killed.kill()
    with nursery.running(models.qwen3(), kv_transfer_config=transfer(place)) as engine:
        again = engine.ask(QUESTION)
        assert (again.tokens, again.cached) == (cold.tokens, WHOLE)
        engine.stored(prompt(302, 900))
        engine.drop_host()
        assert engine.ask(prompt(302, 900)).cached == 7 * 128
        assert engine.metrics().refusals() == {}


def test_two_live_engines_with_one_id_do_not_alias(nursery: Nursery, tmp_path: Path) -> None:
    """Same engine id, same store: each serves what it should, row by row of its own."""
    place, other = Place(tmp_path / "a"), Place(tmp_path / "b")
    mine, theirs = prompt(303, 400), prompt(304, 400)
    with (
        nursery.running(models.qwen3(), kv_transfer_config=transfer(place)) as one,
        nursery.running(models.qwen3(), kv_transfer_config=transfer(other)) as two,
    ):
        cold_mine, cold_theirs = one.stored(mine), two.stored(theirs)
        for engine, question, cold in ((one, mine, cold_mine), (two, theirs, cold_theirs)):
            engine.drop_device()
            done = engine.ask(question)
            assert (done.tokens, done.cached) == (cold.tokens, WHOLE)
            assert engine.metrics().refusals() == {}
        # Neither has what only the other stored, and both rows stayed what they were.
        assert one.stored(theirs).cached == 0
        assert two.stored(mine).cached == 0
        one.drop_device()
        assert one.ask(mine).tokens == cold_mine.tokens
        two.kill()
        one.drop_device()
        again = one.ask(mine)
        assert (again.tokens, again.cached) == (cold_mine.tokens, WHOLE)


def test_two_live_engines_share_a_store(nursery: Nursery, tmp_path: Path) -> None:
    place = Place(tmp_path)
    with (
        nursery.running(models.qwen3(), kv_transfer_config=transfer(place)) as one,
        nursery.running(models.qwen3(), kv_transfer_config=transfer(place)) as two,
    ):
        cold = one.stored(QUESTION)
        done = two.ask(QUESTION)
        assert (done.tokens, done.cached) == (cold.tokens, WHOLE)


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"cpu_bytes_to_use": None}, ["cpu_bytes_to_use", "required"]),
    ({"verify_load": "always"}, ["verify_load", "verify_loads"]),
    ({"verify_threads": "many"}, ["verify_threads", "many"]),
    ({"key": "c2VjcmV0LXNlY3JldA=="}, ["key", "key_file"]),
    ({"secondary_tiers": [{"type": "fs"}]}, ["secondary_tiers[0]", "root_dir"]),
    ({"secondary_tiers": [{"type": "obj"}]}, ["allow_unproven_tier"]),
    ({"kv_layout": "x"}, ["kv_layout"]),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[next(iter(c)) for c, _ in WRONG])
def test_a_wrong_configuration_stops_the_start(
    nursery: Nursery, tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    engine, place = nursery.engine(), Place(tmp_path)
    try:
        with pytest.raises(EngineFailed) as caught:
            engine.start(models.qwen3(), kv_transfer_config=place.settings(**change))
    finally:
        engine.kill()
    for word in words:
        assert word in str(caught.value)
    assert "c2VjcmV0" not in str(caught.value)
    assert not place.store.exists()


def test_weights_that_nobody_knows_stop_the_start(nursery: Nursery, tmp_path: Path) -> None:
    place = Place(tmp_path)
    dummy: dict[str, Any] = {"load_format": "dummy"}
    engine = nursery.engine()
    try:
        with pytest.raises(EngineFailed, match=r"weights_digest.*allow_unknown_weights"):
            engine.start(models.qwen3(), kv_transfer_config=place.settings(), **dummy)
    finally:
        engine.kill()
    allowed = place.settings(allow_unknown_weights=True)
    with nursery.running(models.qwen3(), kv_transfer_config=allowed, **dummy) as running:
        running.stored(QUESTION)
        assert running.metrics().total("override_active") == 1

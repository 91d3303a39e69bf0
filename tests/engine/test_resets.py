# SPDX-License-Identifier: Apache-2.0
"""F07: a reset forgets in every tier and for good, and one that cannot happen says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsafe.seal.refusal import RefusalKind
from tests.engine.cases import Fresh, refused
from tests.support import models
from tests.support.engine import Engine, Nursery, Place

pytestmark = pytest.mark.engine

WHOLE = 384
REVOKED = int(RefusalKind.EPOCH_REVOKED)
FENCE = int(RefusalKind.FENCE)
Start = Callable[[], Engine]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def start(nursery: Nursery, place: Place) -> Iterator[Start]:
    """Start engines over one place; all are stopped at the end."""
    running: list[Engine] = []

    def begin() -> Engine:
        engine = nursery.engine()
        running.append(engine)
        return engine.start(models.qwen3(), kv_transfer_config=place.settings())

    yield begin
    for engine in running:
        engine.stop()


def test_a_reset_misses_everywhere_and_lasts(start: Start, fresh: Fresh) -> None:
    engine, prompt = start(), fresh(400)
    cold = engine.stored(prompt)
    engine.drop_device()
    assert engine.ask(prompt).cached == WHOLE
    engine.drop_host()
    assert engine.ask(prompt).cached == WHOLE

    old = engine.paths(prompt)
    first = engine.do("describe")["epoch"]
    kept = [path.read_bytes() for path in old]
    assert engine.do("reset") is True
    assert engine.do("describe")["epoch"] == first + 1
    before = engine.metrics()
    done = engine.stored(prompt)
    assert (done.tokens, done.cached) == (cold.tokens, 0)
    assert refused(before, engine) == {REVOKED: 3}
    # Control: what is stored after the reset is served.
    engine.drop_host()
    assert engine.ask(prompt).cached == WHOLE
    engine.stop()

    # For good: the old files put back behind a restarted engine are still refused.
    for path, data in zip(old, kept, strict=True):
        path.write_bytes(data)
    again = start()
    assert again.do("describe")["epoch"] == first + 1
    done = again.stored(prompt)
    assert (done.tokens, done.cached) == (cold.tokens, 0)
    assert set(again.metrics().refusals()) == {REVOKED}
    again.drop_host()
    assert again.ask(prompt).cached == WHOLE


def test_what_is_stored_after_a_reset_serves_this_launch_alone(
    nursery: Nursery, place: Place, fresh: Fresh
) -> None:
    """The reset may have come with new weights in memory, which a restart does not have."""
    prompt, engine = fresh(400), nursery.engine()
    settings = place.settings(weights_survive_reset=None)
    engine.start(models.qwen3(), kv_transfer_config=settings)
    cold = engine.stored(prompt)
    assert engine.do("reset") is True
    assert engine.stored(prompt).cached == 0
    engine.drop_host()
    assert engine.ask(prompt).cached == WHOLE
    engine.stop()
    again = nursery.engine().start(models.qwen3(), kv_transfer_config=settings)
    try:
        done = again.stored(prompt)
        assert (done.tokens, done.cached) == (cold.tokens, 0)
        # Control: the same question is served where no reset came between.
        again.drop_host()
        assert again.ask(prompt).cached == WHOLE
    finally:
        again.stop()


def test_a_plain_prefix_reset_keeps_lower_tiers(start: Start, fresh: Fresh) -> None:
    """Control for the resets here: only the one that includes external tiers revokes."""
    engine, prompt = start(), fresh(400)
    engine.stored(prompt)
    epoch = engine.do("describe")["epoch"]
    engine.drop_device()
    assert engine.do("describe")["epoch"] == epoch
    assert engine.ask(prompt).cached == WHOLE


def test_a_store_in_flight_revives_nothing(start: Start, fresh: Fresh) -> None:
    engine, prompt = start(), fresh(400)
    engine.do("hold", direction="store")
    engine.do("submit", prompt=prompt, count=3)
    while not engine.do("entered"):
        engine.do("step")
    assert engine.do("reset") is True
    epoch = engine.do("describe")["epoch"]
    engine.do("release", after_s=0.2)
    engine.settle()
    engine.do("restore")
    # The request ran on after the reset and may have stored its prompt anew: forget that.
    engine.drop_host()
    for path in engine.paths(prompt):
        if path.exists():
            assert _epoch(path) == epoch
            path.unlink()
    assert engine.stored(prompt).cached == 0
    engine.drop_host()
    assert engine.ask(prompt).cached == WHOLE


def _epoch(path: Path) -> int:
    from kvsafe.seal.header import read_fixed

    return read_fixed(path.read_bytes()).epoch


def test_a_load_in_flight_still_gives_right_tokens(start: Start, fresh: Fresh) -> None:
    engine, prompt = start(), fresh(400)
    cold = engine.stored(prompt)
    free = engine.do("free_blocks")
    engine.drop_device()
    engine.do("hold", direction="load", release_after_s=0.3)
    name = engine.do("submit", prompt=prompt, count=4)
    while not engine.do("entered"):
        engine.do("step")
    engine.do("reset_external")
    [done] = engine.do("finish", names=[name])
    assert tuple(done["tokens"]) == cold.tokens
    engine.settle()
    engine.do("restore")
    engine.drop_device()
    assert engine.do("free_blocks") == free
    again = engine.stored(prompt)
    assert again.tokens == cold.tokens
    engine.drop_host()
    assert engine.ask(prompt).cached == WHOLE


def test_a_reset_that_cannot_be_made_to_last_says_so(
    start: Start, place: Place, fresh: Fresh
) -> None:
    engine, prompt, other = start(), fresh(400), fresh(400)
    engine.stored(prompt)
    [file] = place.state.glob("epoch-*.json")
    aside = file.with_suffix(".aside")
    file.rename(aside)
    (file / "in the way").mkdir(parents=True)

    assert engine.do("reset") is False
    assert engine.do("describe")["certain"] is False
    before = engine.metrics()
    for question in (prompt, other, prompt, other):
        engine.drop_device()
        assert engine.stored(question).cached == 0
    added = engine.metrics().since(before)
    assert added.total("chunks_stored_total") == 0
    assert "the epoch is not certain" in engine.log()

    (file / "in the way").rmdir()
    file.rmdir()
    aside.rename(file)
    assert engine.do("reset") is True
    engine.stored(prompt)
    engine.drop_host()
    assert engine.ask(prompt).cached == WHOLE


def test_another_engine_on_the_same_state_hears_of_a_reset(start: Start, fresh: Fresh) -> None:
    one, two, prompt = start(), start(), fresh(400)
    cold = one.stored(prompt)
    assert two.ask(prompt).cached == WHOLE
    assert two.do("reset") is True
    one.do("wait_epoch", epoch=two.do("describe")["epoch"])
    one.drop_device()
    before = one.metrics()
    done = one.stored(prompt)
    assert (done.tokens, done.cached) == (cold.tokens, 0)
    assert refused(before, one).keys() <= {REVOKED}
    one.drop_host()
    assert one.ask(prompt).cached == WHOLE


def test_canary_an_epoch_that_is_not_checked(start: Start, fresh: Fresh) -> None:
    """With step 6 switched off, the first test's central claim goes red."""
    engine, prompt = start(), fresh(400)
    engine.stored(prompt)
    engine.do("accept_epochs")
    assert engine.do("reset") is True
    assert engine.stored(prompt).cached == WHOLE

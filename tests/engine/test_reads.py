# SPDX-License-Identifier: Apache-2.0
"""F11: a load that fails ends in a recompute after a bounded number of steps, and heals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.cases import Bench, Fresh, Stored, refused
from tests.support import models
from tests.support.engine import Nursery, Place

pytestmark = pytest.mark.engine

COMPUTED_STEPS = 12
"""More model steps than a recompute of one prompt and four tokens needs, and far from a loop."""


def recomputed(stored: Stored) -> int:
    """Ask with the fault in place; the tokens are right. Returns the cached tokens."""
    engine = stored.bench.engine
    done = engine.ask_all([stored.prompt], limit=COMPUTED_STEPS)[0]
    engine.settle()
    assert done.tokens == stored.cold.tokens
    assert done.finish == "length"
    return done.cached


@pytest.mark.parametrize("what", ["remove", "shorten"])
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_file_that_changes_between_lookup_and_read(
    bench: Bench, fresh: Fresh, what: str, chunk: int
) -> None:
    stored = bench.stored(fresh)
    stored.expect_whole()
    bench.engine.drop_host()
    bench.engine.do("before_read", what=what, path=str(stored.paths[chunk]))
    assert recomputed(stored) == chunk * bench.chunk
    bench.engine.do("restore")
    stored.expect_whole()


def test_an_io_error_keeps_the_files(bench: Bench, fresh: Fresh) -> None:
    stored = bench.stored(fresh)
    bytes_before = [path.read_bytes() for path in stored.paths]
    bench.engine.drop_host()
    before = bench.engine.metrics()
    bench.engine.do("fail_reads", times=1)
    assert recomputed(stored) == 0
    assert refused(before, bench.engine) == {}
    assert [path.read_bytes() for path in stored.paths] == bytes_before
    stored.expect_whole()


def test_io_errors_that_do_not_end(bench: Bench, fresh: Fresh) -> None:
    stored = bench.stored(fresh)
    bench.engine.do("fail_reads", times=1000)
    for _ in range(3):
        bench.engine.drop_host()
        assert recomputed(stored) == 0
    bench.engine.do("restore")
    stored.expect_whole()


@pytest.mark.parametrize("bench", ["gemma3"], indirect=True)
def test_a_file_of_one_group_disappears(bench: Bench, fresh: Fresh) -> None:
    stored = bench.stored(fresh)
    whole = stored.again().cached
    for victim in (0, -1):
        bench.engine.drop_host()
        bench.engine.do("before_read", what="remove", path=str(stored.paths[victim]))
        assert recomputed(stored) < whole
        bench.engine.do("restore")
        assert stored.again().cached == whole


@pytest.mark.parametrize("bench", ["qwen3-fail"], indirect=True)
def test_under_policy_fail_an_unreachable_file_is_a_miss(bench: Bench, fresh: Fresh) -> None:
    """Nothing was refused: a chunk that is not there any more is no fault of the request."""
    stored = bench.stored(fresh)
    bench.engine.drop_host()
    stored.paths[0].unlink()
    assert recomputed(stored) == 0
    stored.expect_whole()


def test_a_read_that_never_returns(nursery: Nursery, tmp_path: Path, fresh: Fresh) -> None:
    """F14: recomputed after the deadline; other requests are served all the while."""
    settings = Place(tmp_path).settings(load_deadline_s=1.0)
    stuck, other = fresh(400), fresh(400)
    with nursery.running(models.qwen3(), kv_transfer_config=settings) as engine:
        cold, fine = engine.stored(stuck), engine.stored(other)
        engine.drop_host()
        assert engine.ask(stuck).cached == 384
        engine.drop_host()
        engine.do("stall_reads")
        name = engine.do("submit", prompt=stuck, count=4)
        while not engine.do("stalled"):
            engine.do("step")
        meanwhile = engine.ask(other[:-1])
        assert meanwhile.finish == "length"
        [done] = engine.do("finish", names=[name])
        # Recomputed, or read again by another thread after the stuck load was given up.
        assert tuple(done["tokens"]) == cold.tokens and done["cached"] in (0, 384)
        engine.do("release")
        engine.settle()
        engine.do("restore")
        for question, before in ((stuck, cold), (other, fine)):
            engine.drop_host()
            engine.stored(question)
            engine.drop_host()
            again = engine.ask(question)
            assert (again.tokens, again.cached) == (before.tokens, 384)

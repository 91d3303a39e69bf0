# SPDX-License-Identifier: Apache-2.0
"""Host memory that changes under us, and stores that never become ready."""

from __future__ import annotations

import pytest

from tests.engine.cases import Bench, Fresh, Stored, refused

pytestmark = pytest.mark.engine

HEADER_TAG, PAYLOAD_TAG, FENCE, COPY_FAULT = 401, 1001, 1101, 1103
FAMILIES = ["qwen3", "qwen3-2-arc", "gemma3", "gemma3-2"]


def check_row_refused(
    stored: Stored, at: int, number: int, chunk: int = 1, tier_holds_it: bool = True
) -> None:
    """A damaged row is refused by the worker and withdrawn; the tokens are right; it heals."""
    engine = stored.bench.engine
    whole = stored.again().cached
    assert whole > 0
    engine.drop_device()
    # Of a sliding window only the last chunks are in rows: take one that is.
    rows = engine.do("resident", prompt=stored.prompt)
    chunk = next(index for index in range(chunk, len(rows)) if rows[index] is not None)
    engine.do("damage_row", prompt=stored.prompt, chunk=chunk, at=at)
    if not tier_holds_it:
        for path in stored.paths:
            path.unlink()
    before = engine.metrics()
    done = engine.ask(stored.prompt)
    assert done.tokens == stored.cold.tokens
    assert refused(before, engine) == {number: 1}
    added = engine.metrics().since(before)
    assert added.total("refusals_total", tier="0:primary") == 1
    engine.settle()
    # It came back from the tier behind the rows, or it was stored anew.
    added = engine.metrics().since(before)
    healed = "chunks_opened_total" if tier_holds_it else "chunks_sealed_total"
    assert added.total(healed, **({"place": "1:fs"} if tier_holds_it else {})) >= 1
    # What stands there now is a new store; nothing of the damage is left or offered again.
    before = engine.metrics()
    again = stored.again(lower=False)
    assert (again.tokens, again.cached) == (stored.cold.tokens, whole)
    assert refused(before, engine) == {}


@pytest.mark.parametrize("bench", FAMILIES, indirect=True)
def test_a_flipped_payload_bit_in_a_row(bench: Bench, fresh: Fresh) -> None:
    check_row_refused(bench.stored(fresh), bench.header + 12_345, PAYLOAD_TAG)


@pytest.mark.parametrize("bench", FAMILIES, indirect=True)
def test_a_bad_row_that_no_tier_holds_is_computed_again(bench: Bench, fresh: Fresh) -> None:
    at = bench.header + 4096
    check_row_refused(bench.stored(fresh), at, PAYLOAD_TAG, tier_holds_it=False)


@pytest.mark.parametrize(("at", "number"), [(0, 102), (8, 201), (300, HEADER_TAG), (4095, 401)])
def test_a_flipped_header_bit_in_a_row(bench: Bench, fresh: Fresh, at: int, number: int) -> None:
    check_row_refused(bench.stored(fresh), at, number)


@pytest.mark.parametrize("chunk", [0, 2])
def test_any_row_may_be_the_bad_one(bench: Bench, fresh: Fresh, chunk: int) -> None:
    check_row_refused(bench.stored(fresh), bench.header, PAYLOAD_TAG, chunk)


def test_a_row_damaged_after_its_promotion(bench: Bench, fresh: Fresh) -> None:
    """The promotion has proven it; the worker must not take that for granted."""
    stored = bench.stored(fresh)
    stored.expect_whole()
    check_row_refused(stored, bench.header + 77, PAYLOAD_TAG)


@pytest.mark.parametrize("bench", ["qwen3-fail", "gemma3-fail"], indirect=True)
def test_under_policy_fail_a_bad_row_ends_the_request(bench: Bench, fresh: Fresh) -> None:
    stored = bench.stored(fresh)
    stored.expect_whole(lower=False)
    bench.engine.drop_device()
    bench.engine.do("damage_row", prompt=stored.prompt, chunk=1, at=bench.header + 5)
    before = bench.engine.metrics()
    assert bench.engine.ask(stored.prompt).finish == "error"
    assert refused(before, bench.engine) == {PAYLOAD_TAG: 1}
    again = bench.engine.stored(stored.prompt)
    assert (again.tokens, again.finish) == (stored.cold.tokens, "length")
    stored.expect_whole(lower=False)


@pytest.mark.parametrize("bench", ["qwen3", "gemma3"], indirect=True)
@pytest.mark.parametrize("at", [0, 2])
def test_a_store_that_fails_is_never_offered(bench: Bench, fresh: Fresh, at: int) -> None:
    before = bench.engine.metrics()
    bench.engine.do("refuse_store", at=at)
    stored = bench.stored(fresh)
    added = bench.engine.metrics().since(before)
    assert added.total("stores_failed_total") >= 1
    # The worker says why; the sealer, who finds no record of it, does not count it again.
    assert refused(before, bench.engine) == {COPY_FAULT: 1}
    bench.engine.do("restore")
    done = stored.again()
    bench.engine.settle()
    assert done.tokens == stored.cold.tokens
    assert done.cached < stored.whole
    # Control: the next store of the same chunks heals.
    healed = stored.again()
    assert healed.tokens == stored.cold.tokens
    assert healed.cached > done.cached


def test_a_store_without_tags_is_never_sealed(bench: Bench, fresh: Fresh) -> None:
    before = bench.engine.metrics()
    bench.engine.do("skip_tagging")
    stored = bench.stored(fresh)
    assert stored.paths == []
    added = bench.engine.metrics().since(before)
    assert added.total("chunks_sealed_total") == 0
    assert added.total("stores_failed_total") == 3
    bench.engine.do("restore")
    assert stored.again(lower=False).cached == 0
    bench.engine.settle()
    stored.expect_whole(lower=False)


def late_store(bench: Bench, fresh: Fresh) -> None:
    """A store that comes late leaves the row alone and never becomes ready."""
    engine = bench.engine
    engine.do("hold", direction="store")
    prompt = fresh(bench.chunk + 5)
    before = engine.metrics()
    engine.do("submit", prompt=prompt, count=2)
    while not engine.do("entered"):
        engine.do("step")
    engine.do("reallocate", prompt=prompt, chunk=0)
    digest = engine.do("row_digest", prompt=prompt, chunk=0)
    engine.do("release")
    engine.do("finish_copies")
    written = engine.do("row_digest", prompt=prompt, chunk=0) != digest
    engine.settle()
    assert not written, "written"
    # By the worker; the sealer does not count it again.
    assert refused(before, engine) == {FENCE: 1}
    assert engine.do("resident", prompt=prompt) == [None]
    assert not any(path.exists() for path in engine.paths(prompt))


def test_a_late_store_leaves_a_row_that_was_given_away_alone(bench: Bench, fresh: Fresh) -> None:
    late_store(bench, fresh)
    bench.engine.do("restore")
    bench.stored(fresh).expect_whole(lower=False)


def test_canary_without_the_fence_a_late_store_writes(bench: Bench, fresh: Fresh) -> None:
    bench.engine.do("accept_late_rows")
    with pytest.raises(AssertionError, match="written"):
        late_store(bench, fresh)
    bench.engine.do("restore")
    late_store(bench, fresh)

# SPDX-License-Identifier: Apache-2.0
"""Verdicts: under the fail policy, exactly the requests that met a refused chunk fail, once."""

import random
from collections.abc import Callable
from functools import partial

from kvsafe.engine.requests.verdicts import Verdicts
from kvsafe.seal.refusal import Refusal, RefusalKind

A, B, C = b"a", b"b", b"c"
BAD = Refusal.of(RefusalKind.PAYLOAD_TAG, "payload", "x", "y")
WORSE = Refusal.of(RefusalKind.KEY, "key", "x", "y")


def test_who_waits_for_a_refused_chunk_fails_once() -> None:
    verdicts = Verdicts(active=True)
    verdicts.waits("one", A)
    verdicts.waits("two", B)
    verdicts.refused(A, BAD)
    assert verdicts.has_to_fail("one", A)
    assert not verdicts.has_to_fail("one", B)
    assert not verdicts.has_to_fail("two", A) and not verdicts.has_to_fail("two", B)
    assert verdicts.take("one") == BAD
    assert verdicts.take("one") is None and not verdicts.has_to_fail("one", A)
    assert verdicts.take("two") is None


def test_a_later_request_is_not_judged_for_an_earlier_refusal() -> None:
    verdicts = Verdicts(active=True)
    verdicts.waits("one", A)
    verdicts.refused(A, BAD)
    verdicts.waits("two", A)
    assert not verdicts.has_to_fail("two", A)
    verdicts.refused(A, WORSE)
    assert verdicts.take("two") == WORSE and verdicts.take("one") == BAD


def test_a_request_that_met_a_bad_object_fails() -> None:
    verdicts = Verdicts(active=True)
    verdicts.condemn("one", A, BAD)
    assert verdicts.has_to_fail("one", A) and not verdicts.has_to_fail("two", A)
    assert verdicts.take("one") == BAD


def test_a_request_that_is_over_is_forgotten() -> None:
    verdicts = Verdicts(active=True)
    verdicts.waits("one", A)
    verdicts.waits("two", A)
    verdicts.forget("one")
    verdicts.refused(A, BAD)
    assert verdicts.take("one") is None and verdicts.take("two") == BAD
    verdicts.condemn("one", B, BAD)
    verdicts.forget("one")
    assert verdicts.take("one") is None
    verdicts.forget("never seen")


def test_who_is_condemned_stays_so_until_its_load_fails_or_it_ends() -> None:
    verdicts = Verdicts(active=True)
    for name in ("one", "two", "three"):
        verdicts.waits(name, A)
    verdicts.release("three")
    assert not verdicts.is_condemned("one")
    verdicts.refused(A, BAD)
    # Whatever else it is told of, or not.
    verdicts.waits_only("one", [B])
    verdicts.release("one")
    assert verdicts.is_condemned("one") and verdicts.is_condemned("two")
    assert not verdicts.is_condemned("three")
    assert verdicts.take("one") == BAD and not verdicts.is_condemned("one")
    verdicts.forget("two")
    assert not verdicts.is_condemned("two")


def test_who_asks_again_waits_for_nothing_else() -> None:
    verdicts = Verdicts(active=True)
    verdicts.waits("one", A)
    verdicts.waits_only("one", [B])
    verdicts.refused(A, BAD)
    assert not verdicts.is_condemned("one")
    verdicts.refused(B, BAD)
    assert verdicts.is_condemned("one")


def test_who_loads_or_computes_is_not_concerned_any_more() -> None:
    verdicts = Verdicts(active=True)
    verdicts.waits("one", A)
    verdicts.doubt(A, BAD)
    verdicts.release("one")
    verdicts.refused(A, BAD)
    assert not verdicts.has_to_fail("one", A) and not verdicts.is_condemned("one")


def test_a_bad_object_condemns_all_who_wait_for_it() -> None:
    verdicts = Verdicts(active=True)
    verdicts.waits("two", A)
    verdicts.waits("three", B)
    verdicts.condemn("one", A, BAD)
    assert verdicts.take("one") == verdicts.take("two") == BAD
    assert verdicts.take("three") is None


def test_a_row_that_was_refused_elsewhere_counts_at_a_miss() -> None:
    verdicts = Verdicts(active=True)
    for name in ("one", "two"):
        verdicts.waits_only(name, [A, B])
    verdicts.doubt(A, BAD)
    assert not verdicts.is_condemned("one") and not verdicts.has_to_fail("one", B)
    assert verdicts.has_to_fail("one", A) and verdicts.is_condemned("one")
    assert verdicts.take("one") == BAD
    # A tier had a good one: nobody asks, and it loads.
    verdicts.release("two")
    assert not verdicts.has_to_fail("two", A)


def test_what_says_nothing_against_a_chunk_condemns_nobody() -> None:
    verdicts = Verdicts(active=True)
    verdicts.waits("one", A)
    revoked = Refusal.of(RefusalKind.EPOCH_REVOKED, "epoch", 2, 1)
    for refusal in (revoked, Refusal.of(RefusalKind.COPY_FAULT, "copy", "done", "x")):
        verdicts.doubt(A, refusal)
        assert not verdicts.has_to_fail("one", A)
    verdicts.refused(A, revoked)
    assert not verdicts.is_condemned("one")


def test_under_recompute_nothing_is_kept() -> None:
    verdicts = Verdicts(active=False)
    verdicts.waits_only("one", [A])
    verdicts.doubt(A, BAD)
    verdicts.waits("one", A)
    verdicts.refused(A, BAD)
    verdicts.condemn("one", B, BAD)
    assert not verdicts.has_to_fail("one", A) and verdicts.take("one") is None
    assert not verdicts.is_condemned("one") and _empty(verdicts)


def _empty(verdicts: Verdicts) -> bool:
    kept = (verdicts._waiting, verdicts._waits_of, verdicts._condemned, verdicts._doubted)
    return not any(kept)


def test_nothing_is_left_when_all_requests_are_over() -> None:
    verdicts, rng = Verdicts(active=True), random.Random(1)
    requests = [f"r{number}" for number in range(12)]
    for _ in range(600):
        request, key = rng.choice(requests), rng.choice([A, B, C])
        acts: list[Callable[[], object]] = [
            partial(verdicts.waits, request, key),
            partial(verdicts.waits_only, request, rng.sample([A, B, C], 2)),
            partial(verdicts.doubt, key, BAD),
            partial(verdicts.release, request),
            partial(verdicts.refused, key, BAD),
            partial(verdicts.condemn, request, key, BAD),
            partial(verdicts.take, request),
            partial(verdicts.has_to_fail, request, key),
            partial(verdicts.forget, request),
        ]
        rng.choice(acts)()
    for request in requests:
        verdicts.forget(request)
    assert _empty(verdicts)

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


def test_under_recompute_nothing_is_kept() -> None:
    verdicts = Verdicts(active=False)
    verdicts.waits("one", A)
    verdicts.refused(A, BAD)
    verdicts.condemn("one", B, BAD)
    assert not verdicts.has_to_fail("one", A) and verdicts.take("one") is None
    assert not verdicts._waiting and not verdicts._waits_of and not verdicts._condemned


def test_nothing_is_left_when_all_requests_are_over() -> None:
    verdicts, rng = Verdicts(active=True), random.Random(1)
    requests = [f"r{number}" for number in range(12)]
    for _ in range(600):
        request, key = rng.choice(requests), rng.choice([A, B, C])
        acts: list[Callable[[], object]] = [
            partial(verdicts.waits, request, key),
            partial(verdicts.refused, key, BAD),
            partial(verdicts.condemn, request, key, BAD),
            partial(verdicts.take, request),
            partial(verdicts.has_to_fail, request, key),
            partial(verdicts.forget, request),
        ]
        rng.choice(acts)()
    for request in requests:
        verdicts.forget(request)
    assert not verdicts._waiting and not verdicts._waits_of and not verdicts._condemned

# SPDX-License-Identifier: Apache-2.0
"""The tags of slices: against the book, against known answers, and what a salt may never do."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsafe.seal import suites
from kvsafe.seal.keyring import DEFAULT_SUITE
from kvsafe.seal.suites import SALT_BYTES, TAG_BYTES, Suite, gmac, tags_equal
from tests.seal.rows import spec_gmac, spec_slice_tag

KEY = bytes(range(32))
GMAC = Suite.AES256_GMAC


@pytest.fixture
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suites, "_PIECE_BYTES", 48)
        yield


def test_the_known_answer_of_an_empty_message() -> None:
    """Test case 13 of McGrew and Viega, The Galois/Counter Mode of Operation."""
    assert gmac(bytes(32), b"").hex() == "530f8afbc74536b9a963b4f1c4cb738b"


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=300))
def test_gmac_is_that_of_the_book(key: bytes, message: bytes) -> None:
    assert gmac(key, message) == spec_gmac(key, message)


@pytest.mark.parametrize("length", [0, 1, 47, 48, 49, 95, 96, 97, 500])
@pytest.mark.usefixtures("small_pieces")
def test_a_long_message_goes_in_pieces(length: int) -> None:
    message = os.urandom(length)
    assert gmac(KEY, memoryview(message)) == spec_gmac(KEY, message)


@pytest.mark.parametrize("suite", list(Suite))
def test_a_slice_tag_is_found_again(suite: Suite) -> None:
    body = memoryview(bytearray(os.urandom(1000)))
    tag = suite.tag_slice(KEY, b"context", body)
    assert len(tag) == TAG_BYTES
    assert tag == spec_slice_tag(suite, KEY, b"context", bytes(body), tag[:SALT_BYTES])
    assert tags_equal(tag, suite.tag_slice(KEY, b"context", body, like=tag))


@pytest.mark.parametrize("suite", list(Suite))
@given(at=st.integers(0, 8 * TAG_BYTES - 1))
def test_no_other_tag_is_found_again(suite: Suite, at: int) -> None:
    """Also not one with another salt: a salt is no part that an attacker may choose."""
    tag = suite.tag_slice(KEY, b"context", b"body")
    other = bytearray(tag)
    other[at // 8] ^= 1 << at % 8
    assert not tags_equal(other, suite.tag_slice(KEY, b"context", b"body", like=bytes(other)))


@pytest.mark.parametrize(
    ("key", "context", "body"),
    [
        (KEY[::-1], b"context", b"body"),
        (KEY, b"contexT", b"body"),
        (KEY, b"context", b"bodY"),
        (KEY, b"context", b"body\0"),
        (KEY, b"contextb", b"ody"),
    ],
)
@pytest.mark.parametrize("suite", [suite for suite in Suite if suite is not Suite.BLAKE3])
def test_everything_is_under_the_tag(suite: Suite, key: bytes, context: bytes, body: bytes) -> None:
    tag = suite.tag_slice(KEY, b"context", b"body")
    again = suite.tag_slice(key, context, body, like=tag)
    # Where a context ends is said by the context itself: see `slice_context`.
    same = (context, body) == (b"contextb", b"ody") and suite is not GMAC
    assert tags_equal(tag, again) is same


def test_each_slice_has_a_salt_of_its_own() -> None:
    """One key of GMAC must never tag two messages."""
    tags = {GMAC.tag_slice(KEY, b"context", b"body") for _ in range(100)}
    assert len({tag[:SALT_BYTES] for tag in tags}) == 100


def test_the_default_is_keyed() -> None:
    assert Suite.named(DEFAULT_SUITE).keyed

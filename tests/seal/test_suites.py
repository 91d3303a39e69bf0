# SPDX-License-Identifier: Apache-2.0
"""The tags of slices: against the book, against known answers, and what nobody may be told."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsafe.seal import suites
from kvsafe.seal.keyring import DEFAULT_SUITE
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.sealing import slice_context
from kvsafe.seal.suites import TAG_BYTES, Suite, gmac
from tests.seal.rows import (
    EPOCH,
    GENERATION,
    KEY,
    SECRET,
    World,
    spec_gmac,
    spec_slice_tag,
)

SUBKEY = bytes(range(32))
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
    assert gmac(SUBKEY, memoryview(message)) == spec_gmac(SUBKEY, message)


@pytest.mark.parametrize("suite", list(Suite))
@given(body=st.binary(max_size=200), context=st.binary(max_size=200))
def test_a_slice_tag_is_what_the_page_says(suite: Suite, body: bytes, context: bytes) -> None:
    tag = suite.tag_slice(SUBKEY, context, memoryview(body))
    assert len(tag) == TAG_BYTES
    assert tag == spec_slice_tag(suite, SUBKEY, context, body)


@pytest.mark.parametrize(
    ("key", "context", "body"),
    [
        (SUBKEY[::-1], b"context", b"body"),
        (SUBKEY, b"contexT", b"body"),
        (SUBKEY, b"context", b"bodY"),
        (SUBKEY, b"context", b"body\0"),
        (SUBKEY, b"contextb", b"ody"),
    ],
)
@pytest.mark.parametrize("suite", [suite for suite in Suite if suite.keyed])
def test_everything_is_under_the_tag(suite: Suite, key: bytes, context: bytes, body: bytes) -> None:
    tag = suite.tag_slice(SUBKEY, b"context", b"body")
    # Where a context ends is said by the context itself: see `slice_context`.
    same = (context, body) == (b"contextb", b"ody") and suite is not GMAC
    assert (tag == suite.tag_slice(key, context, body)) is same


@pytest.mark.parametrize("suite", list(Suite))
def test_a_reader_does_not_tell_the_tag_that_it_computed(suite: Suite) -> None:
    """Who may ask for tags of bytes of his choice has a signer; with a bare GMAC, soon its key."""
    world = World(suite)
    row = world.chunk()
    place = world.layout.slices[0]
    start = world.layout.header_bytes + place.offset
    row[start] ^= 1
    refusal = world.open(row)
    assert isinstance(refusal, Refusal) and refusal.kind is RefusalKind.PAYLOAD_TAG
    context = slice_context(bytes(row[80:112]), EPOCH, GENERATION, place, KEY)
    body, subkey = bytes(row[start : start + place.length]), world.subkey(SECRET, "slice")
    right = spec_slice_tag(suite, subkey, context, body)
    bare = spec_gmac(subkey, body) + gmac(subkey, body)
    for told in (str(refusal), refusal.found, refusal.expected):
        for secret in (right, bare):
            assert not any(secret[at : at + 4].hex() in told for at in range(len(secret) - 3))
    row[start] ^= 1
    assert not isinstance(world.open(row), Refusal)


def test_the_default_is_keyed() -> None:
    assert Suite.named(DEFAULT_SUITE).keyed

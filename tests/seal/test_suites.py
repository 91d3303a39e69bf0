# SPDX-License-Identifier: Apache-2.0
"""The tags of slices: against the book, against known answers, and what nobody may be told."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvsafe.seal import suites
from kvsafe.seal.keyring import DEFAULT_SUITE, MAX_KEYS
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.sealing import slice_context
from kvsafe.seal.suites import TAG_BYTES, Suite, gmac, hmac_sha256
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


def test_the_known_answers_of_hmac() -> None:
    """RFC 4231, test cases 1, 2 and 6; the key of the last is longer than a block."""
    cases = (
        (b"\x0b" * 20, b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b"),
        (b"Jefe", b"what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c7"),
        (
            b"\xaa" * 131,
            b"Test Using Larger Than Block-Size Key - Hash Key First",
            "60e431591ee0b67f0d8a26aacbf5b77f",
        ),
    )
    for key, message, start in cases:
        assert hmac_sha256(key, message).hex()[:32] == start


@given(st.binary(max_size=200), st.lists(st.binary(max_size=200), max_size=4))
@example(bytes(63), [b"x"])
@example(bytes(64), [b"x"])
@example(bytes(65), [b"x"])
def test_hmac_is_that_of_the_library(key: bytes, parts: list[bytes]) -> None:
    expected = hmac.digest(key, b"".join(parts), "sha256")
    # Twice: what is kept of a key is not changed by a message.
    for _ in range(2):
        assert hmac_sha256(key, *(memoryview(part) for part in parts)) == expected


def test_more_keys_than_are_kept() -> None:
    keys = [number.to_bytes(32, "big") for number in range(5 * MAX_KEYS)]
    for key in (*keys, *keys):
        assert hmac_sha256(key, b"message") == hmac.digest(key, b"message", "sha256")


def test_threads_share_a_key() -> None:
    # Longer than what is hashed without giving other threads their turn.
    messages = [bytes([number]) * 50_000 for number in range(8)] * 8
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda message: hmac_sha256(SUBKEY, message), messages))
    assert found == [hmac.digest(SUBKEY, message, "sha256") for message in messages]


def test_the_default_is_keyed() -> None:
    assert Suite.named(DEFAULT_SUITE).keyed


LONG_AND_SHORT = (0, 1, 2046, 2047, 2048, 2049, 4064, 4094, 4095, 16383, 16384, 16385, 70000)


@pytest.mark.parametrize("length", LONG_AND_SHORT)
def test_an_hmac_in_pieces_is_the_hmac_of_the_whole(length: int) -> None:
    message = bytes(range(256)) * (length // 256 + 1)
    message = message[:length]
    expected = hmac.digest(SUBKEY, message, "sha256")
    assert hmac_sha256(SUBKEY, message) == expected
    assert hmac_sha256(SUBKEY, memoryview(bytearray(message))) == expected
    assert hmac_sha256(SUBKEY, message + b"x") != expected

# SPDX-License-Identifier: Apache-2.0
"""What is a document and what is not: the reader's decoder against kvsafe's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.reader import canonical
from kvsafe.seal import cbor
from kvsafe.seal.cbor import encode
from tests.conformance.worlds import IDENTITY, SUITES, ask, draft


def verdict(document: bytes) -> int:
    """The number that both readers give to a row with this identity document and its digest."""
    both = ask(draft("blake3").but(identity=document).row(), draft("blake3").expected())
    assert both.reader == both.kvsafe
    return both.reader


trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=6)
    | st.binary(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)  # fmt: skip
documents = st.dictionaries(st.sampled_from([*IDENTITY, "b", ""]), trees, max_size=4)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(SUITES), st.sampled_from(["identity", "geometry"]), documents, st.data())
def test_documents_under_a_right_tag(
    suite: str, which: str, value: dict[str, object], data: st.DataObject
) -> None:
    made = draft(suite)
    document = bytearray(encode(value))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(document) - 1))
        document[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    if not document:
        document = bytearray(b"\0")
    changes: dict[str, Any] = {which: bytes(document)}
    both = ask(made.but(**changes).row(), made.expected())
    assert both.reader // 100 == both.kvsafe // 100 == (7 if which == "identity" else 8)


CANONICAL = """
a0 80 40 60 00 17 1818 18ff 190100 1affffffff 1b0000000100000000 1bffffffffffffffff 20 37 3818
3b7fffffffffffffff f4 f5 f6 f90000 f98000 f90001 f93c00 f97bff f97c00 f9fc00 f97e00 fa7f7fffff
fa00000001 fb0000000000000001 fb3ff199999999999a a10001 a1616101 a26161016162f6 a2616201626161f6
8181818181818101 818181818181818101 64f09f9880 63eda080 62c080 61ff
"""
OTHER = """
1800 1817 190018 1900ff 1a0000ffff 1b00000000ffffffff 3817 1c 3f 5f4101ff 7f6161ff 9f01ff bf616101ff
ff f0 f7 f814 f818 f8ff fa3f800000 fb3ff0000000000000 fa7f800000 fa7fc00000 fb7ff8000000000000
f97e01 f9fe00 c101 c24101 d81c01 d9d9f701 d9ffff01 a2616101616102 a2616201616101 a1f601 a14101f6
82f6 a16161 42ff 9bffffffffffffffff bbffffffffffffffff 5bffffffffffffffff 7bffffffffffffffff
9a7fffffff 0000 a000 81818181818181818101
"""


@pytest.mark.parametrize("encoded", [*CANONICAL.split(), *OTHER.split()])
def test_the_decoders_agree(encoded: str) -> None:
    assert verdict(b"\xa1\x61a" + bytes.fromhex(encoded)) in (701, 702)


def decoded_by_kvsafe(data: bytes) -> tuple[bool, object]:
    """Whether kvsafe takes the bytes for a document, and its value."""
    try:
        return True, cbor.decode(data, limit=65536)
    except cbor.CborError:
        return False, None


def decoded_by_reader(data: bytes) -> tuple[bool, object]:
    """Whether the reader takes the bytes for a document, and its value."""
    try:
        return True, canonical.decode(data)
    except canonical.DocumentError:
        return False, None


@settings(max_examples=300, deadline=None)
@given(trees, st.data())
def test_the_decoders_agree_on_values(value: object, data: st.DataObject) -> None:
    encoded = bytearray(encode(value))
    assert decoded_by_reader(bytes(encoded))[0]
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    mine, theirs = decoded_by_reader(bytes(encoded)), decoded_by_kvsafe(bytes(encoded))
    assert mine[0] == theirs[0]
    assert repr(mine[1]) == repr(theirs[1])


@pytest.mark.parametrize("encoded", ["3b8000000000000000", "3bffffffffffffffff"])
def test_the_least_integer(encoded: str) -> None:
    assert verdict(b"\xa1\x61a" + bytes.fromhex(encoded)) == 702
    assert verdict(b"\xa1\x61a" + bytes.fromhex("3b7fffffffffffffff")) == 701


@pytest.mark.parametrize("inner", ["80", "a0", "8101"])
def test_the_deepest_level(inner: str) -> None:
    for lists, number in ((6, 701), (7, 702)):  # the map, the lists, the inner one
        assert verdict(b"\xa1\x61a" + b"\x81" * lists + bytes.fromhex(inner)) == number


@pytest.mark.parametrize("document", [b"\x01", b"\x80", b"\x61a"])
def test_a_geometry_that_is_no_map(document: bytes) -> None:
    both = ask(draft("blake3").but(geometry=document).row(), draft("blake3").expected())
    assert both.reader == both.kvsafe

# SPDX-License-Identifier: Apache-2.0
"""Canonical CBOR: one document has one encoding, and hostile bytes choose nothing."""

import math
import struct
import subprocess
import sys
from pathlib import Path

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsafe.seal.cbor import MAX_DEPTH, CborError, decode, encode

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 65536

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=40),
)
documents = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


class Damaged(Exception):
    """The small reader below found something that is not in the subset."""


class Reader:
    """A second reader of the subset, written from RFC 8949 alone."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def document(self) -> object:
        """The one document that the bytes are."""
        value = self.item(MAX_DEPTH)
        if self.at != len(self.data):
            raise Damaged("more bytes behind it")
        return value

    def take(self, length: int) -> bytes:
        """The next bytes."""
        if length > len(self.data) - self.at:
            raise Damaged("too short")
        self.at += length
        return self.data[self.at - length : self.at]

    def item(self, depth: int) -> object:
        """The next item."""
        first = self.take(1)[0]
        major, info = first >> 5, first & 31
        if major == 7:
            return self.simple(info)
        number = self.number(info)
        if major == 0:
            return number
        if major == 1:
            if number >= 2**63:
                raise Damaged("below 64 bits")
            return -1 - number
        if major == 2:
            return self.take(number)
        if major == 3:
            try:
                return self.take(number).decode("utf-8")
            except UnicodeDecodeError:
                raise Damaged("no text") from None
        return self.container(major, number, depth)

    def number(self, info: int) -> int:
        """The number of a head, in its shortest form only."""
        if info < 24:
            return info
        if info > 27:
            raise Damaged("indefinite or reserved")
        size = 1 << (info - 24)
        value = int.from_bytes(self.take(size), "big")
        if value < (24, 2**8, 2**16, 2**32)[info - 24]:
            raise Damaged("a longer form")
        return value

    def simple(self, info: int) -> object:
        """Booleans, null and floats."""
        if info in (20, 21, 22):
            return (False, True, None)[info - 20]
        if info not in (25, 26, 27):
            raise Damaged("not in the subset")
        form = ">e", ">f", ">d"
        data = self.take(1 << (info - 24))
        value = float(struct.unpack(form[info - 25], data)[0])
        if data != _shortest(value):
            raise Damaged("a longer form")
        return value

    def container(self, major: int, count: int, depth: int) -> object:
        """A list or a map."""
        if major not in (4, 5) or depth == 0 or count > len(self.data):
            raise Damaged("a tag, too deep or too short")
        if major == 4:
            return [self.item(depth - 1) for _ in range(count)]
        pairs: dict[str, object] = {}
        last = b""
        for _ in range(count):
            start = self.at
            key = self.item(0)
            encoded = self.data[start : self.at]
            if not isinstance(key, str) or encoded <= last:
                raise Damaged("keys")
            last = encoded
            pairs[key] = self.item(depth - 1)
        return pairs


def _shortest(value: float) -> bytes:
    if math.isnan(value):
        return b"\x7e\x00"
    for form in (">e", ">f"):
        try:
            data = struct.pack(form, value)
        except OverflowError:
            continue
        if struct.unpack(form, data)[0] == value:
            return data
    return struct.pack(">d", value)


def _both(data: bytes) -> tuple[bool, bool]:
    """Whether each of the two readers takes these bytes; they agree on the value if both do."""
    try:
        theirs: object = Reader(data).document()
    except Damaged:
        return _takes(data), False
    assert _takes(data)
    assert repr(decode(data, limit=LIMIT)) == repr(theirs)
    return True, True


def _takes(data: bytes) -> bool:
    try:
        decode(data, limit=LIMIT)
    except CborError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(documents)
def test_what_is_encoded_decodes_to_the_same(value: object) -> None:
    try:
        data = encode(value)
    except CborError:
        return
    assert _both(data) == (True, True)
    assert encode(decode(data, limit=LIMIT)) == data


@settings(max_examples=600, deadline=None)
@given(documents, st.data())
def test_two_readers_agree_about_damaged_documents(value: object, data: st.DataObject) -> None:
    try:
        raw = bytearray(encode(value))
    except CborError:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        end = data.draw(st.integers(at, min(len(raw), at + 3)))
        raw[at:end] = data.draw(st.binary(max_size=3))
    left, right = _both(bytes(raw))
    assert left == right


@settings(max_examples=1000, deadline=None)
@given(st.binary(max_size=24))
def test_two_readers_agree_about_random_bytes(data: bytes) -> None:
    left, right = _both(data)
    assert left == right


@settings(max_examples=200, deadline=None)
@given(documents)
def test_only_one_encoding_of_a_value_is_taken(value: object) -> None:
    try:
        canonical = encode(value)
    except CborError:
        return
    plain = cbor2.dumps(value)
    assert _takes(plain) is (plain == canonical)


@pytest.mark.parametrize("first", range(256))
def test_every_first_byte_is_judged_alike(first: int) -> None:
    for rest in (b"", b"\x00", b"\x00" * 9, b"\xff" * 9, b"\x61a\x00", b"\x20\xff"):
        left, right = _both(bytes([first]) + rest)
        assert left == right, rest


REFUSED = {
    "empty": "",
    "tag": "c000",
    "self-described": "d9d9f700",
    "date": "c074323031332d30332d32315432303a30343a30305a",
    "bignum": "c249010000000000000000",
    "decimal": "c48221196ab3",
    "shared reference": "d81c81d81d00",
    "string reference": "d9010081d81900",
    "typed array": "d84041ff",
    "indefinite list": "9fff",
    "indefinite map": "bfff",
    "indefinite text": "7f6161ff",
    "break": "ff",
    "undefined": "f7",
    "simple value": "e0",
    "simple value of two bytes": "f820",
    "duplicate key": "a2616100616100",
    "number as key": "a10000",
    "list as key": "a18000",
    "map as key": "a1a000",
    "keys out of order": "a2616200616100",
    "longer keys first": "a262616100616200",
    "24 in two bytes too many": "190018",
    "0 in two bytes": "1800",
    "length in two bytes": "5801ff",
    "double for a half": "fb3ff0000000000000",
    "single for a half": "fa3f800000",
    "NaN with a payload": "f97e01",
    "negative NaN": "f9fe00",
    "NaN as a single": "fa7fc00000",
    "signalling NaN": "f97c01",
    "below 64 bits": "3bffffffffffffffff",
    "surrogate": "63eda080",
    "overlong UTF-8": "62c080",
    "trailing byte": "0000",
    "reserved head": "1c",
}
TAKEN = {
    "NaN": "f97e00",
    "infinity": "f97c00",
    "-0.0": "f98000",
    "largest": "1bffffffffffffffff",
    "smallest": "3b7fffffffffffffff",
    "0": "00",
    "1.0": "f93c00",
    "0.1": "fb3fb999999999999a",
    "empty map": "a0",
    "bytewise order": "a361610061620062616100",
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_canonical_is_refused(text: str) -> None:
    with pytest.raises(CborError):
        decode(bytes.fromhex(text), limit=LIMIT)
    with pytest.raises(CborError):
        decode(b"\xa1\x61a" + bytes.fromhex(text), limit=LIMIT)


@pytest.mark.parametrize("text", TAKEN.values(), ids=TAKEN.keys())
def test_what_is_canonical_is_taken(text: str) -> None:
    data = bytes.fromhex(text)
    assert encode(decode(data, limit=LIMIT)) == data
    assert encode(decode(b"\xa1\x61a" + data, limit=LIMIT)) == b"\xa1\x61a" + data


def test_nesting_ends_at_the_limit_in_both_directions() -> None:
    for levels in range(1, MAX_DEPTH + 3):
        for opening, inner in ((b"\x81", b"\x00"), (b"\x81", b"\x80"), (b"\xa1\x61a", b"\xa0")):
            full = levels if inner == b"\x00" else levels - 1
            data = opening * full + inner
            assert _takes(data) is (levels <= MAX_DEPTH), data
    nested: object = 0
    for _ in range(MAX_DEPTH + 1):
        nested = [nested]
    with pytest.raises(CborError):
        encode(nested)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, {1: 2}, {"a": {b"x": 1}}, {1, 2}, object()])
def test_our_own_side_encodes_nothing_outside_the_subset(value: object) -> None:
    with pytest.raises(CborError):
        encode(value)
    with pytest.raises(CborError):
        encode({"a": [value]})


def test_the_limit_is_a_limit() -> None:
    data = encode(bytes(100))
    assert decode(data, limit=len(data)) == bytes(100)
    with pytest.raises(CborError, match="at most"):
        decode(data, limit=len(data) - 1)


_BOMBS = """
import resource, sys
from kvsafe.seal.cbor import CborError, decode
decode(b"\\x81\\x00", limit=10)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
heads = [0x5B, 0x7B, 0x9B, 0xBB, 0xDB]
sizes = [2**24, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
bombs = [bytes([head]) + size.to_bytes(8, "big") for head in heads for size in sizes]
bombs += [b"\\x9a\\x00\\xff\\xff\\xff" * 13000, b"\\x81" * 65536, b"\\xa1\\x61a" * 20000]
bombs += [b"\\xc2" + bombs[3], b"\\xd8\\x1c" * 30000, b"\\x9b" + b"\\x7f" * 65000]
refused = 0
for bomb in bombs:
    try:
        decode(bomb[:65536], limit=65536)
    except CborError:
        refused += 1
print(refused == len(bombs))
"""


def test_a_declared_size_allocates_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BOMBS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr

# SPDX-License-Identifier: Apache-2.0
"""Key texts byte for byte, and key material that LMCache would take for something else."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvsafe.lmcache import CacheKey, ObjectKey, parse_key, parse_object_key, request_tags
from kvsafe.lmcache.keys import DTYPES, KEY_BYTES
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.lmcache.golden import golden

KEY = CacheKey("some/model", 1, 0, -0x3A33, "bfloat16")
OBJECT = ObjectKey("some/model", 0x01000100, 0, bytes(range(32)))

_plain = st.text("abcXYZ019/._-:+ ", min_size=1, max_size=20).filter(lambda t: t == t.strip(" "))
_tag = st.text("abcXYZ019/._-", min_size=1, max_size=8)
_keys = st.builds(
    CacheKey,
    _plain,
    st.integers(0, 10**9 - 1),
    st.integers(0, 10**9 - 1),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from(DTYPES),
    st.none() | st.integers(0, 200),
    st.lists(_tag, max_size=3, unique=True).flatmap(
        lambda names: st.tuples(*(st.tuples(st.just(name), _tag) for name in names))
    ),
)
_objects = st.builds(
    ObjectKey,
    _plain,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=32, max_size=32),
    st.text("abcXYZ019._-", max_size=12),
)


def refused(answer: object) -> bool:
    """Whether the answer is the refusal of key material."""
    return isinstance(answer, Refusal) and answer.kind is RefusalKind.PEER_KEY


@pytest.mark.parametrize("entry", golden()["keys"], ids=lambda entry: entry["name"])
def test_every_vector(entry: dict[str, Any]) -> None:
    key = parse_key(entry["key"])
    if not entry["parses"]:
        assert refused(key)
        return
    assert isinstance(key, CacheKey)
    assert key.text() == entry["key"]
    assert [layer.text() for layer in key.layers(2)] == entry["layer_keys_first2"]
    assert key.at_layer(1).check() is None


@given(_keys)
def test_what_is_printed_is_read_back(key: CacheKey) -> None:
    assume(len(key.text()) <= KEY_BYTES)
    assert key.check() is None
    assert parse_key(key.text()) == key


@given(_keys, _keys)
def test_two_keys_have_two_texts(one: CacheKey, other: CacheKey) -> None:
    assume(one.check() is None and other.check() is None)
    assert (one.text() == other.text()) == (one == other)


@given(_objects, _objects)
def test_object_keys_the_same_way(one: ObjectKey, other: ObjectKey) -> None:
    assume(one.check() is None and other.check() is None)
    assert parse_object_key(one.text()) == one
    assert (one.text() == other.text()) == (one == other)


@given(st.text(max_size=160))
def test_any_text_is_a_key_or_a_refusal(text: str) -> None:
    for answer in (parse_key(text), parse_object_key(text)):
        assert refused(answer) or answer.text() == text  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "key",
    [
        replace(KEY, model="a@b"),
        replace(KEY, model="a%b"),
        replace(KEY, model=" a"),
        replace(KEY, model="a "),
        replace(KEY, model=""),
        replace(KEY, model="a\nb"),
        replace(KEY, model="é"),
        replace(KEY, model="\ud800"),
        replace(KEY, model="m" * KEY_BYTES),
        replace(KEY, dtype="float32"),
        replace(KEY, dtype="bf16@user%u1"),
        replace(KEY, world_size=-1),
        replace(KEY, worker=10**9),
        replace(KEY, layer=-1),
        replace(KEY, hash=2**256),
        replace(KEY, tags=(("user", "u1@org%o2"),)),
        replace(KEY, tags=(("us%er", "u1"),)),
        replace(KEY, tags=(("user", "a b"),)),
        replace(KEY, tags=(("user", ""),)),
        replace(KEY, tags=(("", "u1"),)),
        replace(KEY, tags=(("user", "1"), ("user", "2"))),
        replace(KEY, tags=tuple((f"t{i}", "v") for i in range(17))),
    ],
)
def test_what_a_peer_would_take_for_another_key_is_refused(key: CacheKey) -> None:
    assert refused(key.check())


def test_beside_them_good_keys_pass() -> None:
    assert KEY.check() is None
    assert KEY.text() == "some/model@1@0@-3a33@bfloat16"
    assert replace(KEY, tags=(("user", "u1"), ("org", "o2"))).check() is None
    room = KEY_BYTES - len(KEY.text()) + len(KEY.model)
    assert replace(KEY, model="m" * room).check() is None
    assert refused(replace(KEY, model="m" * (room + 1)).check())
    assert OBJECT.check() is None
    assert replace(OBJECT, salt="tenant-1").check() is None


@pytest.mark.parametrize(
    "text",
    [
        "m@1@0@FF@bfloat16",
        "m@1@0@00ff@bfloat16",
        "m@1@0@0xff@bfloat16",
        "m@1@0@-0@bfloat16",
        "m@1@0@f_f@bfloat16",
        "m@01@0@ff@bfloat16",
        "m@+1@0@ff@bfloat16",
        "m@1@0@ff@bfloat16 ",
        "m@1@0@ff@bfloat16@",
        "m@1@0@ff@bfloat16@01",
        "m@1@0@ff@bfloat16@user%",
        "m@1@0@ff@bfloat16@user%a%b",
        "m@1@0@ff@bfloat16@user%1@user%2",
        "m@1@0@ff",
        "vllm@m@1@0@ff",
    ],
)
def test_texts_that_a_server_would_normalise_are_refused(text: str) -> None:
    assert refused(parse_key(text))
    assert isinstance(parse_key("m@1@0@ff@bfloat16@1@user%1"), CacheKey)


@pytest.mark.parametrize(
    "key",
    [
        replace(OBJECT, model="a@b"),
        replace(OBJECT, salt="a@b"),
        replace(OBJECT, salt="a b"),
        replace(OBJECT, salt="a/b"),
        replace(OBJECT, salt="a\\b"),
        replace(OBJECT, salt="s" * 129),
        replace(OBJECT, digest=bytes(31)),
        replace(OBJECT, kv_rank=2**32),
        replace(OBJECT, group=-1),
    ],
)
def test_object_keys_that_a_peer_would_confuse_are_refused(key: ObjectKey) -> None:
    assert refused(key.check())


@pytest.mark.parametrize("text", ["m@01000100@0@" + "0" * 64 + "@", "m@1000100@0@" + "0" * 64])
def test_object_key_texts_have_one_form(text: str) -> None:
    assert refused(parse_object_key(text))
    assert isinstance(parse_object_key("m@01000100@0@" + "0" * 64), ObjectKey)


def test_tags_of_a_request() -> None:
    assert request_tags(None) == ()
    params = {"lmcache.tag.user": "u1", "other": 5, "lmcache.tag.org": "o2"}
    assert request_tags(params) == (("user", "u1"), ("org", "o2"))
    for bad in ({"lmcache.tag.user": 1}, {"lmcache.tag.a@b": "x"}, {"lmcache.tag.a": "x@b%c"}):
        assert refused(request_tags(bad))

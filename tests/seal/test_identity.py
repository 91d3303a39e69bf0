# SPDX-License-Identifier: Apache-2.0
"""The identity table: one generated negative per field, each with its positive control."""

import contextlib
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsafe.seal import identity as identity_module
from kvsafe.seal.identity import (
    IDENTITY_FIELDS,
    Identity,
    IdentityDamaged,
    IdentityError,
    IdentityField,
    decode_identity,
    differences,
    parse_digest,
)
from kvsafe.seal.layer_names import compress_names, expand_names
from kvsafe.seal.suites import Suite
from kvsafe.seal.tables import identity_page, main, refusals_page

_SAMPLES: dict[str, tuple[object, object]] = {
    "text": ("left", "right"),
    "count": (7, 8),
    "flag": (True, False),
    "digest": (bytes(32), b"\x01" + bytes(31)),
    "list": (["a", 1], ["a", 2]),
    "map": ({"a": 1, "b": {"c": 2.5}}, {"a": 1, "b": {"c": 3.5}}),
}
_LEAF = {"list": "[1]", "map": ".b.c"}
_WRONG: dict[str, tuple[object, ...]] = {
    "text": (1, None, b"x", "x" * 2000),
    "count": (-1, True, 1.0, 2**63, None),
    "flag": (0, 1, None, "true"),
    "digest": (b"", bytes(31), "00" * 32, None),
    "list": ("ab", {}, None, [object()], [float("nan")]),
    "map": ([], None, {1: 2}, {"a": object()}, {"a": {"b": {"c": {"d": {"e": {}}}}}}),
}


def sample(which: int = 0) -> dict[str, object]:
    return {field.name: _SAMPLES[field.kind][which] for field in IDENTITY_FIELDS}


def layers(count: int, text: str = "model.layers.{}.self_attn.attn") -> list[str]:
    return [text.format(index) for index in range(count)]


@pytest.mark.parametrize("field", IDENTITY_FIELDS, ids=lambda field: field.name)
def test_each_field_changes_the_digest_and_is_named(field: IdentityField) -> None:
    base = Identity.of(sample())
    other = Identity.of({**sample(), field.name: _SAMPLES[field.kind][1]})
    found = decode_identity(other.document)
    assert isinstance(found, Mapping)
    named = [item.field for item in differences(base.values, found)]
    assert named == [field.name + _LEAF.get(field.kind, "")]
    assert all(base.digest(suite) != other.digest(suite) for suite in Suite)


@pytest.mark.parametrize("field", IDENTITY_FIELDS, ids=lambda field: field.name)
def test_equal_values_have_equal_digests(field: IdentityField) -> None:
    base = Identity.of(sample())
    again = Identity.of({**dict(reversed(sample().items())), field.name: base.values[field.name]})
    assert again.document == base.document
    assert all(base.digest(suite) == again.digest(suite) for suite in Suite)
    found = decode_identity(again.document)
    assert isinstance(found, Mapping)
    assert differences(base.values, found) == ()


@pytest.mark.parametrize("field", IDENTITY_FIELDS, ids=lambda field: field.name)
def test_wrong_kind_and_missing_field_are_our_misuse(field: IdentityField) -> None:
    for wrong in _WRONG[field.kind]:
        with pytest.raises(IdentityError, match=field.name):
            Identity.of({**sample(), field.name: wrong})
    incomplete = sample()
    del incomplete[field.name]
    with pytest.raises(IdentityError, match=f"{field.name} is missing"):
        Identity.of(incomplete)


def test_unknown_field_is_our_misuse() -> None:
    with pytest.raises(IdentityError, match="colour"):
        Identity.of({**sample(), "colour": "red"})


def test_enum_members_are_not_plain_values() -> None:
    class Count(enum.IntEnum):
        SEVEN = 7

    with pytest.raises(IdentityError, match="layers"):
        Identity.of({**sample(), "layers": Count.SEVEN})


def test_table_is_sound() -> None:
    names = [field.name for field in IDENTITY_FIELDS]
    assert len(names) == len(set(names))
    assert {field.kind for field in IDENTITY_FIELDS} <= set(_SAMPLES)
    assert all(field.source and field.why for field in IDENTITY_FIELDS)


def test_values_are_a_private_copy() -> None:
    rope: dict[str, object] = {"a": 1}
    identity = Identity.of({**sample(), "rope": rope})
    rope["a"] = 9
    assert identity.values["rope"] == {"a": 1}
    assert Identity.of(identity.values).document == identity.document


def test_differences_reach_the_leaf_in_table_order() -> None:
    rope, groups = {"rope_theta": 1e4, "factor": 2.0}, [{"window": 0}, {"window": 128}]
    ours = {**sample(), "rope": rope, "groups": groups}
    theirs = {
        **ours,
        "groups": [{"window": 0}, {"window": 64}],
        "rope": {**rope, "rope_theta": 1e6},
        "model": "other",
    }
    found = differences(ours, theirs)
    assert [item.field for item in found] == ["model", "rope.rope_theta", "groups[1].window"]
    assert (found[2].expected, found[2].found) == ("128", "64")


def test_differences_tolerate_other_tables() -> None:
    ours = sample()
    theirs = {**sample(), "later": 1}
    del theirs["rope"]
    found = differences(ours, theirs)
    assert [item.field for item in found] == ["rope", "later"]
    assert (found[0].found, found[1].expected) == ("absent", "absent")


def test_differences_keep_types_apart_and_stay_short() -> None:
    ours = {**sample(), "rope": {"a": 1, "b": 0.0, "c": True}, "model": "x"}
    theirs = {**ours, "rope": {"a": 1.0, "b": -0.0, "c": 1}, "model": "y\n" * 5000}
    found = differences(ours, theirs)
    assert [item.field for item in found] == ["model", "rope.a", "rope.b", "rope.c"]
    assert len(found[0].found) <= 160 and "\n" not in found[0].found
    many = differences(ours, {f"field {index}": index for index in range(1000)})
    assert len(many) <= 64


@given(st.binary(max_size=200))
def test_hostile_bytes_never_raise(data: bytes) -> None:
    found = decode_identity(data)
    if isinstance(found, Mapping):
        differences(sample(), found)
    else:
        assert found.reason


_TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from([f.name for f in IDENTITY_FIELDS]) | st.text(), _TREES))
def test_hostile_documents_never_raise(document: dict[str, object]) -> None:
    found = decode_identity(cbor2.dumps(document, canonical=True))
    if isinstance(found, Mapping):
        assert len(differences(sample(), found)) <= 64


def test_no_document_is_damage() -> None:
    document = Identity.of(sample()).document
    flipped = bytes([document[0] ^ 1]) + document[1:]
    for data in (b"", b"\x01", document[:-1], document + b"\x00", flipped):
        assert isinstance(decode_identity(data), IdentityDamaged)
    assert isinstance(decode_identity(document, limit=len(document) - 1), IdentityDamaged)
    assert isinstance(decode_identity(memoryview(document), limit=len(document)), Mapping)


def test_too_large_a_document_is_our_misuse() -> None:
    with pytest.raises(IdentityError, match="bytes, at most"):
        Identity.of({**sample(), "groups": ["x" * 1000] * 100})


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (layers(80), 1),
        (layers(48, "l.{}.a")[::6], 1),
        ([name for i in range(61) for name in (f"m.{i}.attn", f"m.{i}.indexer.k")], 1),
        (["one"], 1),
        ([], 0),
        (["a.3", "a.5", "a.7"], 1),
        (["a.0", "a.1", "a.5", "b.2"], 3),
        (["a.007", "a.008", "=odd", "with {0-3}", "with space 1", "with space 2"], 6),
    ],
)
def test_layer_names_shrink_and_come_back(names: list[str], texts: int) -> None:
    short = compress_names(names)
    assert len(short) == texts
    assert expand_names(short) == names


@given(st.lists(st.text(alphabet="ab.0123{}= -/", min_size=0, max_size=8), max_size=24))
def test_any_layer_names_come_back(names: list[str]) -> None:
    assert expand_names(compress_names(names)) == names


@given(st.lists(st.text(alphabet="ab01{}-/= ", max_size=24), max_size=4))
def test_hostile_layer_names_are_bounded(texts: list[str]) -> None:
    with contextlib.suppress(IdentityError):
        assert len(expand_names(texts, limit=1000)) <= 1000


def test_a_huge_range_is_refused() -> None:
    for text in (
        "l.{0-999999999}",
        "l.{0-99999999999999}",
        "l.{5-4}",
        "l.{0-4/3}",
        "l",
        "l.{0-4/0}",
    ):
        with pytest.raises(IdentityError):
            expand_names([text])


def test_digest_text() -> None:
    assert parse_digest("blake3:" + "ab" * 32) == b"\xab" * 32
    assert parse_digest("AB" * 32) == b"\xab" * 32
    for text in ("", "ab", "ab" * 33, "zz" * 32, "unknown"):
        with pytest.raises(IdentityError):
            parse_digest(text)


def test_generated_pages_are_checked(tmp_path: Path) -> None:
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--check", "--root", str(tmp_path)]) == 0
    page = tmp_path / "spec" / "identity.md"
    page.write_text(page.read_text().replace("| count |", "| text |", 1))
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert all(f"`{field.name}`" in identity_page() for field in IDENTITY_FIELDS)
    assert "| 401 | 4 | `HEADER_TAG` |" in refusals_page()


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {"x": value}])
def test_trees_may_be_five_deep_and_no_deeper(wrap: Any) -> None:
    value: Any = 1
    for _ in range(4):
        value = wrap(value)
    assert identity_module._is_tree(value)
    assert not identity_module._is_tree(wrap(value))

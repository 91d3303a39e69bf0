# SPDX-License-Identifier: Apache-2.0
"""The geometry document: small, free of what varies between starts, and compared leaf by leaf."""

import copy
from typing import Any

import cbor2
import pytest

from kvsafe.device import (
    ExpectedGroup,
    Geometry,
    GeometryExpectation,
    GeometryMismatch,
    GroupRef,
    check_expectation,
    compare,
    require_expectation,
)
from kvsafe.device.document import MAX_DIFFERENCES

from .worlds import packed_tensors, plain_tensor, simple_geometry


def alternating(layers: int = 80) -> Geometry:
    tensors = tuple(plain_tensor(3, 8 + 8 * (i % 2), f"l{i}") for i in range(layers))
    groups = tuple(
        tuple(GroupRef(i, 8 + 8 * (i % 2)) for i in range(first, layers, 2)) for first in (0, 1)
    )
    return Geometry(tensors, groups, 4)


@pytest.mark.parametrize("make", [lambda: simple_geometry(tensors=80), alternating])
def test_document_is_small(make: Any) -> None:
    assert len(cbor2.dumps(make().describe(), canonical=True)) < 600


def test_document_has_no_block_count_and_no_place() -> None:
    assert simple_geometry(blocks=8).describe() == simple_geometry(blocks=9).describe()
    one, two = packed_tensors(4, [8, 8, 8]), packed_tensors(6, [8, 8, 8])
    refs = ((GroupRef(0, 8),),)
    assert Geometry(one[:1], refs, 1).describe() == Geometry(two[1:2], refs, 1).describe()


def test_round_trip_through_cbor_is_equal() -> None:
    live = alternating().describe()
    assert compare(cbor2.loads(cbor2.dumps(live)), live) == ()


CHANGES = {
    "span": (simple_geometry(span=3), {"blocks_per_chunk", "slice_bytes"}),
    "page": (
        simple_geometry(page=17),
        {"slice_bytes", "tensors.of[0].page_bytes", "tensors.of[0].stride",
         "groups[0].refs[0].page_bytes"},
    ),
    "tensors": (
        simple_geometry(tensors=3),
        {"slice_bytes", "tensors.repeat", "groups[0].refs[0].count"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_named(name: str) -> None:
    other, names = CHANGES[name]
    found = compare(simple_geometry().describe(), other.describe())
    assert {difference.name for difference in found} == names


def test_stride_layers_and_ref_order_matter() -> None:
    refs = ((GroupRef(0, 8),),)
    plain = Geometry((plain_tensor(4, 8, "a"),), refs, 1)
    shared = Geometry((plain_tensor(4, 8, "a", "b"),), refs, 1)
    wide = Geometry(packed_tensors(4, [8], 1), refs, 1)
    assert [d.name for d in compare(plain.describe(), shared.describe())] == [
        "tensors.of[0].layers"
    ]
    assert [d.name for d in compare(plain.describe(), wide.describe())] == ["tensors.of[0].stride"]
    tensors = (plain_tensor(4, 8, "a"), plain_tensor(4, 8, "b"))
    up = Geometry(tensors, ((GroupRef(0, 8), GroupRef(1, 8)),), 1).describe()
    down = Geometry(tensors, ((GroupRef(1, 8), GroupRef(0, 8)),), 1).describe()
    assert compare(up, down)


HOSTILE: list[Any] = [
    {},
    {"tensors": 7},
    {"tensors": {"of": "x", "repeat": []}},
    {"groups": [[[[[[]]]]]]},
    {"blocks_per_chunk": True},
    {"blocks_per_chunk": 2.0},
    {b"device": None, 3: 4, None: []},
]


@pytest.mark.parametrize("change", HOSTILE)
def test_any_shape_is_a_difference_never_an_exception(change: Any) -> None:
    live = simple_geometry().describe()
    expected = {} if not change else copy.deepcopy(live) | change
    assert compare(expected, live)


def test_true_is_not_one() -> None:
    assert compare({"n": True}, {"n": 1})
    assert compare({"n": 1.0}, {"n": 1})
    assert not compare({"n": 1}, {"n": 1})


def test_differences_are_bounded() -> None:
    flood = {str(number): number for number in range(10_000)}
    assert len(compare(flood, {})) == MAX_DIFFERENCES


def expectation(**changes: Any) -> GeometryExpectation:
    values: dict[str, Any] = {
        "device_type": "cpu",
        "blocks_per_chunk": 2,
        "slice_bytes": 64,
        "groups": (ExpectedGroup(("layer0", "layer1"), (16, 16)),),
    }
    return GeometryExpectation(**(values | changes))


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "device": ({"device_type": "cuda"}, "device"),
    "span": ({"blocks_per_chunk": 3}, "blocks_per_chunk"),
    "slice": ({"slice_bytes": 65}, "slice_bytes"),
    "groups": ({"groups": ()}, "groups.length"),
    "page": (
        {"groups": (ExpectedGroup(("layer0", "layer1"), (16, 12)),)},
        "groups[0].page_bytes[1]",
    ),
    "refs": ({"groups": (ExpectedGroup(("layer0", "layer1"), (16,)),)}, "groups[0].refs.length"),
    "swapped layers": (
        {"groups": (ExpectedGroup(("layer1", "layer0"), (16, 16)),)},
        "groups[0].layers[0]",
    ),
    "missing layer": (
        {"groups": (ExpectedGroup(("layer0", "layer9"), (16, 16)),)},
        "groups[0].layers[1]",
    ),
    "stray layer": ({"groups": (ExpectedGroup(("layer0",), (16, 16)),)}, "tensors[1].layers"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_refuses_to_start_and_prints_both_sides(name: str) -> None:
    geometry = simple_geometry()
    require_expectation(expectation(), geometry)
    change, field = MISMATCHES[name]
    found = check_expectation(expectation(**change), geometry)
    assert field in {difference.name for difference in found}
    with pytest.raises(GeometryMismatch, match=r"expected .* found") as caught:
        require_expectation(expectation(**change), geometry)
    assert caught.value.differences == found


def test_packed_group_holds_all_its_layers_in_one_ref() -> None:
    tensors = (plain_tensor(4, 24, "a", "b", "c"),)
    geometry = Geometry(tensors, ((GroupRef(0, 24),), (GroupRef(0, 24),)), 1)
    groups = (ExpectedGroup(("a", "b"), (24,)), ExpectedGroup(("c",), (24,)))
    good = GeometryExpectation("cpu", 1, 24, groups)
    assert check_expectation(good, geometry) == ()
    bad = GeometryExpectation("cpu", 1, 24, (groups[0], ExpectedGroup(("d",), (24,))))
    assert {d.name for d in check_expectation(bad, geometry)} == {
        "groups[1].layers[0]",
        "tensors[0].layers",
    }

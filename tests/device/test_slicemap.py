# SPDX-License-Identifier: Apache-2.0
"""Spans and gaps against a byte-by-byte oracle."""

from hypothesis import given
from hypothesis import strategies as st

from kvsafe.device import Gap, Geometry, GroupRef, RowPlan, SliceMap, Span
from kvsafe.device import slicemap as slicemap_module

from .worlds import STORE, place_of, plain_tensor, plans, simple_geometry, worlds


def places_of_spans(geometry: Geometry, spans: list[Span]) -> dict[int, tuple[int, int, int]]:
    places: dict[int, tuple[int, int, int]] = {}
    for span in spans:
        stride = geometry.tensors[span.tensor].stride
        for byte in range(span.length):
            block, inside = divmod(span.device_offset + byte, stride)
            assert span.offset + byte not in places
            places[span.offset + byte] = (span.tensor, block, inside)
    return places


@given(st.data())
def test_spans_and_gaps_tile_the_slice(data: st.DataObject) -> None:
    geometry, window = data.draw(worlds())
    plan = data.draw(plans(geometry, window.num_rows, STORE))
    mapped = SliceMap(geometry)
    for row in plan.rows:
        expected = place_of(geometry, row)
        spans = mapped.spans(row)
        assert places_of_spans(geometry, spans) == {
            at: place for at, place in enumerate(expected) if place is not None
        }
        assert mapped.size(row) == sum(span.length for span in spans)
        left = [at for gap in mapped.gaps(row) for at in range(gap.offset, sum(gap))]
        assert left == [at for at, place in enumerate(expected) if place is None]
        assert mapped.gaps(row) is mapped.gaps(row)


def test_neighbours_on_both_sides_are_one_span() -> None:
    mapped = SliceMap(simple_geometry(blocks=9, page=16, tensors=2, span=4))
    row = RowPlan(0, 0, ((0, 3), (1, 4), (2, 7), (3, 8)))
    assert mapped.spans(row) == [
        Span(0, 0, 48, 32),
        Span(32, 0, 112, 32),
        Span(64, 1, 48, 32),
        Span(96, 1, 112, 32),
    ]
    assert mapped.gaps(row) == ()


def test_neighbours_on_one_side_are_not() -> None:
    mapped = SliceMap(simple_geometry(page=16, tensors=1, span=3))
    assert mapped.spans(RowPlan(0, 0, ((0, 2), (1, 1)))) == [
        Span(0, 0, 32, 16),
        Span(16, 0, 16, 16),
    ]
    assert mapped.spans(RowPlan(0, 0, ((0, 1), (2, 2)))) == [
        Span(0, 0, 16, 16),
        Span(32, 0, 32, 16),
    ]
    padded = Geometry((plain_tensor(8, 16, "a"),), ((GroupRef(0, 12),),), 2)
    assert SliceMap(padded).spans(RowPlan(0, 0, ((0, 1), (1, 2)))) == [
        Span(0, 0, 16, 12),
        Span(16, 0, 32, 12),
    ]
    assert SliceMap(padded).gaps(RowPlan(0, 0, ((0, 1), (1, 2)))) == (Gap(12, 4), Gap(28, 4))


def test_gap_cache_is_bounded() -> None:
    mapped = SliceMap(simple_geometry(blocks=20, page=1, tensors=1, span=12))
    for bits in range(1, 1 << 12):
        blocks = tuple((slot, slot + 1) for slot in range(12) if bits >> slot & 1)
        mapped.gaps(RowPlan(0, 0, blocks))
    assert len(mapped._gaps) <= slicemap_module._CACHE_LIMIT

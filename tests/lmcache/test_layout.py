# SPDX-License-Identifier: Apache-2.0
"""Pages to chunks and back: every byte at its place, against loops written out by hand."""

import numpy as np
import numpy.typing as npt
import pytest

from kvsafe.lmcache.layout import (
    ChunkForm,
    ChunkLayout,
    LayoutMismatch,
    PageRule,
    PageShape,
    Plane,
    known_rule,
    page_rules,
)

SHAPE = PageShape(tokens=4, heads=3, head_size=8, itemsize=2)
LAYERS, SLOTS = 2, 3
RULES = {rule.name: rule for rule in page_rules(SHAPE)}
Numbers = npt.NDArray[np.uint16]


def numbers(count: int) -> Numbers:
    """Different values all."""
    return np.arange(1, count + 1, dtype=np.uint16)


def by_hand(name: str, keys: Numbers, values: Numbers) -> Numbers:
    """A page as a backend writes it; `keys` and `values` are [token][head][place]."""
    heads_first = [part.transpose(1, 0, 2) for part in (keys, values)]
    if name == "k-transposed":
        parts = [keys.transpose(1, 2, 0).reshape(3, -1), heads_first[1].reshape(3, -1)]
        return np.concatenate(parts, axis=1).ravel()
    if name == "head-halves":
        return np.concatenate([part.reshape(3, -1) for part in heads_first], axis=1).ravel()
    if name == "token-packed":
        return np.concatenate([keys, values], axis=2).ravel()
    if name == "head-packed":
        return np.concatenate(heads_first, axis=2).ravel()
    if name == "plain-heads":
        return np.concatenate([part.ravel() for part in heads_first])
    return np.concatenate([keys.ravel(), values.ravel()])


def areas(step: int = SLOTS) -> list[int]:
    """Where each layer's pages begin."""
    return [layer * step * SHAPE.nbytes for layer in range(LAYERS)]


@pytest.mark.parametrize("name", RULES)
def test_a_chunk_has_every_element_where_lmcache_reads_it(name: str) -> None:
    layout = ChunkLayout(SHAPE, ChunkForm.two_planes(RULES[name], SHAPE), areas(), SLOTS)
    assert layout.dims == (2, LAYERS, SLOTS * 4, 24)
    wanted = numbers(2 * LAYERS * SLOTS * 4 * 24).reshape(2, LAYERS, SLOTS, 4, 3, 8)
    payload = np.concatenate(
        [
            by_hand(name, wanted[0, layer, slot], wanted[1, layer, slot])
            for layer in range(LAYERS)
            for slot in range(SLOTS)
        ]
    )
    chunk = bytearray(layout.nbytes)
    layout.to_chunk(payload.data.cast("B"), memoryview(chunk))
    assert chunk == wanted.tobytes()
    back = bytearray(payload.nbytes)
    layout.to_payload(memoryview(chunk), memoryview(back))
    assert back == payload.tobytes()


@pytest.mark.parametrize("name", RULES)
def test_trying_finds_the_rule(name: str) -> None:
    rng = np.random.default_rng(7)
    keys, values = rng.integers(1, 60000, (2, 4, 3, 8), dtype=np.uint16)
    page = by_hand(name, keys, values).view(np.uint8)
    found = known_rule(SHAPE, page, keys, values)
    assert found is not None
    assert found.name == name
    page[5] ^= 1
    assert known_rule(SHAPE, page, keys, values) is None


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("heads_first", [True, False])
def test_the_multiprocess_forms_keep_tokens_apart_and_nothing_else(
    heads_first: bool, planes: int
) -> None:
    form = ChunkForm.multiprocess(SHAPE, heads_first=heads_first, planes=planes)
    layout = ChunkLayout(SHAPE, form, areas(), SLOTS)
    assert layout.dims == (planes, LAYERS, SLOTS * 4, 48 // planes)
    payload = numbers(LAYERS * SLOTS * 4 * 48)
    order = (3, 4, planes, 16 // planes) if heads_first else (4, 3, planes, 16 // planes)
    pages = payload.reshape(LAYERS, SLOTS, *order)
    by_token = pages.transpose(0, 1, 3, 2, 4, 5) if heads_first else pages
    wanted = by_token.transpose(4, 0, 1, 2, 3, 5)
    chunk = bytearray(layout.nbytes)
    layout.to_chunk(payload.data.cast("B"), memoryview(chunk))
    assert chunk == np.ascontiguousarray(wanted).tobytes()
    back = bytearray(payload.nbytes)
    layout.to_payload(memoryview(chunk), memoryview(back))
    assert back == payload.tobytes()


def test_layers_in_any_order_and_bytes_between_them_untouched() -> None:
    turned = list(reversed(areas(SLOTS + 1)))
    layout = ChunkLayout(SHAPE, ChunkForm.two_planes(RULES["plain-tokens"], SHAPE), turned, SLOTS)
    payload = bytearray(b"\xaa" * (SHAPE.nbytes * (SLOTS + 1) * LAYERS))
    chunk = numbers(layout.nbytes // 2)
    layout.to_payload(chunk.data.cast("B"), memoryview(payload))
    area = (SLOTS + 1) * SHAPE.nbytes
    for at in (0, area):
        assert payload[at + SLOTS * SHAPE.nbytes : at + area] == b"\xaa" * SHAPE.nbytes
    again = bytearray(layout.nbytes)
    layout.to_chunk(memoryview(payload), memoryview(again))
    assert again == chunk.tobytes()


@pytest.mark.parametrize("itemsize", [1, 4])
def test_other_element_sizes(itemsize: int) -> None:
    shape = PageShape(2, 1, 4, itemsize)
    layout = ChunkLayout(shape, ChunkForm.two_planes(page_rules(shape)[0], shape), [0], 1)
    payload = bytes(range(shape.nbytes))
    chunk, back = bytearray(layout.nbytes), bytearray(layout.nbytes)
    layout.to_chunk(memoryview(payload), memoryview(chunk))
    layout.to_payload(memoryview(chunk), memoryview(back))
    assert back == payload
    assert chunk != payload


def test_what_does_not_fit_is_an_error() -> None:
    overlapping = PageRule("overlapping", Plane(0, 24, 8, 1), Plane(0, 24, 8, 1))
    with pytest.raises(LayoutMismatch, match="exactly once"):
        ChunkLayout(SHAPE, ChunkForm.two_planes(overlapping, SHAPE), areas(), SLOTS)
    layout = ChunkLayout(SHAPE, ChunkForm.two_planes(RULES["plain-heads"], SHAPE), areas(), SLOTS)
    with pytest.raises(LayoutMismatch, match="bytes, not"):
        layout.to_payload(memoryview(bytes(layout.nbytes - 1)), memoryview(bytearray(10)))

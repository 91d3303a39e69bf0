# SPDX-License-Identifier: Apache-2.0
"""The probe finds how a backend keeps its pages, says what it cannot use, and leaves no trace."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kvsafe.device import DeviceTensor, Geometry, GroupRef
from kvsafe.engine.lmcache.probe import PageNote, note_document, probe_pages, read_note

HEADS, TOKENS, SIZE, BLOCKS = 2, 8, 16, 5
Update = Callable[..., None]


def k_transposed(cache: torch.Tensor, block: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """As vLLM's CPU backend writes one page of [heads][tokens][2 x size]."""
    page = cache[block].reshape(HEADS, 2, -1)
    page[:, 0] = keys.permute(1, 2, 0).reshape(HEADS, -1)
    page[:, 1] = values.permute(1, 0, 2).reshape(HEADS, -1)


def packed(cache: torch.Tensor, block: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """[tokens][heads][K, V]."""
    cache[block] = torch.cat([keys, values], dim=2)


def scrambled(cache: torch.Tensor, block: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """By no rule that is known."""
    k_transposed(cache, block, keys.flip(0), values)


def nothing(cache: torch.Tensor, block: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """An operation that writes somewhere else."""


def layer_of(cache: torch.Tensor, write: Update, **changes: Any) -> Any:
    """An attention layer whose implementation writes pages with `write`."""

    def update(
        layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: Any
    ) -> None:
        for at in range(0, len(slots), TOKENS):
            block, offset = divmod(int(slots[at]), TOKENS)
            assert offset == 0
            write(cache, block, keys[at : at + TOKENS], values[at : at + TOKENS])

    values = {
        "kv_cache": cache,
        "num_kv_heads": HEADS,
        "head_size": SIZE,
        "sliding_window": None,
        "impl": SimpleNamespace(do_kv_cache_update=update),
    }
    return SimpleNamespace(**{**values, **changes})


def world(
    write: Update = k_transposed,
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads_first: bool = True,
    parts: int = 1,
    layers: int = 2,
    **changes: Any,
) -> tuple[Geometry, dict[str, Any], list[torch.Tensor]]:
    """Tensors in another order than the layers, and layers that write into them."""
    middle = (HEADS, TOKENS) if heads_first else (TOKENS, HEADS)
    caches = [
        torch.arange(BLOCKS * parts * HEADS * TOKENS * 2 * SIZE)
        .to(dtype)
        .reshape(BLOCKS * parts, *middle, 2 * SIZE)
        for _ in range(layers)
    ]
    names = [f"model.layers.{layer}.attn" for layer in reversed(range(layers))]
    tensors, page = [], HEADS * TOKENS * 2 * SIZE * caches[0].element_size() * parts
    for cache, name in zip(caches, names, strict=True):
        view = cache.view(-1).view(torch.int8).view(BLOCKS, page)
        tensors.append(DeviceTensor(view, page, (name,)))
    refs = tuple(GroupRef(at, page) for at in range(layers))
    known = {
        name: layer_of(cache, write, **changes) for cache, name in zip(caches, names, strict=True)
    }
    return Geometry(tuple(tensors), (refs,), 2), known, caches


def probed(*values: Any, **options: Any) -> PageNote:
    """What the probe says of a world; what it wrote is gone again."""
    geometry, layers, caches = world(*values, **options)
    before = [cache.clone() for cache in caches]
    note = probe_pages(geometry, layers)
    assert all(torch.equal(one, other) for one, other in zip(before, caches, strict=True))
    return note


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_known_rule_is_found(dtype: torch.dtype) -> None:
    note = probed(dtype=dtype)
    assert (note.problem, note.rule, note.order) == ("", "k-transposed", (1, 0))
    assert (note.tokens, note.heads, note.head_size, note.parts) == (TOKENS, HEADS, SIZE, 1)
    assert note.itemsize == dtype.itemsize
    assert note.heads_first


def test_tokens_before_heads() -> None:
    note = probed(packed, heads_first=False)
    assert (note.problem, note.rule, note.heads_first) == ("", "token-packed", False)


def test_blocks_of_several_pages() -> None:
    note = probed(parts=3)
    assert (note.problem, note.rule, note.parts, note.tokens) == ("", "k-transposed", 3, TOKENS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"write": scrambled}, "no rule that is known"),
        ({"write": nothing}, "no rule that is known"),
        ({"sliding_window": 128}, "a sliding window"),
        ({"dtype": torch.uint8}, "torch.uint8"),
        ({"head_size": SIZE // 2}, "a cache of shape"),
        ({"kv_cache": torch.zeros(2, 3, 4)}, "four dimensions"),
        ({"kv_cache": []}, "four dimensions"),
    ],
)
def test_what_cannot_be_converted_is_said(options: dict[str, Any], words: str) -> None:
    assert words in probed(**options).problem


def test_an_operation_that_fails_leaves_no_trace() -> None:
    def broken(*values: Any) -> None:
        k_transposed(*values)
        raise RuntimeError("no such kernel")

    geometry, layers, caches = world(broken)
    before = [cache.clone() for cache in caches]
    assert "RuntimeError" in probe_pages(geometry, layers).problem
    assert all(torch.equal(one, other) for one, other in zip(before, caches, strict=True))


def test_layers_that_differ_and_tensors_that_are_shared() -> None:
    geometry, layers, _ = world()
    first = geometry.tensors[0].layers[0]
    other = layer_of(layers[first].kv_cache, scrambled)
    assert probe_pages(geometry, {**layers, first: other}).problem
    assert "four dimensions" in probe_pages(geometry, {}).problem
    groups = Geometry(geometry.tensors, geometry.groups * 2, 2)
    assert "2 KV-cache groups" in probe_pages(groups, layers).problem
    shared = tuple(
        DeviceTensor(tensor.view, tensor.page_bytes, (*tensor.layers, "model.layers.9.attn"))
        for tensor in geometry.tensors
    )
    assert "several layers" in probe_pages(Geometry(shared, geometry.groups, 2), layers).problem


def test_notes_travel_as_small_documents() -> None:
    note = probed()
    assert read_note(note_document(note)) == note
    plain = msgspec.structs.replace(note, order=tuple(range(80)))
    assert note_document(plain)["order"] == 80
    assert read_note(note_document(plain)) == plain
    assert read_note(None).problem
    with pytest.raises(msgspec.ValidationError):
        read_note({"order": 3, "tokens": "many"})

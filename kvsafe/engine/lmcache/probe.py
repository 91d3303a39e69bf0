# SPDX-License-Identifier: Apache-2.0
"""How the attention backend keeps keys and values inside a page: found by trying, at start.

Nobody tells. So a worker writes a known pattern into one block of every layer with the engine's
own operation, reads the page through the tensors that kvsafe copies from, and looks which of the
known rules explains every element. The block gets its bytes back. What it finds goes to the
scheduler's process with the worker's registration; a tier for LMCache's chunks refuses to start
without it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.model_executor.models.utils import extract_layer_index

from kvsafe.device import Geometry
from kvsafe.lmcache.layout import PageRule, PageShape, known_rule

NOTE = "lmcache"
"""The name of this note in a worker's registration."""

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "half", torch.float32: "float"}
_SEED = 20
_LARGEST = 0x3F80
"""Top 16 bits of 1.0: patterns stay finite and normal in every type that is tried."""


class PageNote(msgspec.Struct, frozen=True):
    """What a worker has found about its pages; the same for every layer.

    Attributes:
        rule: name of the page rule; heads, head_size, itemsize: of one page.
        tokens: tokens of one page as the backend sees it; `parts` of them make a block.
        order: the tensor of each layer, in the order of layers.
        heads_first: whether the engine's tensor has heads before tokens.
        problem: why the pages cannot be converted; empty if they can.
    """

    rule: str = ""
    dtype: str = ""
    tokens: int = 0
    parts: int = 0
    heads: int = 0
    head_size: int = 0
    itemsize: int = 0
    order: tuple[int, ...] = ()
    heads_first: bool = True
    problem: str = ""

    @property
    def shape(self) -> PageShape:
        """The shape of a page."""
        return PageShape(self.tokens, self.heads, self.head_size, self.itemsize)


class _Unfit(Exception):
    """The pages cannot be converted; the text says why."""


def probe_pages(geometry: Geometry, layers: Mapping[str, Any]) -> PageNote:
    """Find the rule of this worker's pages. `layers` are the engine's attention layers by name."""
    try:
        return _probe(geometry, layers)
    except _Unfit as unfit:
        return PageNote(problem=str(unfit))


def _probe(geometry: Geometry, layers: Mapping[str, Any]) -> PageNote:
    order = _order(geometry)
    notes = {_probe_layer(geometry, tensor, layers) for tensor in order}
    if len(notes) != 1:
        raise _Unfit("layers with different pages")
    note = notes.pop()
    return msgspec.structs.replace(note, order=tuple(order))


def _order(geometry: Geometry) -> list[int]:
    """The tensors in the order of the model's layers."""
    if len(geometry.groups) != 1:
        raise _Unfit(f"{len(geometry.groups)} KV-cache groups, one is supported")
    if any(len(tensor.layers) != 1 for tensor in geometry.tensors):
        raise _Unfit("tensors that hold the pages of several layers")
    names = [tensor.layers[0] for tensor in geometry.tensors]
    return sorted(range(len(names)), key=lambda at: int(extract_layer_index(names[at])))


def _probe_layer(geometry: Geometry, tensor: int, layers: Mapping[str, Any]) -> PageNote:
    name = geometry.tensors[tensor].layers[0]
    layer = layers.get(name)
    cache = getattr(layer, "kv_cache", None)
    if layer is None or not isinstance(cache, torch.Tensor) or cache.dim() != 4:
        raise _Unfit(f"layer {name} has no cache of four dimensions")
    if getattr(layer, "sliding_window", None) is not None:
        raise _Unfit(f"layer {name} has a sliding window")
    if cache.dtype not in _DTYPES:
        raise _Unfit(f"elements of type {cache.dtype}")
    page = geometry.tensors[tensor]
    shape, heads_first = _page_shape(layer, cache)
    parts, rest = divmod(page.page_bytes, shape.nbytes)
    if rest or cache.shape[0] != page.num_blocks * parts:
        raise _Unfit(f"pages of {page.page_bytes} bytes for {shape}")
    rule = _try(page.view, layer, cache, shape, parts)
    if rule is None:
        raise _Unfit(f"the pages of layer {name} follow no rule that is known")
    return PageNote(
        rule=rule.name,
        dtype=_DTYPES[cache.dtype],
        tokens=shape.tokens,
        parts=parts,
        heads=shape.heads,
        head_size=shape.head_size,
        itemsize=shape.itemsize,
        heads_first=heads_first,
    )


def _page_shape(layer: Any, cache: torch.Tensor) -> tuple[PageShape, bool]:
    """The shape of a page, and whether heads come before tokens in the engine's tensor."""
    _blocks, one, two, width = (int(size) for size in cache.shape)
    heads, head_size = int(layer.num_kv_heads), int(layer.head_size)
    if width != 2 * head_size or heads not in (one, two):
        raise _Unfit(f"a cache of shape {tuple(cache.shape)}")
    heads_first = heads == one
    tokens = two if heads_first else one
    return PageShape(tokens, heads, head_size, cache.element_size()), heads_first


def _try(
    pages: torch.Tensor, layer: Any, cache: torch.Tensor, shape: PageShape, parts: int
) -> PageRule | None:
    """Write a pattern into the last block and see which rule explains its bytes."""
    block = pages.shape[0] - 1
    saved = pages[block].clone()
    keys, values = _patterns(shape, parts)
    first = block * parts * shape.tokens
    slots = torch.arange(first, first + parts * shape.tokens, device=cache.device)
    try:
        given = [_as(pattern, cache) for pattern in (keys, values)]
        layer.impl.do_kv_cache_update(layer, *given, cache, slots)
        written = pages[block].clone()
    except Exception as error:
        raise _Unfit(f"the engine's own operation failed: {type(error).__name__}") from error
    finally:
        pages[block].copy_(saved)
    page = written.cpu().numpy().view(np.uint8).reshape(parts, -1)
    rules = {
        known_rule(
            shape, page[at], *(p[at * shape.tokens :][: shape.tokens] for p in (keys, values))
        )
        for at in range(parts)
    }
    return rules.pop() if len(rules) == 1 else None


def _patterns(shape: PageShape, parts: int) -> Sequence["np.ndarray[Any, Any]"]:
    """Keys and values as unsigned numbers [tokens, heads, head size], all finite and normal."""
    rng = np.random.default_rng(_SEED)
    sizes = (2, parts * shape.tokens, shape.heads, shape.head_size)
    top = rng.integers(0x3C00, _LARGEST, sizes, dtype=np.uint16)
    if shape.itemsize == 2:
        return list(top)
    low = rng.integers(0, 1 << 16, sizes, dtype=np.uint32)
    return list(top.astype(np.uint32) << 16 | low)


def _as(pattern: "np.ndarray[Any, Any]", cache: torch.Tensor) -> torch.Tensor:
    signed = np.int16 if pattern.dtype.itemsize == 2 else np.int32
    bits = torch.from_numpy(np.ascontiguousarray(pattern).view(signed))
    return bits.view(cache.dtype).to(cache.device)


def note_document(note: PageNote) -> dict[str, object]:
    """A note as a small document."""
    document: dict[str, object] = msgspec.to_builtins(note)
    plain = list(range(len(note.order)))
    # Many layers in the plain order would fill the page of a registration.
    return {**document, "order": len(plain) if list(note.order) == plain else list(note.order)}


def read_note(document: object) -> PageNote:
    """A note from its document. Raises `ValueError` for anything else."""
    if not isinstance(document, dict):
        return PageNote(problem="the worker has not looked at its pages")
    order = document.get("order")
    full = {**document, "order": list(range(order)) if isinstance(order, int) else order}
    return msgspec.convert(full, PageNote, strict=True)

# SPDX-License-Identifier: Apache-2.0
"""Between the pages of a row and the chunks of LMCache: a rearrangement that loses no byte.

A page is one block of one layer, as the engine's attention backend keeps it. Where element
`(token, head, place)` of its keys and values lies is a linear rule, one per backend. A chunk is
`[planes, layers, tokens, heads x width]`, in C order:

- LMCache's connector in the engine writes KV_2LTD: plane 0 is K, plane 1 is V (K after rotary
  embedding and norm), width the head size.
- Its multiprocess server writes what the engine keeps per token and head in the order of the
  engine's own tensor, whatever the bytes mean: 0.5.6 as one plane, 0.4.7 the first half of them as
  plane 0 and the second as plane 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Array = npt.NDArray[np.generic]


class LayoutMismatch(ValueError):
    """Pages and chunks of these sizes do not fit together; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class Plane:
    """Where one plane's elements lie in a page, counted in elements."""

    start: int
    token: int
    head: int
    place: int


@dataclass(frozen=True, slots=True)
class PageShape:
    """One page: tokens, heads, head size of K and of V, bytes per element."""

    tokens: int
    heads: int
    head_size: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of a page that holds K and V and nothing else."""
        return 2 * self.tokens * self.heads * self.head_size * self.itemsize


@dataclass(frozen=True, slots=True)
class PageRule:
    """How a backend keeps a page: the planes of K and V."""

    name: str
    keys: Plane
    values: Plane


def page_rules(shape: PageShape) -> tuple[PageRule, ...]:
    """The rules that are known. Which of them an engine follows is found by trying."""
    t, h, d = shape.tokens, shape.heads, shape.head_size
    half, block = t * h * d, t * d
    return (
        # [heads][K: size x tokens, V: tokens x size]: vLLM on x86 CPUs without AMX.
        PageRule("k-transposed", Plane(0, 1, 2 * block, t), Plane(block, d, 2 * block, 1)),
        # [heads][K: tokens x size, V: tokens x size]: other CPU kernels.
        PageRule("head-halves", Plane(0, d, 2 * block, 1), Plane(block, d, 2 * block, 1)),
        # [tokens][heads][K, V] and [heads][tokens][K, V]: blocks-first backends.
        PageRule("token-packed", Plane(0, 2 * d * h, 2 * d, 1), Plane(d, 2 * d * h, 2 * d, 1)),
        PageRule("head-packed", Plane(0, 2 * d, 2 * block, 1), Plane(d, 2 * d, 2 * block, 1)),
        # [K, V][tokens][heads][size] and [K, V][heads][tokens][size]: plain CUDA layouts.
        PageRule("plain-tokens", Plane(0, d * h, d, 1), Plane(half, d * h, d, 1)),
        PageRule("plain-heads", Plane(0, d, block, 1), Plane(half, d, block, 1)),
    )


def packed_planes(shape: PageShape, *, heads_first: bool, planes: int) -> tuple[Plane, ...]:
    """The planes of a multiprocess chunk: of pages as [heads][tokens][2 x size] or the like."""
    width = 2 * shape.head_size
    token, head = (width, width * shape.tokens) if heads_first else (width * shape.heads, width)
    return tuple(Plane(n * width // planes, token, head, 1) for n in range(planes))


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """Chunks as one kind of peer writes them: which planes, and elements per token and head."""

    planes: tuple[Plane, ...]
    width: int

    @classmethod
    def two_planes(cls, rule: PageRule, shape: PageShape) -> "ChunkForm":
        """KV_2LTD."""
        return cls((rule.keys, rule.values), shape.head_size)

    @classmethod
    def multiprocess(cls, shape: PageShape, *, heads_first: bool, planes: int) -> "ChunkForm":
        """The multiprocess server's, with 1 or 2 planes."""
        found = packed_planes(shape, heads_first=heads_first, planes=planes)
        return cls(found, 2 * shape.head_size // planes)


class ChunkLayout:
    """Converts one worker's slice of a row to a chunk and back. Thread-safe.

    Args:
        areas: first byte, in the slice, of each layer's pages, in the order of layers.
        slots: blocks per chunk; the pages of one layer lie one after the other.

    Raises `LayoutMismatch` unless the planes cover every element of a page exactly once.
    """

    def __init__(self, shape: PageShape, form: ChunkForm, areas: Sequence[int], slots: int) -> None:
        self.shape = shape
        self.form = form
        self.dims = (
            len(form.planes),
            len(areas),
            slots * shape.tokens,
            shape.heads * form.width,
        )
        self.nbytes = len(areas) * slots * shape.nbytes
        self._areas = tuple(areas)
        self._slots = slots
        self._type = np.dtype(_UNSIGNED[shape.itemsize])
        self._prove()

    def to_chunk(self, payload: memoryview, chunk: memoryview) -> None:
        """Rearrange a slice (`payload`) into `chunk`; both have their whole length."""
        target = self._chunk(chunk)
        for plane, layer, pages in self._pages(payload):
            target[plane, layer] = pages

    def to_payload(self, chunk: memoryview, payload: memoryview) -> None:
        """Rearrange a chunk into a slice. Every byte of the layers' pages is written."""
        source = self._chunk(chunk)
        for plane, layer, pages in self._pages(payload):
            pages[...] = source[plane, layer]

    def _chunk(self, data: memoryview) -> Array:
        if data.nbytes != self.nbytes:
            raise LayoutMismatch(f"a chunk of {data.nbytes} bytes, not {self.nbytes}")
        shape, (planes, layers, _tokens, _width) = self.shape, self.dims
        whole = np.frombuffer(data, self._type)
        return whole.reshape(
            planes, layers, self._slots, shape.tokens, shape.heads, self.form.width
        )

    def _pages(self, payload: memoryview) -> "list[tuple[int, int, Array]]":
        """Per plane and layer, its elements as [slot][token][head][place], a view."""
        whole = np.frombuffer(payload, np.uint8)
        views = []
        for layer, area in enumerate(self._areas):
            pages = whole[area : area + self._slots * self.shape.nbytes].view(self._type)
            views += [(n, layer, self._view(pages, p)) for n, p in enumerate(self.form.planes)]
        return views

    def _view(self, pages: Array, plane: Plane) -> Array:
        shape, item = self.shape, self.shape.itemsize
        sizes = (self._slots, shape.tokens, shape.heads, self.form.width)
        steps = (shape.nbytes, plane.token * item, plane.head * item, plane.place * item)
        return np.lib.stride_tricks.as_strided(pages[plane.start :], sizes, steps)

    def _prove(self) -> None:
        """Every element of a page belongs to exactly one place of a chunk."""
        shape = self.shape
        count = shape.nbytes // shape.itemsize
        axes = (np.arange(shape.tokens), np.arange(shape.heads), np.arange(self.form.width))
        token, head, place = np.meshgrid(*axes, indexing="ij")
        found = [
            (p.start + token * p.token + head * p.head + place * p.place).ravel()
            for p in self.form.planes
        ]
        if not np.array_equal(np.sort(np.concatenate(found)), np.arange(count)):
            raise LayoutMismatch(f"planes that do not cover {count} elements exactly once")


def known_rule(
    shape: PageShape, page: npt.NDArray[np.uint8], keys: Array, values: Array
) -> PageRule | None:
    """The rule by which the engine has put `keys` and `values` into `page`, None if unknown.

    `keys` and `values` are unsigned [tokens, heads, head size]; `page` is uint8.
    """
    wanted = np.ascontiguousarray(np.stack([keys, values])).data.cast("B")
    for rule in page_rules(shape):
        layout = ChunkLayout(shape, ChunkForm.two_planes(rule, shape), (0,), 1)
        chunk = bytearray(layout.nbytes)
        layout.to_chunk(np.ascontiguousarray(page).data, memoryview(chunk))
        if chunk == wanted:
            return rule
    return None

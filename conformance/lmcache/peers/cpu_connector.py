# SPDX-License-Identifier: Apache-2.0
"""LMCacheConnectorV1 on vLLM's CPU backend, where LMCache has no class that copies paged KV.

For tests only. Everything but the copy is LMCache's own: keys, chunks, hashing, the client. Name
it with `kv_connector_module_path`; nothing has to be installed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

__all__ = ["CpuLMCacheConnector"]


class PagedCopies:
    """Copies between LMCache's [2, layer, token, width] and this backend's paged tensors.

    A layer is [block, head, slot, 2 * size]. Per block and head the first half holds the keys,
    turned to [size, slot]; the second half the values as [slot, size]. That is what the kernels
    for x86 without AMX read; other kernels of the backend keep another order.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._layers, _, _, self._heads, self._size = shape
        self._caches: list[torch.Tensor] = []

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Shape of a chunk of so many tokens."""
        return torch.Size([2, self._layers, num_tokens, self._heads * self._size])

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Take the engine's tensors."""
        if "kvcaches" in kwargs:
            self._caches = [*kwargs["kvcaches"]]

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Paged tensors to a chunk."""
        self.initialize_kvcaches_ptr(**kwargs)
        slots = kwargs["slot_mapping"][start:end].long().cpu()
        for layer, cache in enumerate(self._caches):
            keys, values, block, offset = self._places(cache, slots)
            chunk = memory_obj.tensor[:, layer]
            chunk[0] = keys[block, :, :, offset].flatten(1)
            chunk[1] = values[block, :, offset, :].flatten(1)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """A chunk to paged tensors, without the tokens that the engine has already."""
        self.initialize_kvcaches_ptr(**kwargs)
        done = min(end - start, max(0, kwargs.get("vllm_cached_tokens", 0) - start))
        slots = kwargs["slot_mapping"][start + done : end].long().cpu()
        for layer, cache in enumerate(self._caches):
            keys, values, block, offset = self._places(cache, slots)
            chunk = memory_obj.tensor[:, layer, done:].unflatten(-1, (self._heads, self._size))
            keys[block, :, :, offset] = chunk[0]
            values[block, :, offset, :] = chunk[1]

    def batched_from_gpu(self, objects: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        """`from_gpu` for several chunks."""
        for held, start, end in zip(objects, starts, ends, strict=True):
            self.from_gpu(held, start, end, **kwargs)

    def batched_to_gpu(self, objects: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        """`to_gpu` for several chunks."""
        for held, start, end in zip(objects, starts, ends, strict=True):
            self.to_gpu(held, start, end, **kwargs)

    def _places(self, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        blocks, heads, length, double = cache.shape
        halves = cache.view(blocks, heads, 2, length * double // 2)
        keys = halves[:, :, 0].view(blocks, heads, double // 2, length)
        values = halves[:, :, 1].view(blocks, heads, length, double // 2)
        return keys, values, slots // length, slots % length


class CpuLMCacheConnector(LMCacheConnectorV1):
    """The real connector; LMCache is told of the copies above before it builds its engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _teach_lmcache()
        super().__init__(*args, **kwargs)


def _teach_lmcache() -> None:
    """Late, since importing LMCache before the worker is up breaks vLLM's triton stand-in."""
    from lmcache.v1 import gpu_connector
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

    class Copies(PagedCopies, GPUConnectorInterface):
        """As a class that LMCache accepts."""

    def create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
        return Copies(metadata.kv_shape)

    gpu_connector.CreateGPUConnector = create

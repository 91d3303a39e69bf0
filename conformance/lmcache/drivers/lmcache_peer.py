# SPDX-License-Identifier: Apache-2.0
"""Driver of LMCache's own lm:// client; runs in an environment of `conformance/lmcache/setup`.

PYTHONPATH=. .cache/lmcache-0.5.6/bin/python -m conformance.lmcache.drivers.lmcache_peer
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from typing import Any

from conformance.lmcache.drivers.loop import Outcome, Wanted, drive

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

_BUFFERS_GB = 0.25


class LMCacheBuffers:
    """The buffers that LMCache gives its clients in an engine."""

    def __init__(self, chunk: tuple[int, int, int] = (2, 16, 32)) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        config = LMCacheEngineConfig.from_defaults(
            chunk_size=chunk[1], max_local_cpu_size=_BUFFERS_GB, local_cpu=False
        )
        self.backend: Any = LocalCPUBackend(config, _metadata(chunk), dst_device="cpu")

    def filled(self, wanted: Wanted, data: bytes) -> Any:
        """A buffer with these bytes."""
        import torch
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.protocol import INT_TO_DTYPE

        shape, dtype = torch.Size(wanted.shape), INT_TO_DTYPE[wanted.dtype]
        held = self.backend.allocate(shape, dtype, MemoryFormat(wanted.fmt))
        ctypes.memmove(held.data_ptr, data, len(data))
        return held


class LMCachePeer:
    """`LMCServerConnector` of the installed LMCache, with the buffers that an engine gives it."""

    def __init__(self, chunk: tuple[int, int, int] = (2, 16, 32)) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._buffers = LMCacheBuffers(chunk)
        self._connector: Any = None

    def open(self, wire: str, host: str, port: int) -> Outcome:
        """Connect; LMCache's client connects when it is built."""
        if wire != "lm":
            return Outcome("error", note="this driver speaks lm:// only")
        from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector

        self._connector = LMCServerConnector(host, port, self._loop, self._buffers.backend)
        return Outcome("open")

    def look(self, key: str) -> Outcome:
        """EXIST."""
        return Outcome("yes" if self._wait(self._connector.exists(self.key(key))) else "no")

    def fetch(self, key: str, wanted: Wanted) -> Outcome:
        """GET; whatever LMCache would hand on is the data."""
        held = self.get(key)
        if held is None:
            return Outcome("miss")
        try:
            shape = tuple(held.get_shape())
            return Outcome("hit", bytes(held.byte_array), more={"shape": [*shape]})
        finally:
            held.ref_count_down()

    def store(self, key: str, wanted: Wanted, data: bytes) -> Outcome:
        """PUT; it has no answer."""
        held = self.filled(wanted, data)
        self.put(key, held)
        held.ref_count_down()
        return Outcome("stored")

    def get(self, key: str) -> Any:
        """LMCache's buffer with the chunk, or None."""
        return self._wait(self._connector.get(self.key(key)))

    def put(self, key: str, held: Any) -> None:
        """Put one of LMCache's buffers."""
        self._wait(self._connector.put(self.key(key), held))

    def filled(self, wanted: Wanted, data: bytes) -> Any:
        """A buffer of LMCache's with these bytes."""
        return self._buffers.filled(wanted, data)

    def key(self, text: str) -> Any:
        """LMCache's key object of a key text."""
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey.from_string(text)

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _metadata(chunk: tuple[int, int, int]) -> Any:
    import torch
    from lmcache.v1.metadata import LMCacheMetadata

    layers, tokens, width = chunk
    return LMCacheMetadata(
        model_name="conformance",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(layers, 2, tokens, 1, width),
        chunk_size=tokens,
    )


if __name__ == "__main__":
    drive(LMCachePeer())

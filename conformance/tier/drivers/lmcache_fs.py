# SPDX-License-Identifier: Apache-2.0
"""LMCache's file-system L2 adapter (`lmcache`, Apache-2.0), driven through its own interface.

Store, lookup-and-lock and load tasks are submitted and polled as its controllers do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.memory_management import (
    MemoryFormat,
    MemoryObjMetadata,
    TensorMemoryObj,
)

from conformance.tier.drivers.stock import installed
from conformance.tier.subject import PATIENCE_S, PAYLOAD, Seen, Span, content_of, key_of

_PAUSE_S = 0.002


class LMCacheFs:
    """One adapter over one folder."""

    NAME: ClassVar[str] = "LMCache fs L2 adapter"
    # Its documentation speaks of raw bytes for throughput; a short read is reported as a miss.
    PROMISES: ClassVar[frozenset[str]] = frozenset({"errors", "shorter"})

    def __init__(self, root: Path, model: str, options: Mapping[str, Any]) -> None:
        self._model = model
        self._adapter = FSL2Adapter(FSL2AdapterConfig(str(root), **options))

    @classmethod
    def open(cls, root: Path, model: str, options: Mapping[str, Any]) -> LMCacheFs:
        """The adapter over `root`."""
        return cls(root, model, options)

    @classmethod
    def versions(cls) -> Mapping[str, str]:
        """LMCache's."""
        return installed("lmcache", "torch")

    def _key(self, number: int) -> ObjectKey:
        return ObjectKey(chunk_hash=key_of(number), model_name=self._model, kv_rank=1 << 24)

    def store(self, number: int) -> bool:
        """One store task."""
        task = self._adapter.submit_store_task(
            [self._key(number)], [_object(content_of(self._model, number))]
        )
        done = _waited(lambda: self._adapter.pop_completed_store_tasks().get(task))
        return done is not None and bool(done.is_successful())

    def load(self, number: int) -> Seen:
        """Lookup-and-lock, then load into noise, then unlock."""
        keys = [self._key(number)]
        shape = torch.Size([PAYLOAD])
        layouts = {0: MemoryLayoutDesc([shape], [torch.uint8])}
        task = self._adapter.submit_lookup_and_lock_task(keys, layouts)
        found = _waited(lambda: self._adapter.query_lookup_and_lock_result(task))
        if found is None:
            return Seen.HANG
        if not found.test(0):
            return Seen.MISS
        target = _object(b"\xa5" * PAYLOAD)
        load = self._adapter.submit_load_task(keys, [target])
        loaded = _waited(lambda: self._adapter.query_load_result(load))
        self._adapter.submit_unlock(keys)
        if loaded is None:
            return Seen.HANG
        if not loaded.test(0):
            return Seen.REFUSED
        right = bytes(target.byte_array) == content_of(self._model, number)
        return Seen.HIT if right else Seen.WRONG

    def forge(self, span: Span, number: int, body: bytes) -> bool:
        """There is no hash to recompute."""
        span.path.write_bytes(body)
        return True

    def raise_epoch(self) -> bool:
        """No such way."""
        return False

    def close(self) -> None:
        """End the adapter's loop."""
        self._adapter.close()


def _object(data: bytes) -> TensorMemoryObj:
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    shape = torch.Size([len(data)])
    metadata = MemoryObjMetadata(
        shape=shape,
        dtype=torch.uint8,
        address=0,
        phy_size=len(data),
        ref_count=1,
        fmt=MemoryFormat.BINARY_BUFFER,
    )
    return TensorMemoryObj(raw, metadata, None)


def _waited(ask: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        answer = ask()
        if answer is not None:
            return answer
        time.sleep(_PAUSE_S)
    return None

# SPDX-License-Identifier: Apache-2.0
"""vLLM's own managers over plain memory: the control beside tests of ours."""

from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from tests.engine_unit.sealed_world import HandTier

ROW_BYTES = 64


class Memory:
    """Rows as vLLM's primary tier wants them."""

    def __init__(self, rows: int) -> None:
        self.rows = memoryview(bytearray(rows * ROW_BYTES)).cast("B", (rows, ROW_BYTES))

    def create_kv_memoryview(self) -> memoryview:
        """All rows."""
        return self.rows

    def cleanup(self) -> None:
        """Nothing to give back."""


class StockWorld:
    """What `World` is, without kvsafe: the same names for the same things."""

    def __init__(
        self,
        *,
        rows: int = 4,
        policy: str = "lru",
        tiers: int = 1,
        make: Callable[[memoryview], SecondaryTierManager] = HandTier,
    ) -> None:
        self.primary = CPUPrimaryTierOffloadingManager(rows, Memory(rows), cache_policy=policy)
        view = self.primary.get_kv_memoryview()
        self.inners: list[Any] = [make(view) for _ in range(tiers)]
        self.manager = TieringOffloadingManager(self.primary, list(self.inners))
        self._requests = 0

    def request(self, req_id: str | None = None) -> ReqContext:
        """A new request."""
        self._requests += 1
        context = ReqContext(req_id=req_id or f"request-{self._requests}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """The end of one engine step."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def lookup(self, key: OffloadKey, context: ReqContext | None = None) -> LookupResult:
        """One lookup, for a new request if none is given."""
        return self.manager.lookup(key, context or self.request())

    def store(self, *keys: OffloadKey, context: ReqContext | None = None) -> ReqContext:
        """Store chunks from allocation to readiness."""
        context = context or self.request()
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, context)
        return context

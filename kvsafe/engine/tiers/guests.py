# SPDX-License-Identifier: Apache-2.0
"""What a wrapped tier brings along or is lent: its back-pressure detector, the way back to us.

Both are code of others in the scheduler's thread: the detector is a class that the operator may
name, and a tier that serves requests from elsewhere calls the manager back with whatever it has.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import ParentManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvsafe.engine.tiers.door import TierDoor, clean_number

_GUESTS = 4096


def source_of(tier: Any) -> CacheHitSource:
    """Where a tier says that its hits come from; unspecified if it says something else."""
    source = tier.cache_hit_source
    return source if isinstance(source, CacheHitSource) else CacheHitSource.EXTERNAL_UNSPECIFIED


class DetectorDoor:
    """A back-pressure detector whose faults mean: no pressure."""

    def __init__(self, inner: Any, door: TierDoor) -> None:
        self._inner = inner
        self._door = door

    def should_store(self, num_blocks: int) -> bool:
        """Whether these may be stored."""
        return self._door.ask("should_store", lambda: self._inner.should_store(num_blocks), True)

    def update(self, submit_time: float, num_bytes: int) -> None:
        """One store has ended."""
        self._door.tell("update", lambda: self._inner.update(submit_time, num_bytes))

    def is_under_pressure(self) -> bool:
        """Whether the tier lags behind."""
        return self._door.ask("is_under_pressure", self._inner.is_under_pressure, False)

    def reset(self) -> None:
        """Forget everything."""
        self._door.tell("reset", self._inner.reset)

    @property
    def stats(self) -> dict[str, float]:
        """What can be shown as a number."""
        found: dict[Any, Any] = self._door.ask("stats", lambda: self._inner.stats, {})
        return {
            str(name): number
            for name, value in found.items()
            if (number := clean_number(value)) is not None
        }

    @property
    def policy(self) -> "DetectorDoor":
        """Where vLLM asks for the stores that were dropped."""
        return self

    def pop_stores_dropped(self) -> tuple[int, int]:
        """Stores and blocks that were dropped since the last call."""
        found = self._door.ask("pop_stores_dropped", self._dropped, (0, 0))
        numbers = [clean_number(value) for value in found]
        if len(numbers) != 2 or None in numbers:
            return 0, 0
        return int(numbers[0] or 0), int(numbers[1] or 0)

    def _dropped(self) -> tuple[int, int]:
        dropped: tuple[int, int] = self._inner.policy.pop_stores_dropped()
        return dropped


class ParentDoor(ParentManager):
    """The manager as a tier may use it: with requests of its own, and for keys that are there.

    A tier's requests get names that no request of the engine has; otherwise it could end one of
    those. Raises `LookupError` to the tier for what it may not do, before anything was done.
    """

    def __init__(
        self,
        label: str,
        ready: Callable[[Collection[OffloadKey]], Collection[OffloadKey]],
        begin: Callable[[int], None],
    ) -> None:
        self._label = label
        self._ready = ready
        self._begin = begin
        self._guests: dict[str, ReqContext] = {}
        self.parent: ParentManager | None = None

    def _lent(self) -> ParentManager:
        if self.parent is None:
            raise LookupError("the parent is lent for the length of one call")
        return self.parent

    def _guest(self, req_context: ReqContext) -> ReqContext:
        guest = self._guests.get(req_context.req_id)
        if guest is None:
            raise LookupError("no such request of this tier")
        return guest

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request from elsewhere."""
        parent = self._lent()
        if req_context.req_id in self._guests or len(self._guests) >= _GUESTS:
            raise LookupError("this request is here already, or there are too many")
        guest = replace(req_context, req_id=f"{self._label}/{req_context.req_id}")
        self._guests[req_context.req_id] = guest
        return parent.on_new_request(guest)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look one chunk up."""
        return self._lent().lookup(key, self._guest(req_context))

    def create_store_job(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> TransferJob:
        """Pin chunks that are ready, and only if all of them are."""
        parent, guest = self._lent(), self._guest(req_context)
        wanted = list(dict.fromkeys(keys))
        if len(self._ready(wanted)) != len(wanted):
            raise LookupError("not every chunk is there")
        job = parent.create_store_job(wanted, guest)
        self._begin(job.job_id)
        return job

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request from elsewhere."""
        parent, guest = self._lent(), self._guest(req_context)
        del self._guests[req_context.req_id]
        parent.on_request_finished(guest)

# SPDX-License-Identifier: Apache-2.0
"""Driver of LMCache's RESP L2 adapter; runs in an environment of `conformance/lmcache/setup`.

PYTHONPATH=. .cache/lmcache-0.5.6/bin/python -m conformance.lmcache.drivers.lmcache_resp_peer

The adapter is what LMCache's multiprocess server reads and writes a Redis with: its native client
(C++) and the Python around it. One worker, so that one connection is played to at a time.
"""

from __future__ import annotations

import inspect
import os
import select
from collections.abc import Callable
from typing import Any

from conformance.lmcache.drivers.lmcache_peer import LMCacheBuffers
from conformance.lmcache.drivers.loop import Outcome, Wanted, drive

_STALE = 0xA5


class LMCacheRespPeer:
    """`NativeConnectorL2Adapter` over the native Redis client, with LMCache's own buffers."""

    def __init__(self) -> None:
        self._buffers = LMCacheBuffers()
        self._adapter: Any = None

    def open(self, wire: str, host: str, port: int) -> Outcome:
        """Connect as its factory does. The one before is left alone: closing it may wait."""
        if wire != "resp":
            return Outcome("error", note="this driver speaks resp only")
        from lmcache.lmcache_redis import LMCacheRedisClient
        from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import (
            NativeConnectorL2Adapter,
        )

        self._adapter = NativeConnectorL2Adapter(LMCacheRedisClient(host, port, 1, "", ""))
        return Outcome("open")

    def look(self, key: str) -> Outcome:
        """Its lookup: EXISTS. An error of the client's and "not there" look alike behind it."""
        submit = self._adapter.submit_lookup_and_lock_task
        # 0.5 wants to know the layout too, and uses it for other adapters only.
        more: list[Any] = [{}] if len(inspect.signature(submit).parameters) > 1 else []
        task = submit([_key(key)], *more)
        notified = self._adapter.get_lookup_and_lock_event_fd()
        found = _wait(notified, lambda: self._adapter.query_lookup_and_lock_result(task))
        return Outcome("yes" if found.test(0) else "no")

    def fetch(self, key: str, wanted: Wanted) -> Outcome:
        """GET into a buffer that held something else before; a hit is what it says is one."""
        held = self._buffers.filled(wanted, bytes([_STALE]) * wanted.length)
        task = self._adapter.submit_load_task([_key(key)], [held])
        notified = self._adapter.get_load_event_fd()
        found = _wait(notified, lambda: self._adapter.query_load_result(task))
        outcome = Outcome("hit", bytes(held.byte_array)) if found.test(0) else Outcome("miss")
        held.ref_count_down()
        return outcome

    def store(self, key: str, wanted: Wanted, data: bytes) -> Outcome:
        """SET; stored is what the adapter calls a success."""
        held = self._buffers.filled(wanted, data)
        task = self._adapter.submit_store_task([_key(key)], [held])
        notified = self._adapter.get_store_event_fd()
        done = _wait(notified, lambda: self._adapter.pop_completed_store_tasks().get(task))
        held.ref_count_down()
        return Outcome("stored") if done.is_successful() else Outcome("lost")


def _wait(notified: int, query: Callable[[], Any]) -> Any:
    """What a task came to; for as long as it takes, since the suite has the patience."""
    while True:
        select.select([notified], [], [])
        os.read(notified, 8)
        found = query()
        if found is not None:
            return found


def _key(text: str) -> Any:
    """LMCache's key object of a key text."""
    from lmcache.v1.distributed.api import ObjectKey

    model, rank, group, digest = text.split("@")
    return ObjectKey(bytes.fromhex(digest), model, int(rank, 16), int(group, 16))


if __name__ == "__main__":
    drive(LMCacheRespPeer())

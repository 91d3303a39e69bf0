# SPDX-License-Identifier: Apache-2.0
"""Loads that workers have not ended: which chunks they lost, and which of them take too long.

A copy that hangs may still write into the accelerator's blocks, so neither its blocks nor its
row can be given to anybody, and its request cannot be computed in the same blocks either: it
waits until the copy ends or its client goes away. But others must not wait with it, as they
would: vLLM lets a request wait for chunks that another one loads, and copies of one row run one
after the other. So the chunks of a load over its deadline are offered to nobody any more.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable

from vllm.v1.kv_offload.base import OffloadKey


class OpenLoads:
    """Loads from `prepare_load` to `complete_load`. One thread (the scheduler's).

    Attributes:
        lost: chunks that were gone when their load was prepared, so that nothing was pinned.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[str, tuple[float, Collection[OffloadKey]]] = {}
        self._told: set[str] = set()
        self._ended: dict[str, Collection[OffloadKey]] = {}
        self._left: set[str] = set()
        self.lost: Counter[tuple[str, OffloadKey]] = Counter()

    def begin(self, request: str, keys: Collection[OffloadKey]) -> None:
        """A load of these chunks is prepared; a request has one at a time."""
        self._left.discard(request)
        self._since[request] = time.monotonic(), keys

    def lose(self, request: str, keys: Iterable[OffloadKey]) -> None:
        """These chunks of it are gone."""
        self.lost.update((request, key) for key in keys)

    def leave(self, request: str) -> None:
        """The request has ended before its load has: a failure of it concerns nobody any more."""
        self._ended.pop(request, None)
        if request in self._since:
            self._left.add(request)

    def end(self, request: str, keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """It has ended, well or badly. Returns those of its chunks that were pinned."""
        self._since.pop(request, None)
        self._told.discard(request)
        if request in self._left:
            self._left.discard(request)
        else:
            self._ended[request] = keys
        if not self.lost:
            return keys
        return [key for key in keys if not self._was_lost((request, key))]

    def take_failed(self, chunks: frozenset[bytes]) -> list[str]:
        """Requests whose load had one of these chunks: open ones, and those that ended just now.

        With several workers a failure may be reported before the load has ended.
        """
        ended, self._ended = self._ended, {}
        if not chunks:
            return []
        loads = [*ended.items(), *((name, keys) for name, (_, keys) in self._since.items())]
        loads = [load for load in loads if load[0] not in self._left]
        return [name for name, keys in loads if not chunks.isdisjoint(keys)]

    def _was_lost(self, load: tuple[str, OffloadKey]) -> bool:
        if load not in self.lost:
            return False
        self.lost[load] -= 1
        if self.lost[load] == 0:
            del self.lost[load]
        return True

    def overdue(self) -> list[Collection[OffloadKey]]:
        """The chunks of each load that has gone over its deadline since the last call."""
        self._ended.clear()
        if not self._since:
            return []
        latest = time.monotonic() - self._limit_s
        late = {name for name, (since, _) in self._since.items() if since < latest}
        fresh = late - self._told
        self._told |= fresh
        return [self._since[name][1] for name in sorted(fresh)]

    def clear(self) -> None:
        """A reset has overtaken all of them; their rows are kept apart."""
        self._since.clear()
        self._told.clear()
        self._ended.clear()
        self._left.clear()
        self.lost.clear()

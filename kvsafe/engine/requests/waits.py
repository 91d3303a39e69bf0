# SPDX-License-Identifier: Apache-2.0
"""What requests wait for: so that nobody waits twice, and nothing awaited is thrown away.

vLLM answers every lookup anew. A prefix longer than the rows then never ends: its last chunk is
promoted into the row of its first, and the other way round, for ever. Here a request starts the
promotion of a chunk once; when the chunk is gone after that, it is a miss and is recomputed.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

CLAIM_STEPS = 8
"""How many steps a store that found no room keeps promotions from taking the next."""


@dataclass(slots=True)
class _Wait:
    """One request's lookups since it last computed something."""

    told: set[bytes] = field(default_factory=set)
    now: set[bytes] = field(default_factory=set)
    begun: set[bytes] = field(default_factory=set)
    since: float | None = None


class Waits:
    """The keys that each request was told "hit" or "on its way" for. One thread (scheduler).

    Attributes:
        awaited: how many requests wait for each key.
        failed: requests of which a load has failed, and how often they have asked since.
    """

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: for how long a request may be told to ask a tier again."""
        self._patience_s = patience_s
        self._waits: dict[str, _Wait] = {}
        self.failed: dict[str, int] = {}
        self.awaited: Counter[bytes] = Counter()

    def begin(self, request: str) -> None:
        """The request looks up its keys from the first one on."""
        self._waits.setdefault(request, _Wait()).now = set()

    def tell(self, request: str, key: bytes) -> None:
        """The request was told that this chunk is there, or on its way."""
        wait = self._waits.get(request)
        if wait is None:
            return
        wait.now.add(key)
        if key not in wait.told:
            wait.told.add(key)
            self.awaited[key] += 1

    def end(self, request: str, *, offered: bool = False) -> None:
        """The lookups are over: what was not asked for again is awaited no longer.

        `offered`: the request was told of chunks that it may load now, not to ask again.
        """
        if offered and request in self.failed:
            self.failed[request] += 1
        wait = self._waits.get(request)
        if wait is not None:
            self._release(wait, wait.told - wait.now)

    def asks_again(self, request: str, key: bytes) -> None:
        """The request was told to ask for this chunk again: nothing is here yet to be kept."""
        wait = self._waits.get(request)
        if wait is not None:
            wait.now.add(key)

    def told(self, request: str) -> set[bytes]:
        """The chunks that the request was told of, or to ask for again, when it last asked."""
        wait = self._waits.get(request)
        return set() if wait is None else set(wait.now)

    def start_promotion(self, request: str, key: bytes) -> None:
        """The request has caused a promotion of this chunk."""
        wait = self._waits.get(request)
        if wait is not None:
            wait.begun.add(key)

    def is_spent(self, request: str, key: bytes) -> bool:
        """Whether the request has had its promotion of this chunk already."""
        wait = self._waits.get(request)
        return wait is not None and key in wait.begun

    def fails(self, request: str) -> None:
        """A load of the request has failed: it will be computed, or load what is left."""
        self.failed[request] = 0

    def is_barred(self, request: str) -> bool:
        """Whether the request was not admitted with what is left, and is to be computed (U).

        vLLM keeps the blocks of the failed load reserved, against the request itself.
        """
        return self.failed.get(request, 0) > 0

    def tires(self, request: str) -> bool:
        """The request is told to ask again; whether it has been told so for too long."""
        wait = self._waits.get(request)
        if wait is None:
            return False
        now = time.monotonic()
        if wait.since is None:
            wait.since = now
        return now - wait.since > self._patience_s

    def loads(self, request: str) -> None:
        """What the request was told is pinned now."""
        self.failed.pop(request, None)
        wait = self._waits.get(request)
        if wait is not None:
            self._release(wait, set(wait.told))
            # Whatever it waits for later has a patience of its own.
            wait.since = None

    def forget(self, request: str) -> None:
        """The request computes, or has ended."""
        self.failed.pop(request, None)
        wait = self._waits.pop(request, None)
        if wait is not None:
            self._release(wait, wait.told)

    def clear(self) -> None:
        """Nothing is there any more that could be awaited.

        A failed load is not forgotten: what vLLM has reserved for it outlives a reset.
        """
        self._waits.clear()
        self.awaited.clear()

    def _release(self, wait: _Wait, keys: set[bytes]) -> None:
        for key in keys:
            self.awaited[key] -= 1
            if self.awaited[key] <= 0:
                del self.awaited[key]
        wait.told = wait.told - keys


class Claims:
    """Stores that found no room: for a few steps promotions leave the next room to them."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def __bool__(self) -> bool:
        return any(left > 0 for left in self._left.values())

    def make(self, request: str) -> None:
        """A store of this request found no room; a claim that has run out is not renewed."""
        self._left.setdefault(request, CLAIM_STEPS)

    def drop(self, request: str) -> None:
        """The request has stored, or has ended."""
        self._left.pop(request, None)

    def end_step(self) -> None:
        """One step less for every claim."""
        self._left = {request: max(0, left - 1) for request, left in self._left.items()}

    def clear(self) -> None:
        """No store waits."""
        self._left.clear()

# SPDX-License-Identifier: Apache-2.0
"""Keys that wait for a write in flight before they go to a request-level tier (finding P).

vLLM parks such a key until no write of it is in flight. If that write fails and others of the
same key begin before each step, the key waits for ever and its ended request is never finalised.
Here a key waits for the write that it was parked for, and for no later one.
"""

from collections.abc import Callable, Collection, Iterable

from vllm.v1.kv_offload.base import OffloadKey

GenerationOf = Callable[[OffloadKey], int | None]


class Parking:
    """For each parked key of each request, the generation of the row that it waits for."""

    def __init__(self, generation_of: GenerationOf) -> None:
        self._generation_of = generation_of
        self._writes: dict[tuple[str, OffloadKey], int | None] = {}

    def __len__(self) -> int:
        return len(self._writes)

    def park(self, request: str, keys: Iterable[OffloadKey]) -> None:
        """Note what these keys wait for; one that is parked already keeps its first write."""
        for key in keys:
            self._writes.setdefault((request, key), self._generation_of(key))

    def waiting(self, request: str, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Those of the keys whose write is still the one that they were parked for."""
        return [key for key in keys if self._generation_of(key) == self._writes.get((request, key))]

    def keep(self, live: Iterable[tuple[str, OffloadKey]]) -> None:
        """Forget every key that is not parked any more."""
        live = set(live)
        if len(live) != len(self._writes):
            self._writes = {place: write for place, write in self._writes.items() if place in live}

    def clear(self) -> None:
        """Forget everything: a reset."""
        self._writes.clear()

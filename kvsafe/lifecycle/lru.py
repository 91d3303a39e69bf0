# SPDX-License-Identifier: Apache-2.0
"""Least recently used: one line of keys, the next to go first.

A key's place is set when it is inserted and when a request that used it ends; pinning,
unpinning and lookups do not move it. A request's keys move tail first, so that the head of a
prefix outlives its tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kvsafe.lifecycle.policy import Key

LruOrder: TypeAlias = tuple[Key, ...]


class Lru:
    """vLLM 0.32's `LRUCachePolicy`, whose heap of ranks is this line."""

    name = "lru"
    counts_reuse = False

    def empty(self) -> LruOrder:
        """No keys."""
        return ()

    def resident(self, order: LruOrder) -> LruOrder:
        """All keys, the next to go first."""
        return order

    def insert(self, order: LruOrder, key: Key) -> LruOrder:
        """New keys go last."""
        return (*order, key)

    def remove(self, order: LruOrder, key: Key) -> LruOrder:
        """The others keep their order."""
        return tuple(other for other in order if other != key)

    def missed(self, order: LruOrder, keys: Sequence[Key], capacity: int) -> LruOrder:
        """A key that is not there has no place to move."""
        return order

    def touch(self, order: LruOrder, keys: Sequence[Key]) -> LruOrder:
        """Move `keys` (prefix order) to the end, the first of them last."""
        moved = [key for key in reversed(keys) if key in order]
        return (*(key for key in order if key not in moved), *moved)

    def finished(
        self, order: LruOrder, seen: Sequence[Key], inserted: Iterable[Key], reused: Iterable[Key]
    ) -> LruOrder:
        """One move for the whole request."""
        return self.touch(order, seen)

    def victims(
        self, order: LruOrder, count: int, allowed: Callable[[Key], bool]
    ) -> tuple[Key, ...] | None:
        """The first `count` of the line that may go."""
        found = tuple(key for key in order if allowed(key))[:count]
        return found if len(found) == count else None

    def evict(self, order: LruOrder, victims: Sequence[Key], capacity: int) -> LruOrder:
        """The others keep their order."""
        return tuple(key for key in order if key not in victims)

    def relabel(self, order: LruOrder, names: Sequence[Key]) -> LruOrder:
        """The same line with other names."""
        return tuple(names[key] for key in order)

    def place(self, order: LruOrder, key: Key) -> tuple[int, ...]:
        """Place in the line, 1 for the next to go, 0 if it is not there."""
        return (order.index(key) + 1,) if key in order else (0,)

# SPDX-License-Identifier: Apache-2.0
"""Adaptive replacement: T1 for keys used once, T2 for keys that a second request used.

B1 and B2 remember what was evicted from each; a miss that finds its key there moves the target
size of T1. One request's repeated touches are not frequency: a key that the request itself
inserted stays in T1, and a key that it read moves to T2 once, when the request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvsafe.lifecycle.policy import Key

Line = tuple[Key, ...]


class ArcOrder(NamedTuple):
    """The four lines, the next to go first, and the target size of T1 (rows, not whole)."""

    t1: Line = ()
    t2: Line = ()
    b1: Line = ()
    b2: Line = ()
    target: float = 0.0


def _without(line: Line, gone: Iterable[Key]) -> Line:
    gone = tuple(gone)
    return tuple(key for key in line if key not in gone)


def _to_end(line: Line, key: Key) -> Line:
    return (*_without(line, (key,)), key)


class Arc:
    """vLLM 0.32's `ARCCachePolicy`."""

    name = "arc"
    counts_reuse = True

    def empty(self) -> ArcOrder:
        """No keys, no ghosts, target 0."""
        return ArcOrder()

    def resident(self, order: ArcOrder) -> Line:
        """T1, then T2."""
        return order.t1 + order.t2

    def insert(self, order: ArcOrder, key: Key) -> ArcOrder:
        """New keys go to the end of T1; their ghosts are forgotten."""
        return order._replace(
            t1=(*order.t1, key), b1=_without(order.b1, (key,)), b2=_without(order.b2, (key,))
        )

    def remove(self, order: ArcOrder, key: Key) -> ArcOrder:
        """Leaves no ghost: it was not evicted."""
        return order._replace(t1=_without(order.t1, (key,)), t2=_without(order.t2, (key,)))

    def missed(self, order: ArcOrder, keys: Sequence[Key], capacity: int) -> ArcOrder:
        """Ghosts that are asked for again move the target, tail of the prefix first."""
        for key in reversed(keys):
            order = self._adapt(order, key, capacity)
        return order

    def _adapt(self, order: ArcOrder, key: Key, capacity: int) -> ArcOrder:
        t1, t2, b1, b2, target = order
        if key in b1:
            target = min(target + max(1, len(b2) / len(b1)), capacity)
            return ArcOrder(t1, t2, _to_end(b1, key), b2, float(target))
        if key in b2:
            target = max(target - max(1, len(b1) / len(b2)), 0)
            return ArcOrder(t1, t2, b1, _to_end(b2, key), float(target))
        return order

    def finished(
        self, order: ArcOrder, seen: Sequence[Key], inserted: Iterable[Key], reused: Iterable[Key]
    ) -> ArcOrder:
        """Inserted keys only become recent; read keys become frequent, once."""
        inserted, reused = frozenset(inserted), frozenset(reused)
        for key in reversed(seen):
            if key in inserted:
                order = self._refresh(order, key)
            elif key in reused and key in self.resident(order):
                order = order._replace(t1=_without(order.t1, (key,)), t2=_to_end(order.t2, key))
        return order

    def _refresh(self, order: ArcOrder, key: Key) -> ArcOrder:
        if key in order.t1:
            return order._replace(t1=_to_end(order.t1, key))
        if key in order.t2:
            return order._replace(t2=_to_end(order.t2, key))
        return order

    def victims(
        self, order: ArcOrder, count: int, allowed: Callable[[Key], bool]
    ) -> tuple[Key, ...] | None:
        """From T1 while it is at its target or above, else from T2; then whatever there is."""
        once = [key for key in reversed(order.t1) if allowed(key)]
        often = [key for key in reversed(order.t2) if allowed(key)]
        size, found = len(order.t1), []
        for _ in range(count):
            if size >= int(order.target) and once:
                size, key = size - 1, once.pop()
            elif often:
                key = often.pop()
            elif once:
                size, key = size - 1, once.pop()
            else:
                return None
            found.append(key)
        return tuple(found)

    def evict(self, order: ArcOrder, victims: Sequence[Key], capacity: int) -> ArcOrder:
        """Victims become ghosts; each ghost line keeps its newest `capacity` keys."""
        b1 = (*order.b1, *(key for key in victims if key in order.t1))
        b2 = (*order.b2, *(key for key in victims if key in order.t2))
        return ArcOrder(
            _without(order.t1, victims),
            _without(order.t2, victims),
            b1[max(0, len(b1) - capacity) :],
            b2[max(0, len(b2) - capacity) :],
            order.target,
        )

    def relabel(self, order: ArcOrder, names: Sequence[Key]) -> ArcOrder:
        """The same lines with other names."""
        t1, t2, b1, b2 = (tuple(names[key] for key in line) for line in order[:4])
        return ArcOrder(t1, t2, b1, b2, order.target)

    def place(self, order: ArcOrder, key: Key) -> tuple[int, ...]:
        """Which line and where in it; 0 if it is in none."""
        for number, line in enumerate(order[:4], 1):
            if key in line:
                return (number, line.index(key))
        return (0,)

# SPDX-License-Identifier: Apache-2.0
"""What a replacement policy is to the machine: an immutable order of keys and six pure functions.

A policy knows keys and their order, nothing of rows or refcounts: who may be evicted is told
to it. `lru` and `arc` follow vLLM 0.32 step by step (`cpu/policies/lru.py` and `arc.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

# Each policy has its own tuple type; to the machine it is only something hashable.
Order: TypeAlias = Any
Key: TypeAlias = Any


class Policy(Protocol):
    """One replacement policy. Orders are values: each function returns a new one."""

    name: str
    # Whether the order ever depends on which keys a request inserted, reused or missed.
    counts_reuse: bool

    def empty(self) -> Order:
        """The order of an empty tier."""
        ...

    def resident(self, order: Order) -> Sequence[Key]:
        """All keys that are in the tier, ready or not."""
        ...

    def insert(self, order: Order, key: Key) -> Order:
        """A row was given to `key`."""
        ...

    def remove(self, order: Order, key: Key) -> Order:
        """`key` left without being evicted: its write failed, or it was withdrawn."""
        ...

    def missed(self, order: Order, keys: Sequence[Key], capacity: int) -> Order:
        """A request is about to insert `keys`, once per request and key; prefix order."""
        ...

    def finished(
        self, order: Order, seen: Sequence[Key], inserted: Iterable[Key], reused: Iterable[Key]
    ) -> Order:
        """A request ends. `seen`: its keys in prefix order; `inserted` without `reused`."""
        ...

    def victims(
        self, order: Order, count: int, allowed: Callable[[Key], bool]
    ) -> tuple[Key, ...] | None:
        """The next `count` keys to evict among the allowed ones, or None if there are fewer."""
        ...

    def evict(self, order: Order, victims: Sequence[Key], capacity: int) -> Order:
        """Take `victims` out, in this order."""
        ...

    def relabel(self, order: Order, names: Sequence[Key]) -> Order:
        """The same order with key k called names[k]."""
        ...

    def place(self, order: Order, key: Key) -> tuple[int, ...]:
        """Where `key` stands, as something that sorts and does not depend on key numbers."""
        ...

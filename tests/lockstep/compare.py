# SPDX-License-Identifier: Apache-2.0
"""Everything about vLLM's primary tier that the machine has an opinion on, looked at after a call.

Row numbers are nobody's promise: what is compared is that a chunk keeps its row and that no
two chunks share one. All else is compared as it is, private counters and lists included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

from kvsafe.lifecycle.arc import ArcOrder
from tests.lockstep.book import Book, Note


def differ(what: str, machine: object, real: object) -> None:
    """Raises `AssertionError` unless both say the same."""
    assert machine == real, f"{what}: the machine says {machine}, the real class {real}"


class Names:
    """Small numbers for the machine, offload keys for the real classes."""

    def __init__(self, keys: int, groups: int = 1) -> None:
        self.keys = [
            make_offload_key(bytes([number + 1]) * 32, number % groups) for number in range(keys)
        ]
        self.groups = groups
        self._number = {key: number for number, key in enumerate(self.keys)}

    def real(self, numbers: Iterable[int]) -> list[OffloadKey]:
        """Offload keys."""
        return [self.keys[number] for number in numbers]

    def numbers(self, keys: Iterable[OffloadKey]) -> tuple[int, ...]:
        """Small numbers."""
        return tuple(self._number[key] for key in keys)

    def context(self, request: str, positions: str) -> ReqContext:
        """A request that knows where its keys stand: of `all` groups, of the `first`, or `none`."""
        context = ReqContext(req_id=request)
        for number, key in enumerate(self.keys):
            if positions == "all" or (positions == "first" and number % self.groups == 0):
                context.set_offload_key_position(key, number // self.groups)
        return context

    def sort(self, noticed: Sequence[int], positions: str) -> list[int]:
        """Keys in the order in which a policy hears of them when their request ends."""
        lines = [[key for key in noticed if key % self.groups == at] for at in range(self.groups)]
        for at, line in enumerate(lines):
            if positions == "all" or (positions == "first" and at == 0):
                line.sort(key=lambda key: key // self.groups)
        flat = [key for line in lines for key in line]
        known = positions == "all" or (positions == "first" and not any(lines[1:]))
        return sorted(flat, key=lambda key: key // self.groups) if known else flat


class PrimaryEye:
    """Looks at a `CPUOffloadingManager` (or one derived from it) and at a book of the machine."""

    def __init__(self, real: Any, book: Book, names: Names) -> None:
        self.real, self.book, self.names = real, book, names
        self._rows: dict[int, tuple[int, int]] = {}

    def chunks(self) -> dict[int, Any]:
        """vLLM's chunks by number."""
        policy = self.real._policy
        held = policy.chunks if hasattr(policy, "chunks") else {**policy.t1, **policy.t2}
        return {self.names.numbers([key])[0]: chunk for key, chunk in held.items()}

    def look(self) -> None:
        """Raises `AssertionError` at the first difference."""
        chunks = self.chunks()
        state = self.book.state
        counts = {key: int(chunk.ref_cnt) for key, chunk in chunks.items()}
        differ("refcounts", self.book.resident(), counts)
        self._look_at_order()
        self._look_at_rows({key: int(chunk.chunk_id) for key, chunk in chunks.items()})
        differ("evictable", state.counts.evictable, self.real._num_evictable_cache_chunks)
        differ("write pending", state.counts.pending, self.real._num_write_pending_chunks)

    def _look_at_order(self) -> None:
        policy, order = self.real._policy, self.book.state.order
        if isinstance(order, ArcOrder):
            lines = (policy.t1, policy.t2, policy.b1, policy.b2)
            differ("ARC", tuple(order), (*map(self.names.numbers, lines), policy.target_t1_size))
            return
        ranked = sorted(policy.chunks, key=policy._ranks.__getitem__)
        differ("LRU", order, self.names.numbers(ranked))
        idle = {key for key, refcount in self.book.resident().items() if refcount == 0}
        differ(
            "evictable set", idle - self.book.shielded, set(self.names.numbers(policy._evictable))
        )
        queued = {key for rank, key in policy._heap if policy._ranks.get(key) == rank}
        assert policy._evictable <= queued, "an idle chunk that no eviction would find"

    def _look_at_rows(self, rows: dict[int, int]) -> None:
        given = {key: (self.book.given[key], row) for key, row in rows.items()}
        moved = {
            key
            for key, (time, row) in given.items()
            if key in self._rows and self._rows[key][0] == time and self._rows[key][1] != row
        }
        assert not moved, f"chunks changed their rows: {moved}"
        self._rows = given
        free = [*self.real._free_list]
        free += range(self.real._num_allocated_chunks, self.real._num_chunks)
        whole = sorted([*free, *rows.values()])
        differ("rows, free or owned", list(range(self.book.world.rows)), whole)

    def look_at_events(self, source: Any) -> None:
        """The same events in the same order."""
        told = [
            Note(event.removed, self.names.numbers(event.keys)) for event in source.take_events()
        ]
        differ("events", self.book.take_notes(), told)

    def look_at_gauges(self) -> None:
        """Usage as a recount finds it."""
        from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics as Metrics

        rows, refs = self.book.world.rows, list(self.book.resident().values())
        writing, reading = sum(ref < 0 for ref in refs), sum(ref > 0 for ref in refs)
        gauges = self.real.get_stats().reduce()
        for name, count in (
            (Metrics.CPU_CACHE_USAGE_PERC, writing + reading),
            (Metrics.CPU_CACHE_WRITE_USAGE_PERC, writing),
            (Metrics.CPU_CACHE_READ_USAGE_PERC, reading),
        ):
            differ(str(name), round(count / rows, 9), round(gauges[str(name)], 9))

# SPDX-License-Identifier: Apache-2.0
"""The shield: what a request awaits is no victim of a promotion.

Between the lookup that says "hit" and the load nothing pins a chunk, and a lookup of the next
key may promote into its row. The shield takes awaited chunks out of the policy's sight for the
rest of the scheduling step, once and not once per promotion: a policy that has to step over
them again and again would make long prefixes quadratic. Stores come after the step's lookups
and may evict what is only awaited; the request then finds a miss.
"""

from collections.abc import Iterable

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

Victims = list[tuple[OffloadKey, ChunkStatus]]


class Shield:
    """Around one policy, in the scheduler's thread."""

    def __init__(self, policy: CachePolicy) -> None:
        self._policy = policy
        self._hidden: set[OffloadKey] = set()
        self.up = False
        self._evict = policy.evict
        policy.evict = self._evict_others

    def _evict_others(self, n: int, protected: set[OffloadKey]) -> Victims | None:
        # LRU has no sight of what is hidden; ARC looks at every chunk and asks.
        victims: Victims | None = self._evict(
            n, protected | self._hidden if self._hidden else protected
        )
        return victims

    def lift(self, awaited: Iterable[bytes]) -> None:
        """Hide these chunks until `lower`; a shield that is up already stays as it is."""
        if self.up:
            return
        self.up = True
        for key in awaited:
            self.cover(OffloadKey(key))

    def cover(self, key: OffloadKey) -> None:
        """Hide one more chunk, if the shield is up."""
        if not self.up or key in self._hidden:
            return
        chunk = self._policy.get(key)
        if chunk is not None and chunk.ref_cnt == 0:
            self._policy.mark_non_evictable(key)
            self._hidden.add(key)

    def uncover(self, keys: Iterable[OffloadKey]) -> None:
        """Show these chunks again: they are about to be pinned."""
        if not self._hidden:
            return
        for key in keys:
            if key in self._hidden:
                self._hidden.discard(key)
                self._show(key)

    def lower(self) -> None:
        """Show everything again."""
        self.up = False
        hidden, self._hidden = self._hidden, set()
        for key in hidden:
            self._show(key)

    def drop(self, key: OffloadKey) -> None:
        """This chunk has left the policy."""
        self._hidden.discard(key)

    def clear(self) -> None:
        """All chunks have left the policy."""
        self.up = False
        self._hidden.clear()

    def _show(self, key: OffloadKey) -> None:
        chunk = self._policy.get(key)
        if chunk is not None and chunk.ref_cnt == 0:
            self._policy.mark_evictable(key)

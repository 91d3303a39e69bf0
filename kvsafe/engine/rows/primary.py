# SPDX-License-Identifier: Apache-2.0
"""The primary tier: vLLM's LRU or ARC over host rows, with generations and a way to discard.

vLLM's class decides what is kept and what is evicted. This one adds what proof needs: every
allocation of a row begins a new generation, transfers name their keys, and a chunk that
failed its proof leaves at once or, while something still reads it, is no longer offered.
"""

import time
from collections.abc import Collection, Iterable
from typing import Protocol

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
)
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

from kvsafe.engine.rows.shield import Shield
from kvsafe.engine.rows.transfer import SealedRowsSpec
from kvsafe.host import HostRegion
from kvsafe.seal.layout import FIXED


class EpochSource(Protocol):
    """Where the present epoch is read."""

    @property
    def epoch(self) -> int:
        """The present epoch."""
        ...


class RegionDoor:
    """The two calls that vLLM's primary tier makes on its memory, over a `HostRegion`."""

    def __init__(self, region: HostRegion) -> None:
        self._region = region

    def create_kv_memoryview(self) -> memoryview:
        """All rows, uint8, shape (rows, bytes per row)."""
        return memoryview(self._region.rows)

    def cleanup(self) -> None:
        """Let go of the region."""
        self._region.close()


class SealedPrimaryTier(CPUPrimaryTierOffloadingManager):
    """vLLM's CPU manager whose rows carry generations and whose chunks can be refused."""

    def __init__(
        self,
        region: HostRegion,
        epochs: EpochSource,
        *,
        cache_policy: str,
        cache_policy_module_path: str | None,
        enable_events: bool,
    ) -> None:
        super().__init__(
            num_chunks=region.shape.num_rows,
            mmap_region=RegionDoor(region),
            cache_policy=cache_policy,
            cache_policy_module_path=cache_policy_module_path,
            enable_events=enable_events,
        )
        self.shield = Shield(self._policy)
        self._region = region
        self._ledger = region.ledger
        self._epochs = epochs
        self._withdrawn: set[OffloadKey] = set()
        self._pending_since: dict[OffloadKey, float] = {}
        self._held_back: set[int] = set()
        self._overdue: set[OffloadKey] = set()
        self._row_epochs = [0] * region.shape.num_rows
        self._row_keys: list[OffloadKey | None] = [None] * region.shape.num_rows

    @property
    def num_rows(self) -> int:
        """How many chunks there is room for."""
        return int(self._num_chunks)

    def row_of(self, key: OffloadKey) -> int | None:
        """The row that holds `key`, ready or not."""
        chunk = self._policy.get(key)
        return None if chunk is None else int(chunk.chunk_id)

    def generation_of(self, key: OffloadKey) -> int | None:
        """The generation of the row that holds `key`."""
        row = self.row_of(key)
        return None if row is None else self._ledger.generation(row)

    def covers(self, key: OffloadKey, slots: Iterable[int]) -> bool:
        """Whether the row of `key` says that these blocks of it were written.

        For planning alone: the worker judges the whole row, this looks at a few of its bytes.
        """
        row = self.row_of(key)
        if row is None:
            return False
        bits, at = self._region.row(row), FIXED.size + len(key)
        return all(bits[at + (slot >> 3)] >> (slot & 7) & 1 for slot in slots)

    def pending_for(self, key: OffloadKey) -> float:
        """Seconds for which the write of `key` has been in flight (0 if it is not)."""
        since = self._pending_since.get(key)
        return 0.0 if since is None else time.monotonic() - since

    def note_overdue(self, key: OffloadKey) -> bool:
        """Note that the pending write of `key` is over its deadline; True the first time."""
        if key in self._overdue or key not in self._pending_since:
            return False
        self._overdue.add(key)
        return True

    def ready(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Those of the keys that are ready, of the present epoch and not withdrawn."""
        get, withdrawn = self._policy.get, self._withdrawn
        return [
            key
            for key in keys
            if (chunk := get(key)) is not None
            and chunk.ref_cnt >= 0
            and key not in withdrawn
            and not self._revoked(chunk)
        ]

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """vLLM's answer, except that what was withdrawn or revoked is a miss.

        Another process can raise the epoch at any time; what was allocated before then would
        be refused by the worker, which fails a load that could have been an ordinary miss.
        """
        chunk = self._policy.get(key)
        if chunk is None or key in self._withdrawn:
            return LookupResult.MISS
        if chunk.ref_cnt >= 0 and self._revoked(chunk):
            self.withdraw([key])
            return LookupResult.MISS
        return super().lookup(key, req_context)

    def _revoked(self, chunk: ChunkStatus) -> bool:
        sealed_in: int = self._row_epochs[chunk.chunk_id]
        return sealed_in != self._epochs.epoch

    def _prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext, *, record_access: bool
    ) -> LoadStoreSpec:
        self.shield.uncover(keys)
        return super()._prepare_load(keys, req_context, record_access=record_access)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin; a withdrawn chunk leaves with its last pin."""
        super().complete_load(keys, req_context)
        self._unpinned(keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """End writes; they are no longer pending either way."""
        super().complete_store(keys, req_context, success)
        for key in keys:
            self._pending_since.pop(key, None)
            self._overdue.discard(key)

    def withdraw(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Stop offering these chunks: remove what is idle, hide what is pinned or pending.

        Returns the keys that were removed now.
        """
        removed = []
        for key in keys:
            chunk = self._policy.get(key)
            if chunk is None:
                self._withdrawn.discard(key)
            elif chunk.ref_cnt == 0:
                self._remove_idle(key, chunk)
                removed.append(key)
            elif chunk.ref_cnt > 0:
                self._withdrawn.add(key)
        if removed and self.events is not None:
            self.events.append(OffloadingEvent(keys=removed, medium=self.medium, removed=True))
        return removed

    def hides(self, key: OffloadKey) -> bool:
        """Whether the chunk of `key` was withdrawn and is here only for those who still read it."""
        return key in self._withdrawn

    def _unpinned(self, keys: Collection[OffloadKey]) -> None:
        if self._withdrawn:
            self.withdraw([key for key in keys if key in self._withdrawn])

    @property
    def stopped(self) -> bool:
        """Whether nothing may be offered or stored any more (a monitor's word)."""
        return False

    def note_proven(self, keys: Iterable[OffloadKey]) -> None:
        """These chunks were sealed, or opened after a promotion; of interest to a monitor."""

    def end_step(self) -> None:
        """A scheduler step is over; of interest to a monitor."""

    def hold_back(self, rows: Iterable[int]) -> None:
        """Give these rows to nobody until they are returned: something may still write there."""
        self._held_back.update(rows)

    def give_back(self, rows: Iterable[int]) -> None:
        """Rows that nothing writes into any more may be used again."""
        for row in rows:
            if row in self._held_back:
                self._held_back.discard(row)
                self._free_list.append(row)

    def _free_chunk(self, chunk: ChunkStatus) -> None:
        if chunk.chunk_id not in self._held_back:
            super()._free_chunk(chunk)

    def reset_cache(self) -> None:
        """Forget every chunk; rows get new generations when they are allocated again."""
        super().reset_cache()
        self.shield.clear()
        self._drop_events()
        if self._held_back:
            # vLLM begins again at row 0; with rows held back, the free list says what there is.
            self._num_allocated_chunks = self._num_chunks
            rows = range(self._num_chunks - 1, -1, -1)
            self._free_list.extend(row for row in rows if row not in self._held_back)
        self._withdrawn.clear()
        self._pending_since.clear()
        self._overdue.clear()

    def _drop_events(self) -> None:
        """What nobody has heard of yet would be announced although it is gone."""
        if self.events is not None:
            self.events.clear()

    def written(self) -> list[OffloadKey]:
        """Every chunk that was written and is still here."""
        held = enumerate(self._row_keys)
        return [key for row, key in held if key is not None and self._is_written(key, row)]

    def _is_written(self, key: OffloadKey, row: int) -> bool:
        chunk = self._policy.get(key)
        return chunk is not None and chunk.chunk_id == row and chunk.ref_cnt >= 0

    def _remove_idle(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._policy.remove(key)
        self.shield.drop(key)
        self._num_evictable_cache_chunks -= 1
        self._free_chunk(chunk)
        self._withdrawn.discard(key)

    def _allocate_chunks(self, keys: list[OffloadKey]) -> list[ChunkStatus]:
        chunks: list[ChunkStatus] = super()._allocate_chunks(keys)
        now, epoch = time.monotonic(), self._epochs.epoch
        for key, chunk in zip(keys, chunks, strict=True):
            self._ledger.allocate(chunk.chunk_id)
            self._row_epochs[chunk.chunk_id] = epoch
            self._row_keys[chunk.chunk_id] = key
            self._pending_since[key] = now
        return chunks

    def _get_load_store_spec(
        self, keys: Iterable[OffloadKey], chunks: Iterable[ChunkStatus]
    ) -> SealedRowsSpec:
        rows = [int(chunk.chunk_id) for chunk in chunks]
        generation = self._ledger.generation
        return SealedRowsSpec(
            rows, list(keys), [generation(row) for row in rows], self._epochs.epoch
        )

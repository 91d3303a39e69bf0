# SPDX-License-Identifier: Apache-2.0
"""What must hold at the end, when everything has come to rest, and of every row meanwhile."""

from typing import Any

import numpy as np

from fuzz.world.content import Numbers
from fuzz.world.outcome import WrongWorld
from fuzz.world.parts import Parts
from kvsafe.seal.header import Header


def _demand(holds: bool, detail: str) -> None:
    if not holds:
        raise WrongWorld("unbalanced", detail)


def primary_of(manager: Any) -> Any:
    """The CPU manager, whichever of vLLM's two managers stands around it."""
    return getattr(manager, "primary_tier", manager)


def chunks_of(manager: Any) -> dict[bytes, Any]:
    """Every chunk that the policy holds, ready or not."""
    policy = primary_of(manager)._policy
    held = getattr(policy, "chunks", None)
    return dict(held) if held is not None else {**policy.t1, **policy.t2}


def recount(manager: Any) -> None:
    """vLLM's counters are what a recount finds, and every row is somewhere exactly once."""
    primary = primary_of(manager)
    chunks = chunks_of(manager)
    counts = [chunk.ref_cnt for chunk in chunks.values()]
    _demand(min(counts, default=0) >= -1, "a refcount below its floor")
    evictable = sum(count == 0 for count in counts)
    _demand(primary._num_evictable_cache_chunks == evictable, "evictable chunks miscounted")
    pending = sum(count == -1 for count in counts)
    _demand(primary._num_write_pending_chunks == pending, "pending writes miscounted")
    rows = [int(chunk.chunk_id) for chunk in chunks.values()]
    fresh = range(primary._num_allocated_chunks, primary._num_chunks)
    held = [row for row in getattr(primary, "_held_back", ()) if row not in rows]
    places = sorted([*rows, *primary._free_list, *fresh, *held])
    _demand(places == list(range(primary._num_chunks)), f"rows lost or doubled: {places}")


def at_rest(scheduler: Any, half: Any, parts: Parts) -> None:
    """Nothing is left of any request, and nothing is pinned."""
    for name in ("requests", "waiting", "kv_holding_waiting", "running", "deferred_waiting"):
        _demand(not len(getattr(scheduler, name)), f"scheduler.{name} is not empty")
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.free_block_queue.num_free_blocks
    _demand(free == pool.num_gpu_blocks - 1, f"{pool.num_gpu_blocks - 1 - free} blocks not free")
    for name in ("_jobs", "_req_status", "_block_id_to_pending_jobs", "_chunks_being_loaded"):
        _demand(not getattr(half, name), f"scheduler half: {name} is not empty")
    manager = half.manager
    recount(manager)
    pins = [chunk.ref_cnt for chunk in chunks_of(manager).values() if chunk.ref_cnt]
    _demand(not pins, f"pins left: {pins}")
    for name in ("_req_state", "_jobs", "_pending_load_submissions", "_request_load_sources"):
        _demand(not getattr(manager, name, None), f"manager: {name} is not empty")
    for tier in parts.tiers:
        _demand(not tier.open_requests, "a tier was not told the end of a request")
    if parts.spec is not None:
        _ours_at_rest(manager)


def _ours_at_rest(manager: Any) -> None:
    _demand(not manager._issued, "manager: _issued is not empty")
    for name in ("lost", "_since", "_told"):
        _demand(not getattr(manager._loads, name), f"open loads: {name} is not empty")
    primary = manager.primary_tier
    for name in ("_withdrawn", "_pending_since", "_overdue", "_held_back"):
        _demand(not getattr(primary, name), f"primary tier: {name} is not empty")
    _demand(not manager.waits.awaited, "something is awaited")
    _demand(not manager.waits._waits, "a request that ended still waits")
    _demand(not manager.waits.failed, "a load that failed is remembered for ever")
    for name in ("_waiting", "_waits_of", "_condemned"):
        _demand(not getattr(manager._verdicts, name), f"verdicts: {name} is not empty")


class RowAudit:
    """Our rows hold what their keys say, from the moment at which they are ready (kvsafe)."""

    def __init__(self, parts: Parts, manager: Any) -> None:
        self._parts = parts
        self._manager = manager
        self._seen: set[tuple[int, int]] = set()

    def look(self) -> None:
        """Judge rows that became ready since the last look."""
        primary = self._manager.primary_tier
        station = self._parts.spec.spec.station
        region = station.region
        for key in primary.ready(list(chunks_of(self._manager))):
            row, generation = primary.row_of(key), primary.generation_of(key)
            if (row, generation) in self._seen:
                continue
            self._seen.add((row, generation))
            demanded = self._parts.keys.numbers(key, self._parts.model.weights)
            view = region.row(row)
            header = station.open_row(view, key, self._manager._epochs.epoch)
            if demanded is None or not isinstance(header, Header):
                continue
            self._parts.counts["row_audited"] += 1
            body = view[station.seal_setting.layout.header_bytes :]
            self._compare(key, header, body, demanded)

    def _compare(self, key: bytes, header: Header, body: memoryview, demanded: Numbers) -> None:
        per_chunk = self._parts.setting.blocks_per_chunk
        held = np.frombuffer(body[: demanded.nbytes], dtype=np.int64).reshape(per_chunk, -1)
        wanted = demanded.reshape(per_chunk, -1)
        for slot in range(per_chunk):
            if not header.covers(slot):
                continue
            if not np.array_equal(held[slot], wanted[slot]):
                group = int.from_bytes(key[-4:], "big")
                raise WrongWorld(
                    "wrong-row", f"group {group}: slot {slot} of a ready row is not its key's KV"
                )

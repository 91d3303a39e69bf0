# SPDX-License-Identifier: Apache-2.0
"""Placement: every block goes to the slot that its position says, or nowhere.

The oracle is slow and plain: it walks over single positions of a request and knows nothing of
flat lists.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, ReqContext, make_offload_key

from kvsafe.engine.manager import IssuedStore
from kvsafe.engine.requests.source import SourceCheck, compare_source
from kvsafe.engine.rows.placement import (
    FlatBlocks,
    chunk_blocks,
    disagreement,
    place_run,
    place_single_blocks,
)
from kvsafe.engine.rows.placer import Placer
from kvsafe.engine.rows.transfer import SealedRowsSpec
from kvsafe.engine.scheduler import KVSafeConnectorScheduler
from kvsafe.seal.header import bitmap
from kvsafe.seal.refusal import Refusal, RefusalKind

Placed = list[tuple[int, tuple[tuple[int, int], ...]]]

# A run per group: index of its first block, number of blocks.
runs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=4)


def flat_of(groups: list[tuple[int, int]]) -> FlatBlocks:
    """Blocks whose id says group and position: 1000 * (group + 1) + index in the request."""
    ids = [
        1000 * (group + 1) + index + offset
        for group, (index, size) in enumerate(groups)
        for offset in range(size)
    ]
    return FlatBlocks(ids, [size for _, size in groups], [index for index, _ in groups])


def oracle(groups: list[tuple[int, int]], per_chunk: int) -> Placed:
    """Chunk by chunk: which positions of the run are its own."""
    placed: Placed = []
    for group, (index, size) in enumerate(groups):
        for chunk in range(100 // per_chunk):
            own = tuple(
                (slot, 1000 * (group + 1) + chunk * per_chunk + slot)
                for slot in range(per_chunk)
                if index <= chunk * per_chunk + slot < index + size
            )
            if own:
                placed.append((group, own))
    return placed


@settings(max_examples=300, deadline=None)
@given(runs, st.integers(1, 4))
def test_a_run_is_placed_by_position(groups: list[tuple[int, int]], per_chunk: int) -> None:
    assert place_run(flat_of(groups), per_chunk) == oracle(groups, per_chunk)


@settings(max_examples=100, deadline=None)
@given(runs, st.integers(1, 4))
def test_single_blocks_get_a_row_each(groups: list[tuple[int, int]], per_chunk: int) -> None:
    placed = place_single_blocks(flat_of(groups), per_chunk)
    assert [block for _, ((_, block),) in placed] == list(flat_of(groups).block_ids)
    for group, ((slot, block),) in placed:
        assert block // 1000 == group + 1
        assert slot == block % 1000 % per_chunk


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=24), st.integers(2, 4))
def test_holes_stay_holes(marks: list[int], per_chunk: int) -> None:
    ids = [0 if mark == 0 else 100 + index for index, mark in enumerate(marks)]
    for chunk in range(len(ids) // per_chunk + 2):
        expected = tuple(
            (slot, 100 + chunk * per_chunk + slot)
            for slot in range(per_chunk)
            if chunk * per_chunk + slot < len(ids) and ids[chunk * per_chunk + slot]
        )
        assert chunk_blocks(ids, chunk, per_chunk) == expected


def test_sizes_that_do_not_fit_are_our_mistake() -> None:
    with pytest.raises(ValueError, match="zip"):
        place_run(FlatBlocks([1, 2], [1, 1], [0]), 2)


# --- the scheduler half around it ----------------------------------------------------------------


ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


class Pool:
    """Which block hash vLLM's pool knows of each block."""

    def __init__(self, hashes: dict[int, bytes]) -> None:
        self.cached_block_hashes_by_block: dict[int, list[bytes]] = {}
        self.blocks = {
            block: SimpleNamespace(block_hash=known + bytes(4)) for block, known in hashes.items()
        }


class Sched:
    """Our scheduler half with one request; `windows` holds the device blocks of each group."""

    def __init__(self, windows: list[list[int]], per_chunk: int) -> None:
        self.issued: dict[bytes, IssuedStore | Refusal] = {}
        self.per_chunk = per_chunk
        self.context = ReqContext(req_id="r")
        self.half: Any = KVSafeConnectorScheduler.__new__(KVSafeConnectorScheduler)
        groups = [
            SimpleNamespace(
                group_idx=index,
                tokens_per_block=16,
                tokens_per_chunk=16 * per_chunk,
                kv_cache_spec=ATTENTION,
            )
            for index in range(len(windows))
        ]
        self.half.config = SimpleNamespace(
            blocks_per_chunk=per_chunk, kv_group_configs=groups, tokens_per_hash=16
        )
        manager: Any = SimpleNamespace(issue_store=self.issued.__setitem__)
        no_adapters: Any = None
        self.half._adapters = no_adapters
        self.half.manager = manager
        self.half.block_pool = None
        self.hashes = [index.to_bytes(32, "big") for index in range(200)]
        states = [self._state(group, ids) for group, ids in enumerate(windows)]
        request = SimpleNamespace(block_hashes=self.hashes)
        status = SimpleNamespace(group_states=states, req_context=self.context, req=request)
        self.half._req_status = {"r": status}
        placer = self.half._placer = Placer(self.half.config, self.half._req_status)
        self.half._source = SourceCheck(self.half.config, self.half._req_status, placer, ())

    def _state(self, group: int, ids: list[int]) -> Any:
        keys = []
        for chunk in range(len(ids) // self.per_chunk):
            key = self.key(group, chunk)
            self.context.set_offload_key_position(key, (chunk + 1) * 16 * self.per_chunk)
            keys.append(key)
        return SimpleNamespace(block_ids=ids, offload_keys=keys)

    def key(self, group: int, chunk: int) -> OffloadKey:
        """The key of one chunk of the request."""
        return make_offload_key(self.hashes[(chunk + 1) * self.per_chunk - 1], group)

    def place_store(self, keys: list[OffloadKey], flat: FlatBlocks) -> SealedRowsSpec:
        """Place one store job that vLLM has described by `flat`."""
        rows = SealedRowsSpec(list(range(len(keys))), keys, [5] * len(keys), 3)
        source = GPULoadStoreSpec(list(flat.block_ids), flat.group_sizes, flat.block_indices)
        job = TransferJob("r", source, rows)
        self.half._placer.place_store(job)
        self.half._announce_store(job)
        return rows

    def place_load(self, keys: list[OffloadKey], flat: FlatBlocks) -> SealedRowsSpec:
        """Place one load job that vLLM has described by `flat`."""
        rows = SealedRowsSpec(list(range(len(keys))), keys, [5] * len(keys), 3)
        target = GPULoadStoreSpec(list(flat.block_ids), flat.group_sizes, flat.block_indices)
        self.half._placer.place_load(TransferJob("r", rows, target))
        return rows


def vllm_form(windows: list[list[int]], chosen: list[list[int]], per_chunk: int) -> FlatBlocks:
    """What vLLM makes of a store of these chunks: holes dropped, one first index per group."""
    ids: list[int] = []
    sizes, firsts = [], []
    for window, chunks in zip(windows, chosen, strict=True):
        found = [
            (chunk * per_chunk + slot, window[chunk * per_chunk + slot])
            for chunk in chunks
            for slot in range(per_chunk)
            if window[chunk * per_chunk + slot]
        ]
        ids += [block for _, block in found]
        sizes.append(len(found))
        firsts.append(found[0][0] if found else 0)
    return FlatBlocks(ids, sizes, firsts)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.data())
def test_a_store_with_holes_is_placed_exactly(
    per_chunk: int, groups: int, data: st.DataObject
) -> None:
    windows: list[list[int]] = []
    chosen: list[list[int]] = []
    for group in range(groups):
        chunks = data.draw(st.integers(1, 5))
        gone = data.draw(st.integers(0, chunks * per_chunk - 1))
        ids = [1000 * (group + 1) + index for index in range(chunks * per_chunk)]
        windows.append([0] * gone + ids[gone:])
        chosen.append(sorted(data.draw(st.sets(st.integers(0, chunks - 1)))))
    sched = Sched(windows, per_chunk)
    keys = [sched.key(group, chunk) for group in range(groups) for chunk in chosen[group]]
    rows = sched.place_store(keys, vllm_form(windows, chosen, per_chunk))
    assert rows.withheld is None
    expected = [
        tuple(
            (slot, windows[group][chunk * per_chunk + slot])
            for slot in range(per_chunk)
            if windows[group][chunk * per_chunk + slot]
        )
        for group in range(groups)
        for chunk in chosen[group]
    ]
    assert rows.blocks == expected
    for key, blocks in zip(keys, expected, strict=True):
        issued = sched.issued[key]
        assert isinstance(issued, IssuedStore)
        assert issued == IssuedStore(5, 3, bitmap(per_chunk, [slot for slot, _ in blocks]))


def test_a_store_that_is_described_in_two_ways_is_withheld() -> None:
    windows = [[101, 102, 103, 104, 105, 106]]
    sched = Sched(windows, 2)
    keys = [sched.key(0, 0), sched.key(0, 1)]
    right = vllm_form(windows, [[0, 1]], 2)
    assert sched.place_store(keys, right).withheld is None
    wrong = right._replace(block_ids=[101, 102, 103, 199])
    rows = sched.place_store(keys, wrong)
    assert rows.withheld is not None and rows.withheld.kind is RefusalKind.COPY_PLAN
    assert all(sched.issued[key] == rows.withheld for key in keys)


@pytest.mark.parametrize(
    ("per_chunk", "ids"), [(2, [101, 103]), (1, [101, 199]), (2, [102, 101, 103, 104])]
)
def test_a_flat_list_that_only_has_the_right_length_is_withheld(
    per_chunk: int, ids: list[int]
) -> None:
    windows = [[101, 102, 103, 104]]
    sched = Sched(windows, per_chunk)
    keys = [sched.key(0, 0), sched.key(0, 1)]
    assert sched.place_store(keys, vllm_form(windows, [[0, 1]], per_chunk)).withheld is None
    rows = sched.place_store(keys, FlatBlocks(ids, [len(ids)], [0]))
    assert rows.withheld is not None and rows.withheld.kind is RefusalKind.COPY_PLAN
    assert all(sched.issued[key] == rows.withheld for key in keys)


def test_state_at_a_boundary_is_placed_by_its_index() -> None:
    sched = Sched([[101, 102, 103, 104]], 2)
    boundary = make_offload_key(b"b" * 32, 0)
    rows = sched.place_store([boundary], FlatBlocks([103], [1], [3]))
    assert rows.withheld is None and rows.blocks == [((1, 103),)]


def test_a_load_of_the_right_groups_at_another_place_is_withheld() -> None:
    sched = Sched([[101, 102, 103, 104]], 2)
    keys = [sched.key(0, 0), sched.key(0, 1)]
    flat = FlatBlocks([101, 102, 103, 104], [4], [0])
    assert sched.place_load(keys, flat).withheld is None
    rows = sched.place_load(keys[::-1], flat)
    assert rows.withheld is not None and rows.withheld.kind is RefusalKind.COPY_PLAN
    assert rows.blamed == keys[::-1]


def test_a_load_of_the_wrong_groups_is_withheld() -> None:
    windows = [[101, 102, 103, 104], [201, 202, 203, 204]]
    sched = Sched(windows, 2)
    keys = [sched.key(0, 0), sched.key(1, 1)]
    flat = FlatBlocks([101, 102, 203, 204], [2, 2], [0, 2])
    rows = sched.place_load(keys, flat)
    assert rows.withheld is None and rows.blamed == []
    assert rows.blocks == [((0, 101), (1, 102)), ((0, 203), (1, 204))]
    for ids, sizes in (([101, 102, 103, 104], [4, 0]), ([101, 102], [2, 0]), ([], [0, 0])):
        rows = sched.place_load(keys, FlatBlocks(ids, sizes, [0, 0]))
        assert rows.withheld is not None and rows.withheld.kind is RefusalKind.COPY_PLAN
        assert rows.blamed == keys


def test_a_load_that_begins_inside_a_chunk_keeps_its_slots() -> None:
    sched = Sched([[101, 102, 103, 104, 105, 106]], 2)
    keys = [sched.key(0, 0), sched.key(0, 1)]
    rows = sched.place_load(keys, FlatBlocks([102, 103], [2], [1]))
    assert rows.withheld is None
    assert rows.blocks == [((1, 102),), ((0, 103),)]


def test_a_block_of_other_content_is_not_stored() -> None:
    windows = [[101, 102, 103, 104]]
    sched = Sched(windows, 2)
    keys = [sched.key(0, 0), sched.key(0, 1)]
    flat = vllm_form(windows, [[0, 1]], 2)
    known = {101 + index: sched.hashes[index] for index in range(4)}
    sched.half.block_pool = Pool(known)
    assert sched.place_store(keys, flat).keys == keys
    sched.half.block_pool = Pool({**known, 103: b"\xff" * 32})
    rows = sched.place_store(keys, flat)
    assert rows.keys == [keys[0]] and rows.blocks == [((0, 101), (1, 102))]
    refused = sched.issued[keys[1]]
    assert isinstance(refused, Refusal) and refused.kind is RefusalKind.SOURCE_HASH
    assert isinstance(sched.issued[keys[0]], IssuedStore)


def test_a_block_of_unknown_content_is_taken_and_a_second_name_counts() -> None:
    pool: Any = Pool({1: b"a" * 32})
    pool.blocks[2] = SimpleNamespace(block_hash=None)
    assert compare_source(pool, 1, [b"a" * 32], 0) is None
    assert compare_source(pool, 2, [b"a" * 32], 0) is None
    assert compare_source(pool, 1, [b"b" * 32], 0) is not None
    assert compare_source(pool, 1, [b"b" * 32], 1) is None
    pool.cached_block_hashes_by_block[1] = [b"b" * 32 + bytes(4)]
    assert compare_source(pool, 1, [b"b" * 32], 0) is None


def test_a_disagreement_says_both_sides() -> None:
    refusal = disagreement("groups", [0, 1], [1, 0])
    assert refusal.kind is RefusalKind.COPY_PLAN
    assert (refusal.field, refusal.expected, refusal.found) == ("groups", "[0, 1]", "[1, 0]")

# SPDX-License-Identifier: Apache-2.0
"""Waits, the shield, claims, retired rows and windows: what stands before findings A2, B, Q-T."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from kvsafe.engine.requests import waits as waits_module
from kvsafe.engine.requests.waits import CLAIM_STEPS, Claims, Waits
from kvsafe.engine.requests.windows import give_up_stored_blocks, wanted_slots, windowed_groups
from kvsafe.engine.rows.retired import TransferRows
from kvsafe.engine.rows.shield import Shield
from tests.engine_unit.sealed_world import World, key_of, running

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


@pytest.fixture(params=["lru", "arc"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with running(World(tmp_path, rows=4, policy=request.param, tiers=["hand"])) as made:
        yield made


def in_tier(world: World, *keys: OffloadKey) -> None:
    """These chunks are in the tier and in no row."""
    for key in keys:
        world.manager.on_request_finished(world.store(key))
        world.hand.complete_store()
    world.forget_rows()


def in_rows(world: World, *keys: OffloadKey) -> None:
    """These chunks are in rows, unpinned, and were used last in this order."""
    for key in keys:
        context = world.store(key)
        world.hand.complete_store(success=False)
        world.step()
        world.manager.on_request_finished(context)


def three_of_four(world: World) -> tuple[list[OffloadKey], OffloadKey]:
    """Three chunks that a request will ask for first, one that is nobody's, one in the tier."""
    full, last = [key_of(number) for number in range(3)], key_of(9, 1)
    in_tier(world, last)
    in_rows(world, *full, key_of(50))
    return full, last


def test_what_was_called_a_hit_is_no_victim_of_a_promotion(world: World) -> None:
    full, last = three_of_four(world)
    context = world.request()
    world.manager.waits.begin(context.req_id)
    assert [world.lookup(key, context) for key in full] == [HIT] * 3
    assert world.lookup(last, context) is PENDING
    assert world.lookup(key_of(51), context) is MISS
    assert world.primary.ready(full) == full
    spec: Any = world.manager.prepare_load(full, context)
    assert spec.withheld is None
    world.recount()


def test_without_the_shield_the_first_hit_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shield, "lift", lambda self, awaited: None)
    full, last = three_of_four(world)
    context = world.request()
    world.manager.waits.begin(context.req_id)
    assert [world.lookup(key, context) for key in full] == [HIT] * 3
    assert world.lookup(last, context) is PENDING
    assert world.primary.ready(full) == full[1:]


def test_a_promotion_without_a_row_that_nobody_awaits_is_a_miss(world: World) -> None:
    full, last = three_of_four(world)
    other = world.request()
    world.manager.waits.begin(other.req_id)
    assert world.lookup(key_of(50), other) is HIT
    context = world.request()
    world.manager.waits.begin(context.req_id)
    assert [world.lookup(key, context) for key in full] == [HIT] * 3
    assert world.lookup(last, context) is MISS
    world.manager.waits.forget(other.req_id)
    world.step()
    assert world.lookup(last, context) is PENDING


def test_a_store_may_take_what_is_only_awaited(world: World) -> None:
    full, _ = three_of_four(world)
    context = world.request()
    world.manager.waits.begin(context.req_id)
    assert [world.lookup(key, context) for key in full] == [HIT] * 3
    world.step()
    assert world.prepare([key_of(60), key_of(61)], world.request()) is not None
    world.recount()


def test_a_chunk_is_promoted_once_for_a_request(world: World) -> None:
    in_tier(world, key_of(1))
    context = world.request()
    world.manager.waits.begin(context.req_id)
    assert world.lookup(key_of(1), context) is PENDING
    world.step()
    world.hand.complete_load(0)
    world.step()
    assert world.lookup(key_of(1), context) is MISS
    world.manager.waits.forget(context.req_id)
    world.manager.waits.begin(context.req_id)
    assert world.lookup(key_of(1), context) is PENDING


def test_a_store_that_found_no_room_has_the_next_one(world: World) -> None:
    in_tier(world, key_of(1))
    writer = world.request()
    assert world.prepare([key_of(number) for number in range(20, 24)], writer) is not None
    assert world.prepare([key_of(30)], world.request("late")) is None
    world.manager.complete_store([key_of(20)], writer, success=False)
    context = world.request()
    world.manager.waits.begin(context.req_id)
    assert world.lookup(key_of(1), context) is MISS
    for _ in range(CLAIM_STEPS):
        world.step()
    assert world.lookup(key_of(1), context) is PENDING


def test_awaited_keys_are_counted_and_let_go() -> None:
    waits = Waits(10.0)
    waits.tell("nobody", b"a")
    for request in ("r", "s"):
        waits.begin(request)
        waits.tell(request, b"a")
    waits.tell("r", b"b")
    assert waits.awaited == {b"a": 2, b"b": 1}
    waits.begin("r")
    waits.tell("r", b"b")
    waits.end("r")
    assert waits.awaited == {b"a": 1, b"b": 1}
    assert waits.told("r") == {b"b"} and waits.told("s") == {b"a"}
    assert waits.told("nobody") == set()
    waits.loads("r")
    waits.forget("s")
    assert not waits.awaited


def test_a_request_tires_of_asking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(waits_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    waits = Waits(10.0)
    assert not waits.tires("r")
    waits.begin("r")
    assert not waits.tires("r")
    clock.now += 10.0
    assert not waits.tires("r")
    clock.now += 0.5
    assert waits.tires("r")
    waits.forget("r")
    waits.begin("r")
    assert not waits.tires("r")


def test_after_a_load_patience_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(waits_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    waits = Waits(10.0)
    waits.begin("r")
    assert not waits.tires("r")
    clock.now += 9.0
    waits.loads("r")
    clock.now += 9.0
    waits.begin("r")
    assert not waits.tires("r")
    clock.now += 10.5
    assert waits.tires("r")


def test_a_claim_runs_out_and_is_not_renewed() -> None:
    claims = Claims()
    claims.make("r")
    for _ in range(CLAIM_STEPS):
        assert claims
        claims.end_step()
        claims.make("r")
    assert not claims
    claims.drop("r")
    claims.make("r")
    assert claims


class Keeper:
    """Rows that are held back."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def hold_back(self, rows: Any) -> None:
        """Take rows out of use."""
        self.held.update(rows)

    def give_back(self, rows: Any) -> None:
        """Put rows into use again."""
        self.held.difference_update(rows)


def test_retired_rows_return_with_the_last_worker() -> None:
    rows, keeper = TransferRows(2), Keeper()
    rows.begin(1, [3, 4])
    rows.begin(2, [5])
    rows.begin(3, [6])
    rows.report({1: 1, 2: 2}, keeper)
    assert (keeper.held, rows.owed) == (set(), False)
    rows.retire(keeper)
    assert (keeper.held, rows.owed) == ({3, 4, 6}, True)
    rows.report({1: 1, 9: 1}, keeper)
    assert keeper.held == {6}
    rows.report({3: 1}, keeper)
    assert keeper.held == {6}
    rows.report({3: 1}, keeper)
    assert (keeper.held, rows.owed) == (set(), False)


def group(window: int) -> Any:
    """A group of blocks of four tokens, three to a chunk."""
    shape: Any = {"block_size": 4, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    spec = (
        SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
    )
    size = 2 if window else None
    return SimpleNamespace(
        tokens_per_block=4, kv_cache_spec=spec, sliding_window_size_in_chunks=size
    )


@pytest.mark.parametrize("window", [0, 1, 4, 5, 8, 9, 13])
@pytest.mark.parametrize("local", [0, 4, 8, 20])
@pytest.mark.parametrize("total", [24, 27, 36])
def test_wanted_slots_are_the_blocks_that_the_window_keeps(
    window: int, local: int, total: int
) -> None:
    first = total - window + 1 if window else 0
    expected = {
        block for block in range(-(-total // 4)) if block * 4 + 3 >= first and block * 4 >= local
    }
    found = {
        chunk * 3 + slot
        for chunk, slots in wanted_slots(group(window), 3, local, total)
        for slot in slots
    }
    assert found == expected


def test_offered_blocks_of_a_window_are_given_up() -> None:
    config = SimpleNamespace(blocks_per_chunk=2, kv_group_configs=(group(0), group(8)))
    assert windowed_groups(config) == (1,)
    states = [SimpleNamespace(block_ids=[1, 2, 3, 4, 5], next_stored_chunk_idx=2) for _ in range(2)]
    status: Any = SimpleNamespace(config=config, group_states=states)
    give_up_stored_blocks(status, (1,))
    assert states[0].block_ids == [1, 2, 3, 4, 5]
    assert states[1].block_ids == [0, 0, 0, 0, 5]

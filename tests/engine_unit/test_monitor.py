# SPDX-License-Identifier: Apache-2.0
"""The monitor beside the real classes: silent over a sound tier, and it names each fault."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

from kvsafe.engine.counters import DIVERGENCES, MONITOR_STOPPED
from kvsafe.engine.manager import KVSafeManager
from kvsafe.engine.rows.primary import SealedPrimaryTier
from kvsafe.engine.rows.watched import WatchedPrimaryTier
from kvsafe.lifecycle.monitor import Monitor
from tests.engine_unit.sealed_world import World, key_of, running

A, B, C, D = (key_of(number) for number in range(4))
HIT, MISS = LookupResult.HIT, LookupResult.MISS


def _watched(world: World) -> WatchedPrimaryTier:
    assert isinstance(world.primary, WatchedPrimaryTier)
    return world.primary


def _settle(world: World) -> list[str]:
    """End a step; the laws that were found broken."""
    world.step()
    return sorted(_watched(world).watch._told)


@pytest.fixture(params=["log", "enforce"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Four rows under a monitor, sound or not."""
    with running(World(tmp_path, monitor=request.param), sound=False) as world:
        yield world


def _enforced(world: World) -> bool:
    return world.station.config.monitor == "enforce"


Fault = Callable[[World, pytest.MonkeyPatch], None]


def _forgotten_unpin(world: World, patch: pytest.MonkeyPatch) -> None:
    context = world.store(A)
    world.manager.prepare_load([A], context)
    world.primary._policy.get(A).ref_cnt += 1
    world.manager.complete_load([A], context)


def _evicts_pinned(world: World, patch: pytest.MonkeyPatch) -> None:
    context = world.store(A)
    world.manager.prepare_load([A], context)
    chunk = world.primary._policy.get(A)
    world.primary._policy.remove(A)
    world.primary._free_chunk(chunk)


def _frees_twice(world: World, patch: pytest.MonkeyPatch) -> None:
    world.store(A)
    chunk = world.primary._policy.get(A)
    world.primary._remove_idle(A, chunk)
    world.primary._free_chunk(chunk)


def _gives_twice(world: World, patch: pytest.MonkeyPatch) -> None:
    world.store(A)
    row = world.primary.row_of(A)
    world.primary._free_list.append(row)
    world.primary._num_allocated_chunks = world.primary._num_chunks
    assert world.prepare((B,), world.request()) is not None


def _ready_unsealed(world: World, patch: pytest.MonkeyPatch) -> None:
    context = world.request()
    assert world.prepare((A,), context) is not None
    world.primary.complete_store([A], context)


def _offers_withdrawn(world: World, patch: pytest.MonkeyPatch) -> None:
    context = world.store(A)
    world.manager.prepare_load([A], context)
    world.primary.withdraw([A])
    patch.setattr(SealedPrimaryTier, "lookup", CPUPrimaryTierOffloadingManager.lookup)
    world.lookup(A)


def _serves_revoked(world: World, patch: pytest.MonkeyPatch) -> None:
    world.store(A)
    assert world.epochs.raise_epoch("reset")
    patch.setattr(SealedPrimaryTier, "_revoked", lambda self, chunk: False)
    world.lookup(A)


def _miscounts(world: World, patch: pytest.MonkeyPatch) -> None:
    world.primary._num_evictable_cache_chunks += 1
    world.store(A)


def _half_eviction(world: World, patch: pytest.MonkeyPatch) -> None:
    world.store(A, B, C, D)

    def half(self: Any, keys: Any, req_context: Any) -> None:
        self._remove_idle(A, self._policy.get(A))

    patch.setattr(SealedPrimaryTier, "prepare_store", half)
    assert world.manager.prepare_store([key_of(7), key_of(8)], world.request()) is None


def _evicts_own_input(world: World, patch: pytest.MonkeyPatch) -> None:
    world.store(A, B, C, D)
    policy = world.primary._policy
    evict = policy.evict
    patch.setattr(policy, "evict", lambda count, protected: evict(count, set()))
    assert world.prepare((A, key_of(7)), world.request()) is not None


FAULTS: dict[str, tuple[Fault, str]] = {
    "an unpin is forgotten": (_forgotten_unpin, "pins equal readers"),
    "a pinned chunk is evicted": (_evicts_pinned, "pinned is never evicted"),
    "a row is freed twice": (_frees_twice, "rows have one owner"),
    "a row is given twice": (_gives_twice, "rows have one owner"),
    "a store is ready unsealed": (_ready_unsealed, "sealed or proven before ready"),
    "a withdrawn chunk is offered": (_offers_withdrawn, "only ready is offered"),
    "a revoked epoch is served": (_serves_revoked, "revoked is never served"),
    "a counter slips": (_miscounts, "counts equal recount"),
    "an eviction fails half way": (_half_eviction, "a failed eviction changes nothing"),
    "a store evicts its own input": (_evicts_own_input, "own input is never evicted"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_named(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fault, law = FAULTS[name]
    with caplog.at_level(logging.ERROR, "kvsafe"):
        fault(world, monkeypatch)
        assert law in _settle(world)
    assert world.counters.totals[DIVERGENCES] >= 1
    assert sum(law in line for line in caplog.messages) == 1
    assert world.primary.stopped == _enforced(world)
    assert world.counters.totals[MONITOR_STOPPED] == int(_enforced(world))


def test_a_sound_tier_is_left_alone(world: World) -> None:
    context = world.store(A, B, C, D)
    world.manager.prepare_load([A, B], context)
    world.primary.withdraw([A, C])
    world.manager.complete_load([A, B], context)
    world.store(key_of(5), key_of(6), key_of(7))
    failed = world.request()
    assert world.prepare((key_of(8),), failed) is not None
    world.manager.complete_store([key_of(8)], failed, success=False)
    world.manager.reset_cache()
    world.store(A)
    assert world.lookup(A) is HIT
    assert _settle(world) == []
    assert not world.primary.stopped


def test_enforce_stops_offers_and_stores_and_nothing_else(tmp_path: Path) -> None:
    with running(World(tmp_path, monitor="enforce"), sound=False) as world:
        context = world.store(A, B)
        spec = world.manager.prepare_load([A], context)
        _watched(world).watch.monitor._diverge("a law", "this", "that")
        assert world.lookup(B) is HIT, "the verdict falls at the end of the step"
        world.step()
        assert world.lookup(B) is MISS
        assert world.prepare((C,), world.request()) is None
        # What was under way ends as it would have.
        assert spec is not None
        world.manager.complete_load([A], context)
        world.manager.on_request_finished(context)
        world.manager.reset_cache()
        assert world.prepare((C,), world.request()) is None
        assert world.counters.totals[MONITOR_STOPPED] == 1


def test_log_goes_on(tmp_path: Path) -> None:
    with running(World(tmp_path, monitor="log"), sound=False) as world:
        world.store(A)
        _watched(world).watch.monitor._diverge("a law", "this", "that")
        world.step()
        assert world.lookup(A) is HIT
        world.store(B)
        assert world.lookup(B) is HIT
        assert world.counters.totals[DIVERGENCES] == 1


def test_off_has_no_monitor(tmp_path: Path) -> None:
    with running(World(tmp_path, monitor="off")) as world:
        assert type(world.primary) is SealedPrimaryTier
        world.store(A)
        assert world.lookup(A) is HIT
        assert not world.primary.stopped


@pytest.mark.parametrize("step", ["answered", "readied", "allocated", "freed", "pinned", "counted"])
def test_a_fault_of_the_monitor_is_not_the_engines(
    world: World, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError(step)

    monkeypatch.setattr(Monitor, step, broken)
    context = world.store(A, B)
    if not world.primary.stopped:
        assert world.lookup(A, context) is HIT
        world.manager.prepare_load([A], context)
        world.manager.complete_load([A], context)
    world.primary.withdraw([B])
    assert "the monitor works" in _settle(world)
    assert world.primary.stopped == _enforced(world)


def test_a_key_that_was_lost_is_watched_again_when_its_row_is(world: World) -> None:
    world.store(A)
    _watched(world).watch.monitor._lose(A, "a law", "this", "that")
    monitor = _watched(world).watch.monitor
    before = monitor.divergences
    world.manager.reset_cache()
    if not _enforced(world):
        world.store(A)
        monitor.answered(A, "miss", 0)
        assert monitor.divergences == before
        monitor.freed(int(world.primary.row_of(A) or 0))
        monitor.freed(int(world.primary.row_of(A) or 0))
        assert monitor.divergences == before + 1


def test_the_manager_asks_the_tier(tmp_path: Path) -> None:
    """The two doors that `enforce` closes are the manager's, so that tiers are not asked either."""
    with running(World(tmp_path, tiers=["hand"], monitor="enforce"), sound=False) as world:
        _watched(world).watch.monitor._diverge("a law", "this", "that")
        world.step()
        asked: list[OffloadKey] = []
        world.hand.lookup = lambda key, context: asked.append(key)  # type: ignore[method-assign, assignment]
        assert isinstance(world.manager, KVSafeManager)
        assert world.lookup(A) is MISS
        assert asked == []

# SPDX-License-Identifier: Apache-2.0
"""Turns: who may load while others have loaded and do not run yet (finding V)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from fuzz.world import Setting
from kvsafe.engine.counters import PUT_OFF, metric_definitions
from kvsafe.engine.requests.turns import Turns, turns_for
from tests.engine_unit.course import course

SHAPE: dict[str, Any] = {
    "block_size": 4,
    "num_kv_heads": 1,
    "head_size": 1,
    "dtype": torch.float32,
}
WINDOW, IN_FLIGHT = 12, 16


def turns(blocks: int, *, window: int = WINDOW, told: list[str] | None = None) -> Turns:
    """One group of full attention, and one with a window if there is one.

    Why a request is held back is added to `told`.
    """
    specs: list[Any] = [FullAttentionSpec(**SHAPE)]
    if window:
        specs.append(SlidingWindowSpec(**SHAPE, sliding_window=window))
    groups = [SimpleNamespace(tokens_per_block=4, kv_cache_spec=spec) for spec in specs]
    model = SimpleNamespace(max_model_len=256)
    config: Any = SimpleNamespace(kv_group_configs=groups)
    vllm = SimpleNamespace(
        max_in_flight_tokens=IN_FLIGHT, model_config=model, speculative_config=None
    )
    note = [] if told is None else told
    return turns_for(config, vllm, SimpleNamespace(num_blocks=blocks + 1), note.append)


def request(name: str, tokens: int = 34) -> Any:
    """A request that nobody has admitted yet."""
    return SimpleNamespace(
        request_id=name,
        num_tokens=tokens,
        num_computed_tokens=0,
        status=RequestStatus.WAITING,
    )


def load(made: Turns, asked: Any, computed: int = 24) -> Any:
    """vLLM admits its load."""
    made.admit(asked, 0, computed)
    asked.num_computed_tokens = computed
    asked.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    return asked


def test_what_fits_to_the_block() -> None:
    # Loaded: 6 + 3 blocks; to run: 9 + 6. The window's three first blocks are never taken.
    for blocks, fits in ((23, False), (24, True)):
        made = turns(blocks)
        assert made.fits(request("a"), 24)
        load(made, request("a"))
        assert made.fits(request("b"), 24) is fits


def test_a_long_prompt_needs_no_more_of_a_window_than_it_can_hold() -> None:
    made = turns(200)
    load(made, request("a", tokens=256), computed=4)
    # 64 blocks of full attention, and (11 + 16) / 4 + 1 = 8 of the window for 63 more.
    assert [place.whole for place in made._loaded.values()] == [64 + 8]


@pytest.mark.parametrize("end", ["runs", "scheduled", "ends", "fails"])
def test_the_next_has_its_turn_whatever_becomes_of_the_first(end: str) -> None:
    made = turns(23)
    first, second = load(made, request("a")), request("b")
    assert not made.fits(second, 24)
    if end == "runs":
        first.status = RequestStatus.RUNNING
    elif end == "scheduled":
        made.pass_on({"a": 1})
    elif end == "ends":
        first.status = RequestStatus.FINISHED_ABORTED
    else:
        first.status, first.num_computed_tokens = RequestStatus.WAITING, 0
    assert made.fits(second, 24)


def test_who_waits_is_not_overtaken_and_bars_nobody_once_gone() -> None:
    made = turns(23)
    first = load(made, request("a"))
    small = request("c", tokens=5)
    assert made.fits(small, 4)
    assert not made.fits(request("b"), 24)
    assert not made.fits(small, 4)
    # It is computed: the small one need not wait behind it.
    made.admit(request("b"), 0, 0)
    assert made.fits(small, 4)
    # It ends without a word: over when nobody has loaded any more.
    assert not made.fits(request("b"), 24)
    made.pass_on({first.request_id: 1})
    load(made, small, computed=4)
    made.pass_on({"c": 1})
    assert made.fits(load(made, request("d", tokens=5), computed=4), 4)
    assert made.fits(request("e", tokens=5), 4)


def test_one_that_failed_lets_those_pass_that_hold_blocks() -> None:
    made = turns(40)
    failed, other = load(made, request("a")), load(made, request("b"))
    failed.status, failed.num_computed_tokens = RequestStatus.WAITING, 0
    assert "a" in made
    # 9 + 8 blocks twice, and 6 for the other.
    assert not made.stands_back(failed, 40)
    assert made.stands_back(failed, 39)
    assert not made.fits(request("c", tokens=5), 4)
    # Its load has failed as well, and vLLM has not looked at it yet: it still holds its blocks.
    other.num_computed_tokens = 0
    assert made.stands_back(failed, 39)
    other.status = RequestStatus.WAITING
    assert not made.stands_back(failed, 0)


def test_why_a_request_is_held_back_is_told_once_for_each_wait() -> None:
    told: list[str] = []
    made = turns(23, told=told)
    first = load(made, request("a"))
    second, third = request("b"), request("c", tokens=5)
    for _ in range(3):
        assert not made.fits(second, 24) and not made.fits(third, 4)
    assert told == ["room", "behind"]
    # Its turn, and after it another wait.
    first.status = RequestStatus.RUNNING
    assert made.fits(second, 24)
    load(made, second)
    failed = load(made, request("d", tokens=5), computed=4)
    failed.status, failed.num_computed_tokens = RequestStatus.WAITING, 0
    assert made.stands_back(failed, 0) and made.stands_back(failed, 0)
    assert told == ["room", "behind", "failed"]
    assert made.stands_back(third, 0)
    made.admit(third, 0, 0)
    assert made.stands_back(third, 0)
    assert told == ["room", "behind", "failed", "failed"]


def test_nobody_waits_behind_one_that_has_ended() -> None:
    told: list[str] = []
    made = turns(23, told=told)
    load(made, request("a"))
    small = request("c", tokens=5)
    assert not made.fits(request("b"), 24) and not made.fits(small, 4)
    made.forget(["c"])
    assert not made.fits(small, 4)
    made.forget(["b", "x"])
    assert made.fits(small, 4)
    assert told == ["room", "behind", "behind"]


def test_the_metric_counts_each_wait_of_the_scene_once() -> None:
    """Two requests load at the same time and would leave neither the blocks to run."""
    assert metric_definitions()[PUT_OFF].labelnames == ("reason",)
    for blocks, waits in ((24, 1), (40, 0)):
        setting = Setting(
            windows=(0, 12),
            blocks_per_chunk=2,
            rows=12,
            blocks=blocks,
            seats=1,
            no_prefix_cache=True,
        )
        with course(setting) as found:
            found.act("ask", 0, 32, 1)
            found.go()
            for tokens in (34, 31):
                found.act("ask", 0, tokens, 1)
            with found.stuck():
                found.go()
            assert found.held
            assert found.manager.counters.totals[PUT_OFF] == waits


def test_a_load_need_not_wait_behind_one_whose_client_has_gone() -> None:
    setting = Setting(windows=(0, 12), rows=40, blocks=27, seats=4)
    with course(setting) as found:
        for family in (0, 1):
            found.act("ask", family, 16, 1)
            found.go()
        found.act("reset_blocks")
        found.act("ask", 0, 60, 1)
        with found.stuck():
            found.go()
        assert found.held
        found.act("ask", 1, 17, 1)
        found.act("ask", 1, 5, 1)
        found.go()
        assert found.manager.counters.totals[PUT_OFF] == 2
        assert not found.finished("r3") and not found.finished("r4")
        found.world.scheduler.finish_requests(["r3"], RequestStatus.FINISHED_ABORTED)
        found.world.driver._aborted.add("r3")
        found.go()
        assert found.finished("r4") and not found.finished("r2")


def test_nothing_is_noted_without_windows() -> None:
    made = turns(1, window=0)
    load(made, request("a"))
    assert not made
    assert made.fits(request("b"), 24)

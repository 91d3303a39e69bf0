# SPDX-License-Identifier: Apache-2.0
"""Under `kv_load_failure_policy: fail`, who met a refused chunk fails, whatever else happens to it.

Each course under vLLM's real scheduler has two controls: under `recompute` the request is computed,
and if nothing is damaged it is served.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from fuzz.world import Event, Plan, Setting, from_seed, run
from fuzz.world.checks import chunks_of
from fuzz.world.plan import FAULTS, OURS, RESETS, WORK, by_weight
from fuzz.world.tier import HandTier
from fuzz.world.world import World
from kvsafe.engine.counters import PUT_OFF, SERVED
from kvsafe.engine.manager import KVSafeManager
from kvsafe.engine.scheduler import KVSafeConnectorScheduler
from kvsafe.engine.tiers.proving import ProvingTier
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.engine_unit.course import Course, course

Case = Literal["fail", "recompute", "served"]
CASES: tuple[Case, ...] = ("fail", "recompute", "served")


def setting(case: Case, **changes: Any) -> Setting:
    """Two groups, of which one has a window; one tier."""
    shape: dict[str, Any] = {"rows": 12, "blocks": 60, "budget": 32, "seats": 3}
    return Setting(**{**shape, "tiers": (False,), "fail": case != "recompute", **changes})


class Scene(Course):
    """A course with one tier, whose chunks can be looked up and damaged by their place."""

    def __init__(self, found: Course, case: Case) -> None:
        super().__init__(found.world)
        self.case = case

    @property
    def tier(self) -> HandTier:
        """The only tier."""
        return self.world.parts.tiers[0]

    @property
    def loads(self) -> int:
        """Loads that workers were given."""
        return self.world.parts.counts["load"]

    @property
    def served(self) -> int:
        """Chunks that were loaded."""
        return int(self.manager.counters.totals[SERVED])

    @property
    def computed(self) -> int:
        """Tokens that were computed."""
        return self.world.parts.counts["computed"]

    def store(self, family: int, tokens: int) -> None:
        """A request computes its prompt and stores it; then the accelerator forgets it."""
        self.act("ask", family, tokens, 1)
        self.go()
        self.act("reset_blocks")

    def lose_rows(self) -> None:
        """The rows are gone, as after a restart; the tier has everything."""
        self.go()
        self.manager.primary_tier.reset_cache()

    def keys(self, name: str, group: int = 0) -> list[OffloadKey]:
        """The keys of a request that has asked."""
        return list(self.world.half._req_status[name].group_states[group].offload_keys)

    def stored(self, name: str, group: int) -> list[OffloadKey]:
        """Those of them that the tier holds."""
        return [key for key in self.keys(name, group) if self.named(key) in self.tier.objects]

    def named(self, key: OffloadKey) -> OffloadKey:
        """What the tier knows the chunk by."""
        return OffloadKey(self.manager.secondary_tiers[0]._desk.names.name(key))

    def damage(self, key: OffloadKey) -> None:
        """Damage the object of this key, unless the case is the one without damage."""
        body = bytearray(self.tier.objects[self.named(key)])
        body[-1] ^= self.case != "served"
        layout = self.world.parts.spec.spec.station.seal_setting.layout
        body[layout.header_bytes + 3] ^= self.case != "served"
        self.tier.objects[self.named(key)] = bytes(body)
        self.world.parts.counts["tried_damage_object"] += 1

    def promote(self) -> None:
        """The tier brings what was asked for, and it is opened; the next step hears of it."""
        self.tier.end_all()
        self.act("step")
        self.world.parts.threads.run()

    def hear(self) -> None:
        """The scheduler side hears now what has become of proofs, as any lookup would make it."""
        self.manager._maybe_process_finished_jobs()

    def judge(self, name: str) -> None:
        """The request has ended as it should, and only then."""
        assert self.end(name) == ("error" if self.case == "fail" else "length")


@contextlib.contextmanager
def scene(case: Case, **changes: Any) -> Iterator[Scene]:
    """A world in which one request, `r1` or later, meets a damaged chunk."""
    with course(setting(case, **changes)) as found:
        made = Scene(found, case)
        yield made
        found.held += made.held


@pytest.mark.parametrize("case", CASES)
def test_who_is_put_off_for_its_whole_patience(case: Case) -> None:
    """Finding V's guard holds it back: another has loaded, needs much to run, and does not run.

    There are blocks enough to compute the second one meanwhile.
    """
    with scene(case, windows=(0, 12), rows=40, blocks=27, budget=16) as found:
        found.store(0, 16)
        found.store(1, 16)
        found.lose_rows()
        found.act("ask", 0, 60, 1)
        found.act("step")
        found.promote()
        with found.stuck():
            found.go()
        assert found.held and not found.finished("r2")
        found.act("ask", 1, 17, 1)
        found.act("step")
        found.damage(found.keys("r3")[2])
        found.promote()
        found.go()
        assert found.finished("r3") is (case == "fail")
        if case != "served":
            found.pass_deadline()
            found.go()
            found.judge("r3")
        assert not found.finished("r2")
        found.let_go()
        found.go(12)
        found.judge("r3")
        assert found.end("r2") == "length"
        assert found.served == (2 if case == "served" else 1) * 6
        # Who is to fail is not put off.
        assert found.manager.counters.totals[PUT_OFF] == (case != "fail")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("group", [0, 1])
def test_chunks_of_several_blocks_beside_a_window(case: Case, group: int) -> None:
    """A match is shortened until its rows hold what is read; the refused chunk has no row."""
    with scene(case, windows=(0, 8), blocks_per_chunk=2) as found:
        found.store(0, 32)
        found.lose_rows()
        found.act("ask", 0, 33, 1)
        found.act("step")
        found.damage(found.stored("r1", group)[-1])
        found.promote()
        found.go()
        found.judge("r1")


@pytest.mark.parametrize("case", CASES)
def test_whose_first_chunk_is_gone_as_well(case: Case) -> None:
    """The prefix ends before the refused chunk: nobody looks for that one again."""
    with scene(case) as found:
        found.store(0, 16)
        found.lose_rows()
        found.act("ask", 0, 17, 1)
        found.act("step")
        first, _, third, _ = found.keys("r1")
        found.damage(third)
        found.promote()
        found.hear()
        found.manager.primary_tier.withdraw([first])
        found.go()
        # Without damage it is a miss like any other.
        assert found.end("r1") == ("error" if case == "fail" else "length")


@pytest.mark.parametrize("case", CASES)
def test_who_waits_for_a_tier_that_never_answers(case: Case) -> None:
    """Another chunk is asked for again and again, until the request is tired of it."""
    with scene(case, tiers=(False, False)) as found:
        found.store(0, 16)
        found.lose_rows()
        found.act("ask", 0, 17, 1)
        found.act("step")
        keys = found.keys("r1")
        found.damage(keys[1])
        found.promote()
        found.hear()
        found.manager.primary_tier.withdraw(keys[:1])
        for tier in found.world.parts.tiers:
            tier.mute = True
        found.go()
        found.pass_deadline()
        found.go()
        found.act("revive", 0)
        found.act("revive", 1)
        assert found.end("r1") == ("error" if case == "fail" else "length")


@pytest.mark.parametrize("case", CASES)
def test_whose_prefix_another_request_has_computed_meanwhile(case: Case) -> None:
    """Nothing is left to be loaded: the accelerator has every block but the last."""
    with scene(case) as found:
        found.store(0, 16)
        found.lose_rows()
        found.act("ask", 0, 17, 1)
        found.act("step")
        found.damage(found.keys("r1")[2])
        found.promote()
        found.hear()
        pool = found.world.scheduler.kv_cache_manager
        request = found.world.scheduler.requests["r1"]
        _compute_beside(found)
        assert pool.get_computed_blocks(request)[1] == 16
        found.go()
        found.judge("r1")


def _compute_beside(found: Scene) -> None:
    """Another request with the same prompt that loads nothing, while `r1` is not asked."""
    scheduler = found.world.scheduler
    request = scheduler.requests["r1"]
    scheduler.waiting.remove_requests([request])
    scheduler.deferred_waiting.discard(request)
    found.act("ask", 0, 17, 1)
    scheduler.requests["r2"].skip_reading_prefix_cache = True
    found.go()
    assert found.end("r2") == "length"
    scheduler.waiting.add_request(request)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_who_was_told_of_a_row_that_another_load_finds_bad(case: Case, prefix_cache: bool) -> None:
    """While a chunk is being loaded, others that want it are told to ask again."""
    with scene(case, tiers=(), seats=4, no_prefix_cache=not prefix_cache) as found:
        found.store(0, 16)
        _damage_row(found, 2)
        found.act("ask", 0, 17, 1)
        with found.stuck():
            found.act("step")
        found.act("ask", 0, 17, 1)
        found.act("step")
        found.let_go()
        found.go()
        found.judge("r1")
        found.judge("r2")
        # Later ones meet a miss.
        found.act("reset_blocks")
        found.act("ask", 0, 17, 1)
        found.go()
        assert found.end("r3") == "length"


@pytest.mark.parametrize("case", CASES)
def test_who_was_told_of_a_bad_row_is_served_if_a_tier_has_a_good_one(case: Case) -> None:
    with scene(case) as found:
        found.store(0, 16)
        _damage_row(found, 2)
        found.act("ask", 0, 17, 1)
        with found.stuck():
            found.act("step")
        found.act("ask", 0, 17, 1)
        found.act("step")
        found.let_go()
        found.go(9)
        found.judge("r1")
        assert found.end("r2") == "length"
        if case == "fail":
            assert found.served == 4


def _damage_row(found: Scene, chunk: int) -> None:
    """Damage the row of one chunk of the first family."""
    found.world.parts.counts["tried_damage_row"] += 1
    found.go()
    keys = sorted(chunks_of(found.manager), key=found.manager.primary_tier.row_of)
    row = found.manager._station.region.row(found.manager.primary_tier.row_of(keys[chunk]))
    row[found.manager._station.seal_setting.layout.header_bytes + 3] ^= found.case != "served"


def test_the_load_that_fails_takes_nothing_and_counts_as_nothing() -> None:
    with scene("fail") as found:
        found.store(0, 16)
        found.lose_rows()
        found.act("ask", 0, 17, 1)
        found.act("step")
        found.damage(found.keys("r1")[0])
        found.promote()
        computed = found.computed
        half, request = found.world.half, found.world.scheduler.requests["r1"]
        found.hear()
        with mock.patch.object(half._req_status["r1"], "transfer_jobs", {99}):
            assert half.get_num_new_matched_tokens(request, 0) == (None, False)
        with found.stuck(), _admissions(found) as admitted:
            found.act("step")
        assert admitted == [(1, 4)] and not found.held and found.loads == 1
        assert not any(chunk.ref_cnt > 0 for chunk in chunks_of(found.manager).values())
        found.judge("r1")
        assert found.computed == computed
        assert found.served == 0
        # The next one is computed, since the refused object is not offered any more.
        found.act("ask", 0, 17, 1)
        found.go()
        assert found.end("r2") == "length" and found.computed > computed


@contextlib.contextmanager
def _admissions(found: Scene) -> Iterator[list[tuple[int, int]]]:
    """Blocks of the first group, and tokens to load, of each request that is admitted meanwhile."""
    half, seen = found.world.half, []
    admit = half.update_state_after_alloc

    def spy(request: Any, blocks: Any, tokens: int) -> None:
        seen.append((len(blocks.blocks[0]), tokens))
        admit(request, blocks, tokens)
        given = {block.block_id for block in blocks.blocks[0]}
        # Else vLLM would not flush an older store of these blocks.
        assert given <= half._current_batch_allocated_block_ids

    with mock.patch.object(half, "update_state_after_alloc", spy):
        yield seen


def test_who_cannot_fail_yet_keeps_no_rows_for_itself() -> None:
    """Another has loaded and holds the blocks that vLLM wants to see free."""
    with scene("fail", blocks=14) as found:
        found.store(0, 16)
        found.store(1, 16)
        found.lose_rows()
        found.act("ask", 0, 40, 1)
        found.act("step")
        found.promote()
        with found.stuck():
            found.go()
        found.act("ask", 1, 37, 1)
        found.act("step")
        found.damage(found.keys("r3")[2])
        found.promote()
        assert found.manager.waits.awaited
        found.go()
        assert found.held and not found.finished("r3")
        assert not found.manager.waits.awaited
        found.let_go()
        found.go(12)
        assert found.end("r2") == "length"
        found.judge("r3")


def test_who_runs_is_not_concerned_by_what_others_meet() -> None:
    with scene("fail", no_prefix_cache=True) as found:
        found.store(0, 16)
        found.lose_rows()
        found.act("ask", 0, 17, 9)
        found.act("step")
        found.promote()
        while found.served < 4:
            found.act("copy", 5)
            found.act("step")
        found.manager.primary_tier.withdraw(found.keys("r1"))
        found.act("ask", 0, 17, 1)
        found.act("step")
        found.damage(found.keys("r2")[2])
        found.promote()
        while not found.finished("r2"):
            assert not found.finished("r1")
            found.act("step")
        found.judge("r2")
        # It begins anew, and finds only a part of its prefix.
        found.act("reset_running")
        found.go(12)
        assert found.end("r1") == "length"


def test_who_goes_away_before_it_fails_leaves_nothing() -> None:
    with scene("fail") as found:
        found.store(0, 16)
        found.lose_rows()
        for family in (0, 0):
            found.act("ask", family, 17, 1)
        found.act("step")
        found.damage(found.keys("r1")[0])
        found.promote()
        found.hear()
        found.act("abort", 0)
        found.go()
        assert found.end("r2") == "error"


def test_a_reset_before_the_failure_is_reported_changes_nothing() -> None:
    with scene("fail", lagging=True, pipelined=True) as found:
        found.store(0, 16)
        found.lose_rows()
        found.act("ask", 0, 17, 1)
        found.act("step")
        found.damage(found.keys("r1")[0])
        found.promote()
        with _admissions(found) as admitted:
            while not admitted:
                found.act("step")
        assert found.end("r1") is None
        found.act("reset_connector")
        found.go()
        found.judge("r1")


# --- any world -----------------------------------------------------------------------------------


class Told:
    """Which chunks each request was told of when it last asked, and who has to fail for it.

    Knows nothing of how the requests are made to fail: it looks at answers and at refusals alone.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now: dict[str, set[bytes]] = {}
        self.last: dict[str, set[bytes]] = {}
        self.must_fail: set[str] = set()
        self.world: World | None = None
        self._after(patch, KVSafeManager, "lookup", self._answered)
        self._before(patch, KVSafeConnectorScheduler, "get_num_new_matched_tokens", self._asks)
        self._before(patch, KVSafeConnectorScheduler, "update_state_after_alloc", self._admitted)
        self._before(patch, ProvingTier, "_refuse", self._refused)
        self._before(patch, World, "look", self._look)

    @staticmethod
    def _before(patch: pytest.MonkeyPatch, owner: Any, name: str, told: Any) -> None:
        real = getattr(owner, name)

        def call(self: Any, *given: Any, **named: Any) -> Any:
            told(self, *given)
            return real(self, *given, **named)

        patch.setattr(owner, name, call)

    @staticmethod
    def _after(patch: pytest.MonkeyPatch, owner: Any, name: str, told: Any) -> None:
        real = getattr(owner, name)

        def call(self: Any, *given: Any, **named: Any) -> Any:
            answer = real(self, *given, **named)
            told(answer, *given)
            return answer

        patch.setattr(owner, name, call)

    def _answered(self, answer: LookupResult, key: OffloadKey, context: Any) -> None:
        if answer in (LookupResult.HIT, LookupResult.HIT_PENDING):
            self.now.setdefault(context.req_id, set()).add(key)

    def _asks(self, half: Any, request: Any, *_: Any) -> None:
        self.last[request.request_id] = self.now.pop(request.request_id, set())

    def _admitted(self, half: Any, request: Any, *_: Any) -> None:
        self.last.pop(request.request_id, None)
        self.now.pop(request.request_id, None)

    def _refused(self, tier: Any, key: OffloadKey, refusal: Refusal) -> None:
        if refusal.kind is not RefusalKind.EPOCH_REVOKED:
            told = (*self.last.items(), *self.now.items())
            self.must_fail.update(name for name, keys in told if key in keys)

    def _look(self, world: World) -> None:
        self.world = world


def _damaged_world(seed: int) -> Plan:
    """Worlds under `fail` with many damaged objects."""
    draw = random.Random(seed).randrange
    shape = from_seed(seed, "kvsafe").setting
    tiers = shape.tiers or (False,)
    shape = replace(shape, fail=True, new_weights=False, tiers=tiers)
    weights = {**WORK, **OURS, "damage_object": 6, "clock": draw(4), "shrug": 4}
    weights |= {"reset_blocks": 5, "idle": 8}
    for more in (RESETS, FAULTS, {"damage_row": 3, "copy_fault": 1}):
        weights |= more if draw(3) == 0 else {}
    names = by_weight(weights)
    events = [
        Event(names[draw(len(names))], draw(256), draw(256) | 8, draw(256))
        for _ in range(40 + draw(60))
    ]
    return Plan("kvsafe", shape, tuple(events))


def test_in_any_world_who_was_told_of_a_refused_chunk_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = 0
    for seed in range(90):
        with monkeypatch.context() as patch:
            told = Told(patch)
            outcome = run(_damaged_world(seed))
        assert outcome.clean, (seed, outcome.finding)
        assert told.world is not None
        for name in told.must_fail - told.world.driver._aborted:
            assert told.world.engine.ends[name] == "error", (seed, name)
            failed += 1
    assert failed

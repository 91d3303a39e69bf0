# SPDX-License-Identifier: Apache-2.0
"""The machine is sound in its small worlds, and the explorer that says so can say otherwise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache

import pytest

from kvsafe.cli.main import main
from kvsafe.lifecycle.canonical import canonical
from kvsafe.lifecycle.check import Result, check_liveness, check_safety, never_fired
from kvsafe.lifecycle.explorer import Explorer, moves_of, successors
from kvsafe.lifecycle.liveness import LIVENESS
from kvsafe.lifecycle.mutants import MUTANTS, Mutant, hunt
from kvsafe.lifecycle.safety import SAFETY
from kvsafe.lifecycle.story import story
from kvsafe.lifecycle.table import RULES
from kvsafe.lifecycle.upheaval import can_close
from kvsafe.lifecycle.words import CLOSING, State
from kvsafe.lifecycle.world import FEATURES, World
from kvsafe.lifecycle.worlds import LRU, POLICIES, SIZES, lively, prefixes, worlds
from tests.tidy.tree import ROOT

# With ARC these are walked by `kvsafe model check`; they would take the tests' time here.
LONG = {("arc", name) for name in ("rows", "promotions", "parked", "damage", "reset", "deadlines")}
SMALL = [world for world in worlds("small") if (world.policy.name, world.name) not in LONG]
LIVELY = [world for world in lively(LRU) if world.name not in ("never reported", "overtaken")]


@cache
def _walked() -> tuple[Result, ...]:
    return tuple(
        [check_safety(world) for world in SMALL] + [check_liveness(world) for world in LIVELY]
    )


@pytest.mark.timeout(300)
def test_every_law_holds_in_every_small_world() -> None:
    for result in _walked():
        assert result.ok, "\n".join(result.in_words())


@pytest.mark.timeout(300)
def test_every_rule_fired_somewhere() -> None:
    assert never_fired(_walked()) == ()
    fired = {
        result.walk.moves[number].rule.event for result in _walked() for number in result.walk.fired
    }
    assert {rule.event for rule in RULES} - fired == set()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_every_seeded_fault_is_found(mutant: Mutant) -> None:
    finding = hunt(mutant)
    assert finding.found, f"{mutant.law} was not seen to break; broken: {finding.laws}"
    assert finding.steps > 0


def test_every_law_is_broken_by_some_fault() -> None:
    laws = {law.name for law in SAFETY} | {law.name for law in LIVENESS}
    assert {mutant.law for mutant in MUTANTS} == laws
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def _tiny() -> World:
    return next(world for world in worlds("small", ("lru",)) if world.name == "batch")


def test_hashes_and_whole_states_count_the_same() -> None:
    by_hash, by_state = Explorer(_tiny()).run(), Explorer(_tiny(), exact=True).run()
    assert (by_hash.states, by_hash.transitions) == (by_state.states, by_state.transitions)
    assert by_hash.complete


def test_symmetry_leaves_out_no_behaviour() -> None:
    """Renaming reaches the same representatives as walking all states does."""
    world = _tiny()._replace(keys=2, prefixes=prefixes(2, 1, 2), rows=1)
    whole = _reachable(world._replace(symmetric=False))
    reduced = _reachable(world)
    assert {canonical(world, state) for state in whole} == reduced
    assert len(reduced) < len(whole)


def _reachable(world: World) -> set[State]:
    moves = moves_of(world)
    start = canonical(world, world.start())
    found = {start}
    todo = [start]
    while todo:
        for _, after in successors(world, moves, todo.pop()):
            assert after is not None
            named = canonical(world, after)
            if named not in found:
                found.add(named)
                todo.append(named)
    return found


def test_a_trace_is_a_story_from_the_start_to_the_fault() -> None:
    mutant = next(one for one in MUTANTS if one.name.startswith("a store evicts pinned"))
    broken = Explorer(mutant.home(), mutant.rules()).run().violation
    assert broken is not None
    lines = list(story(mutant.home(), broken.moves, broken.states))
    assert "arrive (request" in lines[0]
    assert "store (request" in lines[-1]
    assert len(lines) == len(broken.moves) == len(broken.states) - 1
    for before, move, after in zip(broken.states, broken.moves, broken.states[1:], strict=False):
        assert move.rule.effect(mutant.home(), before, *move.who) == after


def test_every_feature_is_in_some_world_of_each_size() -> None:
    for size in SIZES:
        live = {feature for world in lively(LRU) for feature in world.features}
        assert {feature for world in worlds(size) for feature in world.features} | live >= {
            *FEATURES
        }


def test_default_worlds_have_the_size_that_is_promised() -> None:
    for policy in POLICIES:
        chosen = worlds("default", (policy,))
        assert all(world.keys >= 3 and world.rows >= 2 for world in chosen)
        assert any(world.requests >= 2 and world.tiers >= 2 for world in chosen)


def test_check_prints_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "check", "batch", "--world", "small", "--policy", "lru", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    [world] = report["worlds"]
    assert world["complete"] and world["states"] > 100 and report["ok"]


def test_a_walk_that_is_cut_short_is_not_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "check", "batch", "--world", "small", "--limit", "50"]) == 1
    assert "NOT COMPLETE" in capsys.readouterr().out


def test_mutants_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "mutants", "F22"]) == 0
    assert "own input is never evicted" in capsys.readouterr().out
    assert main(["model", "mutants", "no such fault"]) == 2


def test_show_prints_rules_laws_and_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rules", "laws", "worlds", "promote"):
        assert main(["model", "show", name]) == 0
    assert "an unread promotion is not evicted by another" in capsys.readouterr().out
    assert main(["model", "show", "nonsense"]) == 2


def test_the_table_has_words_and_names_its_features() -> None:
    assert len({rule.event for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.when and rule.then and rule.law
        assert rule.needs in {"", "late", *FEATURES}
        assert rule.guard.__doc__ and rule.effect.__doc__


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spin_agrees() -> None:
    if not (shutil.which("spin") and shutil.which("gcc")):
        pytest.skip("spin or gcc is not installed")
    if not os.environ.get("KVSAFE_LONG"):
        pytest.skip("minutes: make spin, or KVSAFE_LONG=1")
    script = ROOT / "spec" / "models" / "run"
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rows_are_not_given_back_before_parked_keys_are_looked_at() -> None:
    """The last step may cascade them, which reads rows; found by the fuzz target `machine`."""
    world = next(world for world in worlds("small") if world.name == "shutdown")
    start = world.start()
    waits = start.requests[0]._replace(parked=frozenset((0,)))
    closing = start._replace(door=CLOSING)
    assert can_close(world, closing)
    assert not can_close(world, closing._replace(requests=(waits, *start.requests[1:])))

# SPDX-License-Identifier: Apache-2.0
"""Seeded faults: a machine with one rule wrong, and the law that has to notice.

A law that no fault ever breaks proves nothing. Every law of `safety` and every property of
`liveness` has at least one fault here, and each has to be found in the world that is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kvsafe.lifecycle import faults as bad
from kvsafe.lifecycle import late_faults as late
from kvsafe.lifecycle import promotions as up
from kvsafe.lifecycle import transfers as way
from kvsafe.lifecycle.explorer import Explorer
from kvsafe.lifecycle.fair import Graph
from kvsafe.lifecycle.liveness import LIVENESS
from kvsafe.lifecycle.table import RULES, Rule
from kvsafe.lifecycle.world import World
from kvsafe.lifecycle.worlds import ARC, LRU, lively, small

Parts = Mapping[str, Mapping[str, Any]]


class Mutant(NamedTuple):
    """One fault: the rows of the table that it changes or leaves out, or a wrong policy."""

    name: str
    law: str
    world: str
    rows: Parts = MappingProxyType({})
    without: frozenset[str] = frozenset()
    policy: Any = None

    @property
    def live(self) -> bool:
        """Whether its law is a liveness property."""
        return any(law.name == self.law for law in LIVENESS)

    def rules(self) -> tuple[Rule, ...]:
        """The table with the fault in it."""
        return tuple(
            rule.changed(**self.rows.get(rule.event, {}))
            for rule in RULES
            if rule.event not in self.without
        )

    def home(self) -> World:
        """The world in which it has to be found."""
        policy = self.policy or LRU
        found = [world for world in (*small(policy), *lively(policy)) if world.name == self.world]
        return found[0]


class Finding(NamedTuple):
    """What came of looking for one fault."""

    mutant: Mutant
    found: bool
    laws: tuple[str, ...]
    steps: int
    states: int
    seconds: float


def hunt(mutant: Mutant, limit: int = 200_000) -> Finding:
    """Walk the fault's world until its law breaks."""
    return _hunt_live(mutant, limit) if mutant.live else _hunt_safe(mutant, limit)


def _hunt_safe(mutant: Mutant, limit: int) -> Finding:
    walk = Explorer(mutant.home(), mutant.rules(), limit=limit).run()
    broken = walk.violation
    laws, steps = (broken.laws, len(broken.moves)) if broken else ((), 0)
    return Finding(mutant, mutant.law in laws, laws, steps, walk.states, walk.seconds)


def _hunt_live(mutant: Mutant, limit: int) -> Finding:
    [law] = [law for law in LIVENESS if law.name == mutant.law]
    explorer = Explorer(
        mutant.home(), mutant.rules(), safety=(), marks=(law.bad,), graph=True, limit=limit
    )
    walk = explorer.run()
    cycle = Graph(walk, walk.marks[0], law).fair_cycle()
    steps = 0 if cycle is None else walk.distance(cycle.entry) + len(cycle.moves)
    laws = () if cycle is None else (law.name,)
    return Finding(mutant, cycle is not None, laws, steps, walk.states, walk.seconds)


def _effect(event: str, effect: Any) -> Parts:
    return {event: {"effect": effect}}


def _guard(event: str, guard: Any) -> Parts:
    return {event: {"guard": guard}}


def _room(event: str, no_event: str, room: Any) -> Parts:
    """Another idea of whom a store or a promotion may evict."""
    store = event == "store"
    can, do = (way.can_store, way.store) if store else (up.can_promote, up.promote)
    cannot = way.can_refuse_store if store else up.can_find_no_room
    return {
        event: {"guard": partial(can, room=room), "effect": partial(do, room=room)},
        no_event: {"guard": partial(cannot, room=room)},
    }


# fmt: off
MUTANTS: Final[tuple[Mutant, ...]] = (
    # ---- safety --------------------------------------------------------------------------
    Mutant("a pending chunk is a hit", "only ready is read", "rows",
           _guard("hit", bad.hit_pending)),
    Mutant("a proof accepts any bytes", "ready is true", "damage",
           {**_guard("proven", late.prove_all), **_guard("refused", bad.never)}),
    Mutant("a proof does not look at the epoch", "revoked is never served", "reset",
           {**_guard("proven", late.prove_any_epoch), **_guard("refused", bad.never)}),
    Mutant("a reset leaves loads alone", "revoked is never served", "reset",
           _effect("reset", late.reset_keeps_loads)),
    Mutant("a reset leaves running requests alone", "revoked is never served", "reset",
           _effect("reset", late.reset_keeps_running)),
    Mutant("a reset keeps idle chunks", "revoked is never served", "reset",
           _effect("reset", late.reset_keeps_chunks)),
    Mutant("ready when written, not when sealed", "sealed before ready", "rows",
           _effect("written", bad.written_is_ready)),
    Mutant("a failed write keeps its chunk", "failed is never visible", "rows",
           _effect("write failed", bad.nothing)),
    Mutant("a refused chunk is not withdrawn", "withdrawn is never offered", "rows",
           _effect("load refused", bad.refused_is_kept)),
    Mutant("a withdrawn chunk is a hit", "withdrawn is never offered", "rows",
           _guard("hit", bad.hit_withdrawn)),
    Mutant("a withdrawn chunk outlives its readers", "withdrawn is never offered", "rows",
           _effect("loaded", bad.loaded_keeps_withdrawn)),
    Mutant("a store evicts pinned chunks", "pinned is never evicted", "rows",
           _room("store", "no store", bad.room_of_pinned)),
    Mutant("a store evicts its own input (F22)", "own input is never evicted", "batch",
           _room("store", "no store", bad.room_of_own_input)),
    Mutant("promotions evict what nobody has read (F23)", "unread survives promotions",
           "long prefix", _room("promote", "no room", bad.room_of_unread)),
    Mutant("a worker's refusal is heard in mid-step", "hits stand until loaded", "rows",
           _guard("load refused", bad.refuse_at_once)),
    Mutant("a store without room evicts what it can", "failed eviction changes nothing", "ghosts",
           _effect("no store", bad.half_eviction)),
    Mutant("a failed write frees its row twice", "rows have one owner", "rows",
           _effect("write failed", bad.free_twice)),
    Mutant("a failed write loses its row", "rows have one owner", "rows",
           _effect("write failed", bad.lose_row)),
    Mutant("an overdue promotion frees its row", "rows have one owner", "deadlines",
           _effect("overdue fetch", late.overdue_frees)),
    Mutant("the policy keeps a failed key", "capacity holds", "rows",
           _effect("write failed", bad.policy_keeps)),
    Mutant("ARC does not trim its ghosts", "ghosts are bounded", "ghosts",
           policy=late.UntrimmedArc()),
    Mutant("ARC's target has no upper bound", "ghosts are bounded", "ghosts",
           policy=late.BoundlessArc()),
    Mutant("reading one's own key is frequency (F24)", "one request is not frequency",
           "own reads", _effect("load", bad.own_reads_count), policy=ARC),
    Mutant("ending makes all keys frequent (F24)", "one request is not frequency", "batch",
           policy=late.EagerArc()),
    Mutant("unpinning forgets the counter", "counts equal recount", "rows",
           _effect("loaded", bad.loaded_miscounts)),
    Mutant("a failed write forgets the counter", "counts equal recount", "rows",
           _effect("write failed", bad.failure_miscounts)),
    Mutant("a failed cascade keeps its pin", "pins equal readers", "cascades",
           _effect("cascade failed", late.cascade_keeps_pin)),
    Mutant("an abort unpins its load at once (F19)", "pins equal readers", "rows",
           _effect("abort", bad.abort_unpins)),
    Mutant("a second promotion of a pending key", "one write per key", "own reads",
           {**_guard("promote", late.promote_again), **_guard("no room", bad.never)}),
    Mutant("finalised with a store pending", "hooks in order", "cascades",
           _guard("finalise", bad.finalise_early)),
    Mutant("finish is told twice", "hooks in order", "cascades",
           _effect("finalise", bad.finish_twice)),
    Mutant("a late store lands (no generations)", "late changes nothing", "deadlines",
           _effect("late report", late.late_store_lands)),
    Mutant("a late cascade unpins again", "late changes nothing", "deadlines",
           _effect("late report", late.late_cascade_unpins)),
    Mutant("parked keys are forgotten (F21)", "cascades only what is ready", "parked",
           _effect("step", late.step_forgets_parked)),
    Mutant("rows go before their readers", "closed is untouched", "shutdown",
           _guard("close", late.close_at_once)),
    # ---- liveness ------------------------------------------------------------------------
    Mutant("a failed promotion is tried again (F11)", "every pending hit resolves",
           "long prefix", _guard("promote", late.promote_spent)),
    Mutant("vLLM 0.32's promotions (finding B)", "every pending hit resolves", "long prefix",
           {
               "promote": {"guard": late.promote_like_vllm, "effect": late.promote_over_unread},
               "no room": {"guard": late.no_room_like_vllm},
               "miss": {"guard": late.miss_like_vllm},
               "fetch failed": {"guard": bad.never},
           }),
    Mutant("a probe has no deadline", "every retry resolves", "no answers",
           without=frozenset({"overdue answer"})),
    Mutant("a promotion has no deadline (F14)", "every write resolves", "never reported",
           without=frozenset({"overdue fetch"})),
    Mutant("a store has no deadline (F12)", "every write resolves", "never reported",
           without=frozenset({"overdue store"})),
    Mutant("a load is forgotten when its request ends", "every load ends", "parking",
           _guard("loaded", bad.loaded_if_alive)),
    Mutant("a cascade has no deadline (F12)", "every cascade ends", "never reported",
           without=frozenset({"overdue cascade"})),
    Mutant("a store without room has no claim (F23)", "no store is starved by promotions",
           "starving", _room("promote", "no room", bad.room_without_claim)),
    Mutant("a parked key outlives its write", "every parked key resolves", "parking",
           _effect("step", late.step_keeps_parked)),
    Mutant("the engine sleeps on ended requests", "every request is finalised", "parking",
           _guard("build", bad.sleep_early)),
    Mutant("a cascade keeps its pin for ever", "pins return to zero", "overtaken",
           _effect("cascaded", late.cascaded_keeps_pin)),
    Mutant("seals of ended requests are dropped", "a drained system is idle", "parking",
           {**_guard("sealed", bad.seal_if_alive), **_guard("seal refused", bad.seal_if_alive)}),
    Mutant("a retired row is lost", "retired rows come back", "overtaken",
           _guard("late report", late.late_fetch_is_lost)),
    Mutant("closing stops the steps", "shutdown ends", "going down",
           _guard("build", bad.build_if_open)),
)
# fmt: on

# SPDX-License-Identifier: Apache-2.0
"""The lifecycle, one row per event: who, when, then, and the law that it follows.

To check a rule, read its row here and the two functions that it names; each is a few lines.
`when` and `then` say in words what `guard` and `effect` do. A row is in force only in worlds
that have the feature in `needs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kvsafe.lifecycle import lookups as look
from kvsafe.lifecycle import promotions as up
from kvsafe.lifecycle import requests as req
from kvsafe.lifecycle import transfers as way
from kvsafe.lifecycle import upheaval as end
from kvsafe.lifecycle.words import State

Guard = Callable[..., bool]
Effect = Callable[..., State]

# How often an event has to happen. FREE: never. OURS: our own threads and the engine's loop,
# while enabled. AGAIN: as the scheduler comes back to it, when enabled again and again.
# REPORT: while enabled, but only where transfers always report (no "deadline" in the world).
FREE: Final = ""
OURS: Final = "ours"
AGAIN: Final = "again"
REPORT: Final = "report"


class Rule(NamedTuple):
    """One row. `over` names what the event ranges over; `answers` groups rows of which one must
    happen: they are told apart by the first `told_by` of what they range over.
    """

    event: str
    over: str
    guard: Guard
    effect: Effect
    when: str
    then: str
    law: str
    needs: str = ""
    fair: str = FREE
    answers: str = ""
    told_by: int = 9

    def changed(self, **parts: Any) -> Rule:
        """This row with other parts: how a fault is seeded."""
        return self._replace(**parts)


# fmt: off
RULES: Final[tuple[Rule, ...]] = (
    # ---- a request looks its keys up -----------------------------------------------------
    Rule(
        "arrive", "request,prefix", req.can_arrive, req.arrive,
        "the slot is unused and the door is open",
        "waiting; every tier is told of it",
        "every tier hears of a request before anything is submitted for it",
    ),
    Rule(
        "hit", "request", look.can_hit, look.hit,
        "the next key is ready and not withdrawn",
        "told hit; unread until loaded",
        "only what is ready is a hit; a hit is not taken back within the step",
        fair=AGAIN, answers="lookup",
    ),
    Rule(
        "pend", "request", look.can_pend, look.pend,
        "a write of the next key is under way, no wait for it was spent",
        "told to come back",
        "one write per key: a second request waits for the first one's",
        fair=AGAIN, answers="lookup",
    ),
    Rule(
        "ask", "request,tier", look.can_ask, look.ask,
        "the next key is nowhere in the rows and this tier was not asked",
        "a probe is sent",
        "a tier is asked once per request and key",
        needs="probe", fair=AGAIN, answers="lookup", told_by=1,
    ),
    Rule(
        "retry", "request", look.can_retry, look.retry,
        "no tier has said yes and an answer is outstanding",
        "told to come back",
        "an open question is neither hit nor miss",
        needs="probe", fair=AGAIN, answers="lookup",
    ),
    Rule(
        "answer", "request,tier", look.can_answer, look.answer,
        "a probe is outstanding",
        "the tier says what it has now",
        "every retry resolves",
        needs="probe", fair=REPORT, answers="probe",
    ),
    Rule(
        "overdue answer", "request,tier", look.can_answer, look.give_up_answer,
        "a probe is outstanding for too long",
        "it counts as a no",
        "every retry resolves within its deadline",
        needs="deadline", fair=OURS, answers="probe",
    ),
    Rule(
        "promote", "request,tier", up.can_promote, up.promote,
        "the next key is nowhere in the rows, this tier has it, no wait for it was spent, a row "
        "is free or idle and unread by all, and no store waits for room",
        "evict one, give its row, queue the promotion; told to come back",
        "one promotion per key; an unread promotion is not evicted by another; a request waits "
        "for a key once; a store that found no room goes first",
        needs="promote", fair=AGAIN, answers="lookup", told_by=1,
    ),
    Rule(
        "no room", "request,tier", up.can_find_no_room, up.find_no_room,
        "as promote, but there is no such row",
        "nothing is evicted; a miss",
        "a failed eviction changes nothing",
        needs="promote", fair=AGAIN, answers="lookup", told_by=1,
    ),
    Rule(
        "miss", "request", look.can_miss, look.miss,
        "the next key is neither ready nor worth waiting for, and no tier has it",
        "the prefix ends here",
        "what is withdrawn, overdue, or was waited for in vain is a miss",
        fair=AGAIN, answers="lookup",
    ),
    # ---- a request is admitted and ends --------------------------------------------------
    Rule(
        "load", "request", req.can_load, req.load,
        "this step's lookups are over, none was pending, some were hits",
        "pin every hit, issue the load",
        "nothing is read that is not pinned and ready",
        fair=AGAIN, answers="admit",
    ),
    Rule(
        "compute", "request", req.can_compute, req.compute,
        "this step's lookups are over, the first was a miss",
        "runs",
        "a miss is recomputed",
        fair=AGAIN, answers="admit",
    ),
    Rule(
        "loaded", "request", req.can_report_load, req.loaded,
        "its load is under way, between two steps",
        "unpin; runs, unless it has ended",
        "a pin lasts exactly as long as its reader",
        fair=AGAIN, answers="load",
    ),
    Rule(
        "load refused", "request,key", req.can_refuse_load, req.refuse_load,
        "its load is under way, between two steps",
        "withdraw the chunk, unpin; waits again",
        "a refused chunk is never offered again; it leaves with its last reader",
        needs="refuse", answers="load", told_by=1,
    ),
    Rule(
        "recall", "request", req.can_recall, req.recall,
        "a reset overtook its load and the worker reports",
        "waits again",
        "an epoch once revoked is never served, not even to whom already loads it",
        needs="reset", fair=AGAIN, answers="load",
    ),
    Rule(
        "preempt", "request", req.can_preempt, req.preempt,
        "it runs",
        "waits again; its stores go on",
        "a store outlives the phase of the request that began it",
        needs="preempt",
    ),
    Rule(
        "abort", "request", req.can_abort, req.end,
        "it waits, loads or runs",
        "ended; what is under way goes on",
        "an abort takes nothing away from a transfer",
        needs="abort",
    ),
    Rule(
        "finish", "request", req.can_finish, req.end,
        "it runs",
        "ended; its accesses reach the policy in one move",
        "one request's repeated touches are not frequency",
        fair=OURS, answers="finish",
    ),
    Rule(
        "finalise", "request", req.can_finalise, req.finalise,
        "it has ended, no store of it is pending, nothing of it is parked or queued",
        "every tier is told that it is over; the slot is unused",
        "no submit after finish; finish exactly once",
        fair=OURS, answers="finalise",
    ),
    # ---- the step ------------------------------------------------------------------------
    Rule(
        "build", "", req.can_build, req.build,
        "no request's lookups are half done; somebody or something needs a step",
        "unloaded hits are promises no longer",
        "a hit is promised for one step",
        fair=OURS, answers="step",
    ),
    Rule(
        "step", "", way.can_step, way.step,
        "stores were prepared",
        "queued promotions are submitted, parked cascades looked at, a new step",
        "a key whose write was in flight is cascaded when it is ready, never when it failed",
        fair=OURS, answers="step",
    ),
    # ---- stores --------------------------------------------------------------------------
    Rule(
        "store", "request", way.can_store, way.store,
        "it runs, has not stored, and rows for all its new keys are free or idle and not of its "
        "own offer",
        "evict, give rows; tier 0 may want the rest cascaded or parked",
        "all or nothing; input and evicted never intersect; pinned is never evicted",
        needs="store", fair=AGAIN, answers="store",
    ),
    Rule(
        "no store", "request", way.can_refuse_store, way.refuse_store,
        "as store, but there are no such rows",
        "nothing is evicted; the next room is its own",
        "a failed eviction changes nothing; a running store is not starved by promotions",
        needs="store", fair=AGAIN, answers="no store",
    ),
    Rule(
        "written", "key", way.can_write, way.written,
        "workers copy into its row",
        "all writers have reported",
        "the bytes are final before they are sealed",
        fair=REPORT, answers="write",
    ),
    Rule(
        "write failed", "key", way.can_write, way.fail_write,
        "workers copy into its row",
        "the chunk goes, its row is free",
        "a failed write is never visible",
        needs="fail", fair=REPORT, answers="write",
    ),
    Rule(
        "sealed", "key", way.can_seal, way.sealed,
        "all writers have reported",
        "ready; a cascade to every tier",
        "ready only when sealed",
        fair=OURS, answers="seal",
    ),
    Rule(
        "seal refused", "key", way.can_seal, way.fail_write,
        "all writers have reported",
        "the chunk goes, its row is free",
        "what cannot be sealed is never visible",
        needs="fail", fair=OURS, answers="seal",
    ),
    # ---- cascades and promotions ---------------------------------------------------------
    Rule(
        "cascaded", "tier,key", way.can_report_cascade, way.cascaded,
        "the tier reads its row",
        "the tier has the object; unpin",
        "a pin lasts exactly as long as its reader",
        needs="cascade", fair=REPORT, answers="cascade",
    ),
    Rule(
        "cascade failed", "tier,key", way.can_report_cascade, way.end_cascade,
        "the tier reads its row",
        "unpin",
        "a tier's failure costs nothing but its copy",
        needs="fail", fair=REPORT, answers="cascade",
    ),
    Rule(
        "fetched", "key", up.can_fetch, up.fetched,
        "the tier fills its row and has the object",
        "the row has the object's bytes",
        "what a tier brings is not believed",
        needs="promote", fair=REPORT, answers="fetch",
    ),
    Rule(
        "fetch failed", "key", up.can_fail_fetch, up.fail_fetch,
        "the tier fills its row",
        "the chunk goes; whoever waited has a miss",
        "partial success: each key of a job has its own fate",
        needs="promote", fair=REPORT, answers="fetch",
    ),
    Rule(
        "proven", "key", up.can_prove, up.proven,
        "the row opens",
        "ready",
        "nothing a tier brought is ready before it is opened",
        needs="promote", fair=OURS, answers="prove",
    ),
    Rule(
        "refused", "key", up.can_refuse, up.refuse,
        "the row does not open",
        "the chunk goes, the object is quarantined",
        "damaged and revoked objects are refused and not offered again",
        needs="promote", fair=OURS, answers="prove",
    ),
    Rule(
        "vanish", "tier,key", up.can_vanish, up.vanish,
        "the tier has an object",
        "it is gone",
        "tiers promise nothing",
        needs="vanish",
    ),
    Rule(
        "damage", "tier,key", up.can_damage, up.damage,
        "the tier has a good object",
        "it is damaged",
        "tiers promise nothing",
        needs="damage",
    ),
    # ---- deadlines, reset, shutdown ------------------------------------------------------
    Rule(
        "overdue store", "key", end.can_overdue_store, end.overdue_store,
        "workers copy into its row for too long",
        "the chunk goes, its row is free",
        "a worker that carries another generation neither writes nor completes",
        needs="deadline", fair=OURS, answers="write",
    ),
    Rule(
        "overdue fetch", "key", end.can_overdue_fetch, end.overdue_fetch,
        "the tier fills its row for too long",
        "the chunk goes, its row is retired",
        "a row that a tier may still write into has no other use until the tier reports",
        needs="deadline", fair=OURS, answers="fetch",
    ),
    Rule(
        "overdue cascade", "tier,key", end.can_overdue_cascade, end.overdue_cascade,
        "the tier reads its row for too long",
        "unpin",
        "pins return to zero; what the tier read too late does not open",
        needs="deadline", fair=OURS, answers="cascade",
    ),
    Rule(
        "late write", "late", end.can_write_late, end.write_late,
        "a tier writes into a retired row",
        "the row has the object's bytes",
        "nothing can stop a tier's write",
        needs="late",
    ),
    Rule(
        "late report", "late", end.can_report_late, end.report_late,
        "a transfer that was given up reports",
        "a retired row is free; nothing becomes ready",
        "a late completion revives nothing and unpins nothing",
        needs="late", fair=REPORT, answers="late",
    ),
    Rule(
        "reset", "", end.can_reset, end.reset,
        "the door is open",
        "the epoch rises; every chunk is forgotten; running requests wait again",
        "an epoch once revoked is never served, from no tier",
        needs="reset",
    ),
    Rule(
        "shut down", "", end.can_shut_down, end.shut_down,
        "the door is open",
        "requests end; nobody new comes in",
        "what is under way goes on until it reports",
        needs="shutdown",
    ),
    Rule(
        "close", "", end.can_close, end.close,
        "shutting down, and nobody reads or writes a row",
        "the rows are given back",
        "rows go away last",
        needs="shutdown", fair=OURS, answers="close",
    ),
)
# fmt: on


def in_force(rules: tuple[Rule, ...], features: frozenset[str]) -> tuple[Rule, ...]:
    """The rows that a world with these features has; late transfers come with either cause."""
    late = {"late"} if features & {"deadline", "reset"} else set()
    have = features | late | {""}
    return tuple(rule for rule in rules if rule.needs in have)

# SPDX-License-Identifier: Apache-2.0
"""The machine of `kvsafe/lifecycle` behind the calls of a manager: what each has to answer.

Every call fires rows of the lifecycle's table: the guard must hold, the effect is the next
state. A request of the machine asks for one prefix and goes through it; a manager is asked for
one thing after the other, so each call first says which keys the request is at (`_at`).

The machine states what is sound. Where vLLM does otherwise, a name in `as_vllm` says so, and
`DIVERGENCES` says what that is; a test switches each of them off and has to see a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvsafe.lifecycle import promotions as up
from kvsafe.lifecycle import rows
from kvsafe.lifecycle import transfers as way
from kvsafe.lifecycle.policy import Policy
from kvsafe.lifecycle.requests import with_request
from kvsafe.lifecycle.table import RULES, Rule
from kvsafe.lifecycle.words import (
    BUILDING,
    LOADING,
    NONE,
    RUNNING,
    SCHEDULING,
    WAITING,
    WRITING,
    State,
)
from kvsafe.lifecycle.world import World

# What vLLM 0.32 does and the machine does not, and the finding that says more.
DIVERGENCES = {
    "evicts unread": "A1, A2: a promotion may evict what somebody was just told hit or pending",
    "waits again": "B: a key that went away while a request waited for it is promoted again",
    "no claims": "F23: promotions take the room that a refused store waits for",
    "parks on": "P: a parked key outlives its write and is parked for the next one",
    "sends again": "not a fault: a key on its way to a tier is sent to it again",
    "revokes nothing": "F07: after a reset, tiers serve what was stored before it",
}


def room_like_vllm(world: World, state: State, key: int) -> tuple[int, ...] | None:
    """Whom vLLM evicts for a promotion: anything idle, whoever waits for it."""
    return None if up.claimed(state) else rows.victims(world, state, 1, {key})


class OutOfLine(Exception):
    """A call that the machine has no rule for: the driver's fault, or a difference."""


class Stored(NamedTuple):
    """What `prepare_store` answers."""

    new: tuple[int, ...]
    evicted: tuple[int, ...]


class Note(NamedTuple):
    """An event: `keys` are now stored, or removed."""

    removed: bool
    keys: tuple[int, ...]


class Book:
    """One primary tier without other tiers, as the machine has it."""

    def __init__(
        self,
        policy: Policy,
        *,
        keys: int,
        rows: int,
        requests: int,
        tiers: int = 0,
        features: Collection[str] = (),
        as_vllm: Collection[str] = tuple(DIVERGENCES),
    ) -> None:
        wanted = frozenset({"store", "fail", "reset", *features})
        self.world = World("lockstep", "", policy, keys, rows, requests, tiers, ((),), wanted)
        # No bound on what a reset overtakes: that one is for walks through all states.
        self.world = self.world._replace(late_limit=1000)
        self.state: State = self.world.start()
        self.as_vllm = frozenset(as_vllm)
        self.notes: list[Note] = []
        # How often each key was given a row.
        self.given = [0] * keys
        # Per request: keys in the order in which the policy will hear of them.
        self.noticed: dict[int, list[int]] = {}
        self.sort: Callable[[int, Sequence[int]], list[int]] = lambda who, keys: list(keys)
        self.store_room: way.Room = way.store_room
        # Idle chunks that no eviction finds for the rest of the step (ours only).
        self.shielded: set[int] = set()
        self._rules: dict[str, Rule] = {rule.event: rule for rule in RULES}
        if "evicts unread" in self.as_vllm:
            self._rules |= {
                "promote": self._rules["promote"].changed(
                    guard=partial(up.can_promote, room=room_like_vllm),
                    effect=partial(up.promote, room=room_like_vllm),
                ),
                "no room": self._rules["no room"].changed(
                    guard=partial(up.can_find_no_room, room=room_like_vllm)
                ),
            }

    # The machine

    def holds(self, event: str, *who: int) -> bool:
        """Whether the guard of `event` holds."""
        return self._rules[event].guard(self.world, self.state, *who)

    def fire(self, event: str, *who: int) -> None:
        """The event happens."""
        if not self.holds(event, *who):
            raise OutOfLine(f"{event}{who} may not happen")
        before = self.state.chunks
        self.state = self._rules[event].effect(self.world, self.state, *who)
        for key, (old, new) in enumerate(zip(before, self.state.chunks, strict=True)):
            self.given[key] += old is None and new is not None
        self._forget_promises()

    def _at(self, who: int, half: int, **fields: Any) -> None:
        self.state = with_request(self.state._replace(half=half), who, **fields)
        self._forget_promises()

    def _rest(self, who: int) -> None:
        fields: dict[str, Any] = {"position": 0, "waits": False, "scanned": False}
        self.state = with_request(self.state._replace(half=SCHEDULING), who, **fields)
        self._forget_promises()

    def _forget_promises(self) -> None:
        """Drop what vLLM does not know."""
        gone: dict[str, Any] = {}
        if "waits again" in self.as_vllm:
            gone["spent"] = NONE
        if "no claims" in self.as_vllm:
            gone["claims"] = False
        if gone:
            requests = tuple(request._replace(**gone) for request in self.state.requests)
            self.state = self.state._replace(requests=requests)

    def _notice(self, who: int, keys: Iterable[int]) -> None:
        seen = self.state.requests[who].access.seen
        known = self.noticed.setdefault(who, [])
        known.extend(key for key in keys if key in seen and key not in known)

    # What anybody may ask

    def resident(self) -> dict[int, int]:
        """Refcounts of all keys that are there."""
        chunks = enumerate(self.state.chunks)
        return {key: chunk.refcount for key, chunk in chunks if chunk is not None}

    def offered(self) -> list[int]:
        """Keys that a lookup may promise."""
        return [key for key in range(self.world.keys) if rows.offered(self.state, key)]

    def running(self, who: int) -> bool:
        """Whether the slot is used by a request that has not ended."""
        return self.state.requests[who].phase in (WAITING, LOADING, RUNNING)

    # Calls

    def arrive(self, who: int) -> None:
        """`on_new_request`."""
        self.fire("arrive", who, 0)
        self.noticed[who] = []

    def lookup(self, who: int, key: int) -> str:
        """`lookup`: the name of the result."""
        self._at(who, SCHEDULING, keys=(key,), phase=WAITING, **_FRESH)
        found = next(found for found in self._answers() if self.holds(found[0], who, *found[1]))
        self.fire(found[0], who, *found[1])
        self._notice(who, (key,))
        self._rest(who)
        return found[2]

    def _answers(self) -> Iterable[tuple[str, tuple[int, ...], str]]:
        yield "hit", (), "HIT"
        yield "pend", (), "HIT_PENDING"
        yield "miss", (), "MISS"

    def prepare_store(self, who: int, keys: Sequence[int]) -> Stored | None:
        """`prepare_store`."""
        self._at(who, BUILDING, keys=tuple(keys), phase=RUNNING, stored=False, claims=False)
        new = way.wanted(self.state, who)
        learned = way.learn_misses(self.world, self.state, who, new)
        evicted = self.store_room(self.world, learned, who)
        self.fire("no store" if evicted is None else "store", who)
        self._notice(who, keys)
        self._rest(who)
        if evicted is None:
            return None
        if evicted:
            self.notes.append(Note(True, evicted))
        return Stored(new, evicted)

    def complete_store(self, who: int, keys: Collection[int], success: bool = True) -> None:
        """`complete_store`: all of it, or nothing."""
        for key in keys:
            for event in ("written", "sealed") if success else ("write failed",):
                self.fire(event, key)
        if success and keys:
            self.notes.append(Note(False, tuple(keys)))

    def prepare_load(self, who: int, keys: Sequence[int]) -> None:
        """`prepare_load`."""
        self._at(who, SCHEDULING, keys=tuple(keys), phase=WAITING, **_FRESH)
        self.state = with_request(self.state, who, position=len(keys), scanned=True)
        if any(not rows.offered(self.state, key) for key in keys):
            raise OutOfLine("a load of what is not offered")
        self.fire("load", who)
        self._notice(who, keys)
        self._rest(who)

    def complete_load(self, who: int) -> None:
        """`complete_load` for all keys of the request's load."""
        self.fire("loaded", who)
        self.leave(who)

    def finish(self, who: int) -> None:
        """`on_request_finished`."""
        ordered = tuple(self.sort(who, self.noticed[who]))
        self._at(who, SCHEDULING, keys=ordered, phase=RUNNING)
        self.fire("finish", who)
        self.noticed[who] = []
        self.leave(who)

    def leave(self, who: int) -> None:
        """The slot is free as soon as nothing of the request is under way."""
        if self.holds("finalise", who):
            self.fire("finalise", who)

    def reset(self) -> None:
        """`reset_cache`: what is under way is fenced or drained by whoever calls."""
        self.fire("reset")
        self.state = self.state._replace(late=())
        for who in self.order():
            self.noticed[who] = []
            if self.holds("recall", who):
                self.fire("recall", who)
            self.leave(who)

    def order(self) -> list[int]:
        """Slots in the order in which a manager goes through its requests."""
        return list(range(self.world.requests))

    def pending(self, who: int | None = None) -> list[int]:
        """Keys whose store is under way, of one request or of all."""
        return [
            key
            for key, chunk in enumerate(self.state.chunks)
            if chunk is not None and chunk.stage == WRITING and who in (None, chunk.by)
        ]

    def take_notes(self) -> list[Note]:
        """`take_events`."""
        notes, self.notes = self.notes, []
        return notes


_FRESH: dict[str, Any] = {"position": 0, "waits": False, "scanned": False}

# SPDX-License-Identifier: Apache-2.0
"""vLLM's `CPUOffloadingManager` and the machine, driven in lockstep."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, TypeVar

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvsafe.lifecycle.arc import Arc
from kvsafe.lifecycle.lru import Lru
from kvsafe.lifecycle.policy import Policy
from tests.lockstep.book import Book, Stored
from tests.lockstep.compare import Names, PrimaryEye, differ
from tests.lockstep.runs import Dice, Drive, Make

B = TypeVar("B", bound=Book)
KEYS, ROWS, SLOTS = 9, 4, 3
POLICIES: dict[str, Policy] = {"lru": Lru(), "arc": Arc()}
POSITIONS = ("all", "first", "none")


class Primary(Drive):
    """Requests store, load and end on one primary tier; the engine's order of calls is kept."""

    weights: ClassVar[dict[str, int]] = {
        "arrive": 3,
        "lookup": 2,
        "prepare_store": 5,
        "complete_store": 5,
        "prepare_load": 3,
        "complete_load": 3,
        "finish": 3,
        "reset": 1,
        "take_events": 1,
        "gauges": 1,
    }

    def __init__(self, dice: Dice, policy: str, manager: type[Any] = CPUOffloadingManager) -> None:
        self.book = self._new_book(Book, policy)
        self.real: Any = manager(ROWS, cache_policy=policy, enable_events=True)
        self.names = Names(KEYS, dice.number(1, 2))
        self.eye = PrimaryEye(self.real, self.book, self.names)
        self.contexts: dict[int, ReqContext] = {}
        self.positions: dict[int, str] = {}
        self.stores: list[tuple[int, list[int]]] = []
        self.arrived = 0

    def _new_book(self, kind: type[B], policy: str, **parts: Any) -> B:
        book = kind(POLICIES[policy], keys=KEYS, rows=ROWS, requests=SLOTS, **parts)
        book.sort = lambda who, keys: self.names.sort(keys, self.positions[who])
        return book

    def look(self) -> None:
        """All that can be compared is the same."""
        self.eye.look()

    def arrive(self, dice: Dice) -> None:
        """A request comes, if a slot is free."""
        free = [who for who in range(SLOTS) if self.book.holds("arrive", who, 0)]
        if not free:
            return
        who, positions = dice.pick(free), dice.pick(POSITIONS)
        self.arrived += 1
        self.positions[who] = positions
        self.contexts[who] = self.names.context(f"r{self.arrived}", positions)
        self.real.on_new_request(self.contexts[who])
        self.book.arrive(who)

    def _somebody(self, dice: Dice) -> int | None:
        idle = [who for who in range(SLOTS) if self._idle(who)]
        return dice.pick(idle) if idle else None

    def _idle(self, who: int) -> bool:
        return self.book.running(who) and not self.book.state.requests[who].loading

    def lookup(self, dice: Dice) -> None:
        """One lookup."""
        who, key = self._somebody(dice), dice.number(0, KEYS - 1)
        if who is not None:
            real = self.real.lookup(self.names.keys[key], self.contexts[who])
            differ("lookup", self.book.lookup(who, key), real.name)

    def prepare_store(self, dice: Dice) -> None:
        """An offer; what is new of it gets rows, all of it or nothing."""
        who, keys = self._somebody(dice), dice.few(range(KEYS), ROWS)
        if who is None:
            return
        output = self.real.prepare_store(self.names.real(keys), self.contexts[who])
        told = None
        if output is not None:
            new = self.names.numbers(output.keys_to_store)
            told = Stored(new, self.names.numbers(output.evicted_keys))
            differ("rows given", len(new), len(output.store_spec.chunk_ids))
        differ("prepare_store", self.book.prepare_store(who, keys), told)
        if told is not None and told.new:
            self.stores.append((who, list(told.new)))

    def complete_store(self, dice: Dice) -> None:
        """A store ends, or a part of it."""
        if not self.stores:
            return
        who, keys = self.stores.pop(dice.number(0, len(self.stores) - 1))
        part, success = dice.number(1, len(keys)), not dice.rarely(4)
        if keys[part:]:
            self.stores.append((who, keys[part:]))
        self.real.complete_store(self.names.real(keys[:part]), self.contexts[who], success)
        self.book.complete_store(who, keys[:part], success)

    def prepare_load(self, dice: Dice) -> None:
        """A load of what is offered."""
        who, offered = self._somebody(dice), self.book.offered()
        if who is None or not offered:
            return
        self._begin_load(who, dice.few(offered, ROWS))

    def _begin_load(self, who: int, keys: list[int]) -> None:
        spec = self.real.prepare_load(self.names.real(keys), self.contexts[who])
        held = self.eye.chunks()
        differ("rows", [held[key].chunk_id for key in keys], [int(row) for row in spec.chunk_ids])
        self.book.prepare_load(who, keys)

    def complete_load(self, dice: Dice) -> None:
        """The load of a request ends, also after the request."""
        loading = [who for who in range(SLOTS) if self.book.state.requests[who].loading]
        if loading:
            who = dice.pick(loading)
            keys = sorted(self.book.state.requests[who].loading)
            self.real.complete_load(self.names.real(keys), self.contexts[who])
            self.book.complete_load(who)

    def finish(self, dice: Dice) -> None:
        """A request ends."""
        running = [who for who in range(SLOTS) if self.book.running(who)]
        if running:
            who = dice.pick(running)
            self.real.on_request_finished(self.contexts[who])
            self.book.finish(who)

    def reset(self, dice: Dice) -> None:
        """Everything is forgotten; transfers under way are never completed."""
        if dice.rarely(4):
            self.real.reset_cache()
            self.book.reset()
            self.stores.clear()

    def take_events(self, dice: Dice) -> None:
        """Events so far."""
        self.eye.look_at_events(self.real)

    def gauges(self, dice: Dice) -> None:
        """Usage."""
        self.eye.look_at_gauges()


def primary(policy: str, manager: type[Any] = CPUOffloadingManager) -> Make:
    """How to begin such a world."""
    return partial(Primary, policy=policy, manager=manager)

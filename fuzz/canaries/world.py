# SPDX-License-Identifier: Apache-2.0
"""Seeded faults in the engine's half, found by the lifecycle as one world."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fuzz.canaries import Canary
from fuzz.patching import Patch
from fuzz.target import Target

Fault = Callable[[Patch, Target], None]


def _primary(name: str, change: Callable[[Any], Any]) -> Fault:
    """Another method in the primary tier. The engine is imported only when it is needed."""

    def fault(patch: Patch, target: Target) -> None:
        from kvsafe.engine.rows.primary import SealedPrimaryTier

        patch.set(SealedPrimaryTier, name, change(getattr(SealedPrimaryTier, name)))

    return fault


def _pins_stay(right: Any) -> Any:
    calls = [0]

    def complete_load(self: Any, keys: Any, req_context: Any) -> None:
        calls[0] += 1
        if calls[0] % 3:
            right(self, keys, req_context)

    return complete_load


def _pins_go_twice(right: Any) -> Any:
    calls = [0]

    def complete_load(self: Any, keys: Any, req_context: Any) -> None:
        right(self, keys, req_context)
        calls[0] += 1
        for chunk in map(self._policy.get, keys):
            if calls[0] % 3 == 0 and chunk is not None and chunk.ref_cnt > 0:
                chunk.ref_cnt -= 1

    return complete_load


def _pending_is_a_hit(right: Any) -> Any:
    def lookup(self: Any, key: Any, req_context: Any) -> Any:
        answer = right(self, key, req_context)
        hit = type(answer).HIT
        return answer if answer is type(answer).MISS or not self._policy.get(key) else hit

    return lookup


def _failed_stores_stay(right: Any) -> Any:
    def complete_store(self: Any, keys: Any, req_context: Any, success: bool = True) -> None:
        if success:
            right(self, keys, req_context, success)

    return complete_store


def _turned_round(patch: Patch, target: Target) -> None:
    """Every chunk of a load or store gets its blocks from the other end."""
    from kvsafe.engine.rows import placer

    right: Any = vars(placer)["place_run"]

    def place_run(flat: Any, per_chunk: int) -> Any:
        return [
            (group, tuple((slot, at[-1 - n][1]) for n, (slot, _) in enumerate(at)))
            for group, at in right(flat, per_chunk)
        ]

    patch.set(placer, "place_run", place_run)


def _elsewhere(module: str, owner: str, name: str, instead: Callable[..., Any]) -> Fault:
    """Another attribute of a class, or of the module itself where `owner` is empty."""

    def fault(patch: Patch, target: Target) -> None:
        place = importlib.import_module(f"kvsafe.{module}")
        patch.set(getattr(place, owner) if owner else place, name, instead)

    return fault


def _told(name: str, change: Callable[[list[Any]], list[Any]]) -> Fault:
    """Other KV events from one call of the primary tier."""

    def changed(right: Any) -> Any:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            events = self.events if self.events is not None else []
            before = len(events)
            answer = right(self, *args, **options)
            events[before:] = change(events[before:])
            return answer

        return method

    return _primary(name, changed)


def _given_away(patch: Patch, target: Target) -> None:
    """A reset gives away rows that workers still read, and no worker looks what it reads.

    The three guards stand one behind another (`tests/world/test_guards.py`): each alone is enough.
    """
    from kvsafe.engine.rows.proof import RowProof
    from kvsafe.engine.rows.retired import TransferRows

    patch.set(TransferRows, "retire", lambda self, _: self._running.clear())
    patch.set(RowProof, "fence", lambda *_: None)
    patch.set(RowProof, "before_load", lambda *_: None)


CANARIES = (
    Canary("pins are forgotten", "lifecycle", "every third load keeps its pin", 20,
           _primary("complete_load", _pins_stay)),
    Canary("pins go twice", "lifecycle", "every third load takes the pin of another", 20,
           _primary("complete_load", _pins_go_twice)),
    Canary("what is on its way is a hit", "lifecycle", "a chunk is read before it is sealed", 20,
           _primary("lookup", _pending_is_a_hit)),
    Canary("blocks are turned round", "lifecycle", "slots and blocks of a chunk do not match", 20,
           _turned_round),
    Canary("failed stores are not ended", "lifecycle", "a row stays pending for ever", 40,
           _primary("complete_store", _failed_stores_stay)),
    Canary("damage is loaded", "lifecycle", "payload tags are not looked at", 200,
           _elsewhere("seal.opening", "Opener", "open_slice", lambda *_: None)),
    Canary("waiting never ends", "lifecycle", "a request asks a tier for ever", 200,
           _elsewhere("engine.requests.waits", "Waits", "tires", lambda *_: False)),
    Canary("a reset is not noted", "lifecycle", "what was under way before it counts", 200,
           _elsewhere("engine.rows.epochs", "EpochKeeper", "raise_epoch", lambda *_: True)),
    Canary("rows are given away", "lifecycle", "what a load reads is given to another", 400,
           _given_away),
    Canary("evictions are not told", "lifecycle", "listeners believe what is gone", 200,
           _told("prepare_store", lambda events: [one for one in events if not one.removed])),
    Canary("stores are not told", "lifecycle", "listeners do not hear of a chunk", 200,
           _told("complete_store", lambda _: [])),
    Canary("stores are told twice", "lifecycle", "a listener that counts is one off", 200,
           _told("complete_store", lambda events: events * 2)),
    Canary("withdrawals are not told", "lifecycle", "listeners believe what was refused", 400,
           _told("withdraw", lambda _: [])),
)  # fmt: skip

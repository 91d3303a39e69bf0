# SPDX-License-Identifier: Apache-2.0
"""Seeded faults in the engine's half, found by the lifecycle as one world."""

from __future__ import annotations

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


CANARIES = (
    Canary("pins are forgotten", "lifecycle", "every third load keeps its pin", 60,
           _primary("complete_load", _pins_stay)),
    Canary("pins go twice", "lifecycle", "every third load takes the pin of another", 60,
           _primary("complete_load", _pins_go_twice)),
    Canary("what is on its way is a hit", "lifecycle", "a chunk is read before it is sealed", 60,
           _primary("lookup", _pending_is_a_hit)),
    Canary("blocks are turned round", "lifecycle", "slots and blocks of a chunk do not match", 120,
           _turned_round),
    Canary("failed stores are not ended", "lifecycle", "a row stays pending for ever", 400,
           _primary("complete_store", _failed_stores_stay)),
)  # fmt: skip

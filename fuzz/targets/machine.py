# SPDX-License-Identifier: Apache-2.0
"""Random walks over the lifecycle's machine, in worlds too large to be walked whole."""

from __future__ import annotations

from collections.abc import Sequence

from fuzz.target import ByteSource, Finding, Target, demand
from kvsafe.lifecycle.explorer import Move, moves_of
from kvsafe.lifecycle.rows import MachineError
from kvsafe.lifecycle.safety import SAFETY, Seen
from kvsafe.lifecycle.table import RULES, Rule
from kvsafe.lifecycle.words import State
from kvsafe.lifecycle.world import FEATURES, World
from kvsafe.lifecycle.worlds import ARC, LRU

_ALL = frozenset(FEATURES)
_PREFIXES = ((0, 1, 2), (0, 1, 3), (4, 0), (3, 4, 5))
_UPHEAVALS = ("reset", "shut down", "close", "vanish", "abort", "preempt", "damage")
_CALM = 200
STEPS = 120


def _world(name: str, rows: int, tiers: int, arc: bool, features: frozenset[str]) -> World:
    seeded = frozenset((tier, key) for tier in range(tiers) for key in range(tier, 6, 2))
    return World(
        name, "a walk by chance", ARC if arc else LRU, 6, rows, 4, tiers, _PREFIXES, features,
        seeded=seeded, symmetric=False,
    )  # fmt: skip


WORLDS = (
    _world("everything, LRU", 3, 2, False, _ALL),
    _world("everything, ARC", 3, 2, True, _ALL),
    _world("wide", 5, 1, False, _ALL - {"shutdown"}),
    _world("no tiers", 2, 0, True, _ALL - {"shutdown", "reset"}),
)


class Machine(Target):
    """The pure lifecycle: one rule after another, every law after every move."""

    name = "machine"
    max_len = 2 * STEPS + 1
    memory_mib = 64
    rules: Sequence[Rule] = RULES

    def __init__(self) -> None:
        self._moves = tuple(self._by_event(moves_of(world, self.rules)) for world in WORLDS)

    @staticmethod
    def _by_event(moves: Sequence[Move]) -> tuple[tuple[Move, ...], ...]:
        """Moves by rule, so that a rule about many things is not drawn more often."""
        events = dict.fromkeys(move.rule.event for move in moves)
        return tuple(tuple(m for m in moves if m.rule.event == event) for event in events)

    def use(self, rules: Sequence[Rule]) -> None:
        """Walk by another table."""
        self._moves = tuple(self._by_event(moves_of(world, rules)) for world in WORLDS)

    def once(self, data: bytes) -> None:
        source = ByteSource(data)
        number = source.below(len(WORLDS))
        world, events = WORLDS[number], self._moves[number]
        state = world.start()
        for _ in range(STEPS):
            if not source.left:
                return
            move = self._next(source, world, events, state)
            if move is None:
                return
            state = self._step(world, state, move)

    @staticmethod
    def _next(
        source: ByteSource, world: World, events: Sequence[Sequence[Move]], state: State
    ) -> Move | None:
        """The first enabled move from a drawn place on; upheavals only where they are drawn."""
        first, which = source.below(len(events)), source.below(256)
        # A stride, so that no event lives from standing behind one that is seldom enabled.
        stride = next(step for step in (7, 11, 13) if len(events) % step)
        for step in range(len(events)):
            moves = events[(first + step * stride) % len(events)]
            if which < _CALM and moves[0].rule.event in _UPHEAVALS:
                continue
            enabled = [one for one in moves if one.rule.guard(world, state, *one.who)]
            if enabled:
                return enabled[which % len(enabled)]
        return None

    @staticmethod
    def _step(world: World, state: State, move: Move) -> State:
        try:
            after = move.rule.effect(world, state, *move.who)
        except MachineError as error:
            raise Finding("wrong", f"'{move.rule.event}' cannot be applied") from error
        seen = Seen(world, state, move.rule.event, move.who, after)
        for law in SAFETY:
            demand(law.check(seen) is None, f"law broken: {law.name}")
        return after

    def seeds(self) -> list[bytes]:
        walk = bytes(range(0, 240)) + bytes(range(0, 80))
        return [bytes([number]) + walk for number in range(len(WORLDS))]

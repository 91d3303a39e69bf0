# SPDX-License-Identifier: Apache-2.0
"""Moves and states in words, for those who have to understand a violation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvsafe.lifecycle.explorer import Move
from kvsafe.lifecycle.words import (
    AWAY,
    LATE,
    OBJECTS,
    PHASES,
    READY,
    SCHEDULING,
    STAGES,
    Chunk,
    Request,
    State,
)
from kvsafe.lifecycle.world import World


def move_in_words(world: World, move: Move) -> str:
    """For example `promote (request 0, tier 1)`."""
    names = [name for name in move.rule.over.split(",") if name]
    parts = [_part(world, name, number) for name, number in zip(names, move.who, strict=True)]
    return f"{move.rule.event} ({', '.join(parts)})" if parts else move.rule.event


def _part(world: World, name: str, number: int) -> str:
    if name == "prefix":
        return "keys " + " ".join(str(key) for key in world.prefixes[number])
    return f"{name} {number}"


def state_in_words(state: State) -> str:
    """What is resident, who is there, what is under way; one line."""
    parts = [_chunk(key, chunk) for key, chunk in enumerate(state.chunks) if chunk is not None]
    parts += [
        _request(who, request)
        for who, request in enumerate(state.requests)
        if request.phase != AWAY
    ]
    for tier, line in enumerate(state.objects):
        held = [f"{key} {OBJECTS[value]}" for key, value in enumerate(line) if value]
        if held:
            parts.append(f"tier {tier} has {', '.join(held)}")
    parts += [f"tier {tier} reads key {key}" for tier, key in state.cascades]
    parts += [f"{LATE[late.kind]} of key {late.key} in row {late.row}" for late in state.late]
    parts.append("requests are scheduled" if state.half == SCHEDULING else "stores are prepared")
    return "; ".join(parts)


def _chunk(key: int, chunk: Chunk) -> str:
    count = f" with {chunk.pins} pins" if chunk.stage == READY else ""
    hidden = ", withdrawn" if chunk.withdrawn else ""
    return f"key {key} in row {chunk.row} {STAGES[chunk.stage]}{count}{hidden}"


def _request(who: int, request: Request) -> str:
    keys = " ".join(str(key) for key in request.keys)
    marks = [
        name
        for name, is_so in (
            ("has to come back", request.waits),
            ("stored", request.stored),
            ("claims room", request.claims),
        )
        if is_so
    ]
    marks += [
        f"{name} {' '.join(map(str, sorted(part)))}"
        for name, part in (
            ("loads", request.loading),
            ("awaits", request.awaits),
            ("no more waits for", request.spent),
            ("parked", request.parked),
        )
        if part
    ]
    extra = f" ({', '.join(marks)})" if marks else ""
    return f"request {who} for {keys} {PHASES[request.phase]}{extra}"


def story(world: World, moves: Sequence[Move], states: Sequence[State]) -> Iterator[str]:
    """A trace, one line per move, with the state after it."""
    for number, (move, state) in enumerate(zip(moves, states[1:], strict=True), 1):
        yield f"{number:3}  {move_in_words(world, move):<34} {state_in_words(state)}"

# SPDX-License-Identifier: Apache-2.0
"""What must happen in the end. A property is broken by a run that is fair and stays bad for ever.

Properties speak of request 0 and key 0; the worlds in which they are checked give everybody
every role, so that nobody is special, and are not reduced by symmetry, which would mix them up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from kvsafe.lifecycle.words import (
    AWAY,
    CLOSING,
    ENDED,
    READY,
    RUNNING,
    WAITING,
    State,
)

Bad = Callable[[State], bool]


class Liveness(NamedTuple):
    """One property: broken by a fair cycle on which `bad` holds throughout.

    Events in `never` do not occur on the cycle; one of those in `often`, if there are any, does.
    What answers `spared` does not have to happen. In worlds with the feature `unless` nothing
    is claimed.
    """

    name: str
    says: str
    bad: Bad
    never: frozenset[str] = frozenset()
    often: frozenset[str] = frozenset()
    spared: frozenset[str] = frozenset()
    unless: str = ""


def waits(state: State) -> bool:
    """Request 0 waits."""
    return state.requests[0].phase == WAITING


def writes(state: State) -> bool:
    """A write of key 0 is under way."""
    chunk = state.chunks[0]
    return chunk is not None and chunk.stage != READY


def loads(state: State) -> bool:
    """Request 0 loads, or has to be told that its load counts for nothing."""
    request = state.requests[0]
    return bool(request.loading)


def cascades(state: State) -> bool:
    """Tier 0 reads the row of key 0."""
    return (0, 0) in state.cascades


def starves(state: State) -> bool:
    """Request 0 runs and its store found no room."""
    request = state.requests[0]
    return request.phase == RUNNING and not request.stored and request.claims


def ends(state: State) -> bool:
    """Request 0 has ended and tiers have not been told so."""
    return state.requests[0].phase == ENDED


def pinned(state: State) -> bool:
    """Some chunk is pinned."""
    return any(chunk is not None and chunk.pins > 0 for chunk in state.chunks)


def busy(state: State) -> bool:
    """Some request is there, or something is being written."""
    return any(request.phase != AWAY for request in state.requests) or state.counts.pending > 0


def parked(state: State) -> bool:
    """Request 0 waits to cascade a key."""
    return bool(state.requests[0].parked)


def asks(state: State) -> bool:
    """Request 0 waits for a tier's answer."""
    return any(probe[2] == 2 for probe in state.requests[0].probes)


def closing(state: State) -> bool:
    """The connector is shutting down."""
    return state.door == CLOSING


def retired(state: State) -> bool:
    """Some row or transfer is overtaken and has not reported."""
    return bool(state.late)


_NEW = frozenset({"arrive", "preempt", "reset"})
_RESET = frozenset({"reset"})
_LONG = frozenset({"finish"})

LIVENESS: Final[tuple[Liveness, ...]] = (
    Liveness(
        "every pending hit resolves", "a request that waits is admitted in the end", waits, _RESET
    ),
    Liveness("every retry resolves", "a tier's answer comes, or counts as a no", asks),
    Liveness("every write resolves", "what is being written is ready or gone in the end", writes),
    Liveness("every load ends", "a load is reported in the end", loads),
    Liveness("every cascade ends", "a tier lets go of a row in the end", cascades),
    Liveness(
        "no store is starved by promotions",
        "while a store waits for room, promotions do not go on for ever",
        starves, often=frozenset({"promote"}), spared=_LONG,
    ),
    Liveness("every parked key resolves", "it is cascaded or forgotten in the end", parked),
    Liveness("every request is finalised", "tiers hear of its end in the end", ends),
    Liveness("pins return to zero", "when nobody new comes, nothing stays pinned", pinned, _NEW),
    Liveness("a drained system is idle", "when nobody new comes, all comes to rest", busy, _NEW),
    Liveness(
        "retired rows come back", "what was overtaken reports in the end", retired, _NEW,
        unless="deadline",
    ),
    Liveness("shutdown ends", "rows are given back in the end", closing),
)  # fmt: skip

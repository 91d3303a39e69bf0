# SPDX-License-Identifier: Apache-2.0
"""The words of the lifecycle: what a state is made of. All values are immutable and hashable.

Keys, rows, requests and tiers are small numbers. Times are absent: a deadline may pass at any
moment, a transfer may report at any moment. Byte contents are reduced to what a reader could
tell from them: whose chunk it is, and whether it is of the present epoch.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

from kvsafe.lifecycle.policy import Order

T = TypeVar("T")

# A chunk's stages. Refcount is -1 in all of them but READY.
WRITING: Final = 0  # workers copy from the accelerator into the row
SEALING: Final = 1  # all writers have reported; the header is being closed
QUEUED: Final = 2  # a row was given for a promotion; the tier has not been asked yet
FETCHING: Final = 3  # the tier fills the row
PROVING: Final = 4  # the row is being opened
READY: Final = 5  # may be read; refcount 0 is evictable, above 0 is pinned
STAGES: Final = ("writing", "sealing", "queued", "fetching", "proving", "ready")

# A request's phases.
AWAY: Final = 0  # nobody uses this request slot
WAITING: Final = 1  # looks its keys up, step after step
LOADING: Final = 2  # a load was issued
RUNNING: Final = 3  # computes; may store
RECALLED: Final = 4  # a reset overtook its load; the worker has still to report
ENDED: Final = 5  # finished or aborted; some of its transfers may be under way
PHASES: Final = ("away", "waiting", "loading", "running", "recalled", "ended")

# What a tier has under a key's object name.
ABSENT: Final = 0
GOOD: Final = 1
OLD: Final = 2  # sealed in an epoch that was revoked
DAMAGED: Final = 3  # anything that does not open
OBJECTS: Final = ("absent", "good", "old", "damaged")

# Transfers that nobody waits for any more.
LATE_STORE: Final = 0  # a worker's write; its generation is over
LATE_FETCH: Final = 1  # a tier's write; its row is retired until it reports
LATE_CASCADE: Final = 2  # a tier's read; its object may be anything
LATE: Final = ("late store", "late fetch", "late cascade")

# The two halves of a step, and the end of everything.
SCHEDULING: Final = 0  # requests are looked up and admitted
BUILDING: Final = 1  # stores are prepared, promotions submitted
OPEN: Final = 0
CLOSING: Final = 1
CLOSED: Final = 2

NOBODY: Final = -1
NONE: Final[frozenset[int]] = frozenset()


class Chunk(NamedTuple):
    """One chunk of the primary tier: its row, stage, pins, and whose work it is."""

    row: int
    stage: int
    pins: int = 0
    withdrawn: bool = False
    by: int = NOBODY
    tier: int = NOBODY

    @property
    def refcount(self) -> int:
        """-1 not ready, 0 evictable, above 0 the number of readers."""
        return self.pins if self.stage == READY else -1


class Content(NamedTuple):
    """What the bytes of a row are: a whole chunk of `key`, of the present epoch or not."""

    key: int
    fresh: bool


class Access(NamedTuple):
    """What a request has done to keys, for the policy; told to it when the request ends."""

    seen: frozenset[int] = NONE
    inserted: frozenset[int] = NONE
    reused: frozenset[int] = NONE
    missed: frozenset[int] = NONE


class Request(NamedTuple):
    """One request slot.

    `keys` is the prefix asked for; `position` counts the keys told hit or pending in this step,
    `waits` says that one of them is pending, `scanned` that this step's lookups are over.
    `awaits`: told hit or pending and not read yet. `spent`: waited for and gone; no second wait.
    `claims`: its store found no room, the next row is its own. `tainted`: its KV was computed
    before a reset (never true in the sound machine).
    """

    phase: int = AWAY
    keys: tuple[int, ...] = ()
    position: int = 0
    waits: bool = False
    scanned: bool = False
    stored: bool = False
    claims: bool = False
    tainted: bool = False
    awaits: frozenset[int] = NONE
    spent: frozenset[int] = NONE
    loading: frozenset[int] = NONE
    parked: frozenset[int] = NONE
    probes: frozenset[tuple[int, int, int]] = frozenset()
    hooked: frozenset[int] = NONE
    access: Access = Access()


class Late(NamedTuple):
    """A transfer that was given up or overtaken by a reset and has not reported yet."""

    kind: int
    key: int
    row: int
    tier: int = NOBODY


class Counts(NamedTuple):
    """The counters that the primary tier keeps instead of recounting."""

    evictable: int = 0
    pending: int = 0


class State(NamedTuple):
    """The whole world at one moment."""

    chunks: tuple[Chunk | None, ...]
    free: tuple[int, ...]
    contents: tuple[Content | None, ...]
    order: Order
    counts: Counts
    requests: tuple[Request, ...]
    objects: tuple[tuple[int, ...], ...]
    cascades: tuple[tuple[int, int], ...] = ()
    late: tuple[Late, ...] = ()
    half: int = SCHEDULING
    door: int = OPEN


def put(whole: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    """`whole` with `value` at `place`."""
    return (*whole[:place], value, *whole[place + 1 :])

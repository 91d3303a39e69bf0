# SPDX-License-Identifier: Apache-2.0
"""The machine beside a real primary tier: does what it does follow the rules?

For each chunk the monitor keeps its row, stage and pins, and takes the steps that the machine
would take. `_steps` finds out, by running the machine's own functions on a world of one key,
which step is allowed in which stage and what it changes; at run time a step is one look into
that table. It watches what the safety laws speak of: rows, refcounts, readiness, evictions,
counters. The order in which a policy evicts is no matter of safety and is left to tests.

Not thread-safe: one scheduler thread tells it everything.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvsafe.lifecycle import rows
from kvsafe.lifecycle.lru import Lru
from kvsafe.lifecycle.words import READY, SEALING, WRITING, Chunk, Counts, State
from kvsafe.lifecycle.world import World

# What a chunk is to the monitor: the machine's stages, without whose work it is.
PENDING: Final = 0
PROVEN: Final = 1
OFFERED: Final = 2
HIDDEN: Final = 3
_GONE: Final = -1
_MANY: Final = 2
_STAGES: Final = {PENDING: WRITING, PROVEN: SEALING, OFFERED: READY, HIDDEN: READY}
_MOST: Final = 64

HIT: Final = "hit"
WAIT: Final = "pending"
MISS: Final = "miss"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The real tier did what the machine does not: which law, and both sides in words."""

    law: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.law}: the machine says {self.expected}, the tier did {self.found}"


class _Step(NamedTuple):
    """What a step makes of a chunk: its next stage (or gone), and the change of its pins."""

    stage: int
    pins: int


_Table = tuple[tuple[_Step | None, ...], ...]


class Steps(NamedTuple):
    """For each step a table [stage][pins, at most 2] of what follows, None where it may not be."""

    pin: _Table
    unpin: _Table
    ready: _Table
    evict: _Table
    fail: _Table
    withdraw: _Table
    answers: tuple[str, ...]


class _Entry:
    __slots__ = ("epoch", "pins", "row", "stage")

    def __init__(self, row: int, epoch: int) -> None:
        self.row = row
        self.epoch = epoch
        self.stage = PENDING
        self.pins = 0

    def ends(self) -> bool:
        """Withdrawn and read by nobody: the machine removes it with its last unpin."""
        return self.stage == HIDDEN and self.pins == 0


class Monitor:
    """One primary tier under watch. Keys are anything hashable, rows are 0 to `num_rows` - 1."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._entries: dict[Hashable, _Entry] = {}
        self._owner: list[Hashable | None] = [None] * num_rows
        self._offer: frozenset[Hashable] = frozenset()
        self._failing: frozenset[Hashable] = frozenset()
        self._freed = 0
        self._evictable = 0
        self._pending = 0
        self._blind = False
        self.divergences = 0
        self.found: list[Divergence] = []

    def take_found(self) -> list[Divergence]:
        """Divergences since the last call, at most 64 of them; `divergences` counts all."""
        found, self.found = self.found, []
        return found

    # Offers: rows are freed and given

    def begin_offer(self, keys: Iterable[Hashable]) -> None:
        """A store or promotion of these keys asks for rows; they may not be evicted for it."""
        self._offer = frozenset(keys)
        self._freed = 0

    def end_offer(self, given: bool) -> None:
        """The offer is over; without rows nothing may have been evicted for it."""
        self._offer = frozenset()
        if not given and self._freed:
            self._diverge("a failed eviction changes nothing", "no chunk gone", str(self._freed))

    def begin_failure(self, keys: Iterable[Hashable]) -> None:
        """These writes have failed: their rows come back next."""
        self._failing = frozenset(keys)

    def end_failure(self) -> None:
        """All failed writes are dealt with."""
        self._failing = frozenset()

    def freed(self, row: int) -> None:
        """The tier took this row back: an eviction, a failed write, or a withdrawal."""
        key = self._owner[row]
        if key is None:
            self._diverge("rows have one owner", "a row in use", "one that nobody owned")
            return
        entry = self._entries[key]
        failing = key in self._failing
        table = _STEPS.fail if failing else _STEPS.evict
        self._freed += 1
        if key in self._offer:
            self._lose(key, "own input is never evicted", "kept", "evicted")
        elif table[entry.stage][min(entry.pins, _MANY)] is None and not entry.ends():
            law = "pinned is never evicted" if entry.pins else "only what is idle is evicted"
            self._lose(key, law, "kept", f"stage {entry.stage}, pins {entry.pins}: row freed")
        else:
            self._forget(key, entry)

    def allocated(self, keys: Sequence[Hashable], given: Iterable[int], epoch: int) -> None:
        """The tier gave each key a row in this epoch; it is not ready."""
        for key, row in zip(keys, given, strict=True):
            if key in self._entries:
                self._lose(key, "one write per key", "one chunk", "another row for the same key")
            owner = self._owner[row]
            if owner is not None:
                self._lose(owner, "rows have one owner", "one", "a row given twice")
            self._entries[key] = _Entry(row, epoch)
            self._owner[row] = key
            self._pending += 1

    # Stages and pins

    def proven(self, key: Hashable) -> None:
        """The chunk of this key was sealed, or opened after a promotion."""
        entry = self._entries.get(key)
        if entry is not None and entry.stage == PENDING:
            entry.stage = PROVEN

    def readied(self, keys: Iterable[Hashable]) -> None:
        """The tier made these ready."""
        entries, table = self._entries, _STEPS.ready
        for key in keys:
            entry = entries.get(key)
            if entry is None:
                continue
            step = table[entry.stage][entry.pins if entry.pins < _MANY else _MANY]
            if step is None:
                found = f"stage {entry.stage} made ready"
                self._lose(key, "sealed or proven before ready", "not ready", found)
                continue
            entry.stage = step.stage
            self._pending -= 1
            self._evictable += 1

    def pinned(self, keys: Iterable[Hashable], counts: Iterable[int]) -> None:
        """Readers were added, one per key; `counts` are the tier's refcounts after that."""
        entries, table = self._entries, _STEPS.pin
        for key, count in zip(keys, counts, strict=True):
            entry = entries.get(key)
            if entry is None:
                self._unknown("only ready is read", "no chunk", "a reader")
                continue
            step = table[entry.stage][entry.pins if entry.pins < _MANY else _MANY]
            if step is None:
                found = f"stage {entry.stage} is read"
                self._lose(key, "only ready is read", "nobody reads it", found)
                continue
            if entry.pins == 0:
                self._evictable -= 1
            entry.pins += step.pins
            if entry.pins != count:
                self._lose(key, "pins equal readers", str(entry.pins), str(count))

    def unpinned(self, keys: Iterable[Hashable], counts: Iterable[int | None]) -> None:
        """Readers ended, one per key; `counts` are refcounts after that, None for gone."""
        entries, table = self._entries, _STEPS.unpin
        for key, count in zip(keys, counts, strict=True):
            entry = entries.get(key)
            if entry is None:
                self._unknown("pins equal readers", "no chunk", "a reader less")
                continue
            step = table[entry.stage][entry.pins if entry.pins < _MANY else _MANY]
            if step is None:
                self._lose(key, "refcounts keep their floor", "no reader to end", "one ended")
                continue
            entry.pins += step.pins
            if entry.pins == 0:
                self._evictable += 1
            if count is not None and entry.pins != count:
                self._lose(key, "pins equal readers", str(entry.pins), str(count))

    def withdrawn(self, key: Hashable) -> None:
        """The tier will not offer this chunk again, though something still reads it."""
        entry = self._entries.get(key)
        if entry is None:
            return
        step = _STEPS.withdraw[entry.stage][min(entry.pins, _MANY)]
        if step is None or step.stage == _GONE:
            self._lose(key, "what is refused is withdrawn", "gone or hidden", "hidden while idle")
        else:
            entry.stage = step.stage

    def answered(self, key: Hashable, answer: str, epoch: int) -> None:
        """The tier answered a lookup; `epoch` was the present one when it was asked."""
        entry = self._entries.get(key)
        if entry is None:
            if answer is not MISS and not self._blind:
                self._diverge("only ready is offered", MISS, answer)
            return
        if answer is HIT and entry.stage == OFFERED and entry.epoch == epoch:
            return
        if answer is HIT and entry.epoch != epoch:
            self._lose(key, "revoked is never served", MISS, HIT)
        elif answer is not _STEPS.answers[entry.stage] and answer is not MISS:
            # A miss is always sound: it costs a recomputation.
            self._lose(key, "only ready is offered", _STEPS.answers[entry.stage], answer)

    # The whole

    def counted(self, evictable: int, pending: int, free: int, retired: Iterable[int]) -> None:
        """The tier's own counters: they must be what a recount gives.

        `retired` are rows that are given to nobody for now; those in use are not free anyway.
        """
        if self._blind:
            return
        kept = sum(self._owner[row] is None for row in retired)
        mine = (self._evictable, self._pending, self._num_rows - len(self._entries) - kept)
        if mine != (evictable, pending, free):
            self._diverge("counts equal recount", str(mine), str((evictable, pending, free)))
            self._blind = True

    def reset(self) -> None:
        """The tier forgot everything."""
        self._entries.clear()
        self._owner = [None] * self._num_rows
        self._offer = self._failing = frozenset()
        self._evictable = self._pending = 0
        self._blind = False

    def _forget(self, key: Hashable, entry: _Entry) -> None:
        self._owner[entry.row] = None
        del self._entries[key]
        if entry.stage < OFFERED:
            self._pending -= 1
        elif entry.pins == 0:
            self._evictable -= 1

    def _unknown(self, law: str, expected: str, found: str) -> None:
        if not self._blind:
            self._diverge(law, expected, found)

    def _lose(self, key: Hashable, law: str, expected: str, found: str) -> None:
        """Diverge about a key, and watch it no longer: what it is now, nobody can say."""
        self._diverge(law, expected, found)
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._owner[entry.row] = None
        self._blind = True

    def _diverge(self, law: str, expected: str, found: str) -> None:
        self.divergences += 1
        if len(self.found) < _MOST:
            self.found.append(Divergence(law, expected, found))


def _world() -> World:
    return World("one chunk", "", Lru(), 1, 1, 1, 0, ((0,),), frozenset())


def _state(stage: int, pins: int) -> State:
    ready = stage in (OFFERED, HIDDEN)
    chunk = Chunk(0, _STAGES[stage], pins, stage == HIDDEN)
    counts = Counts(int(ready and pins == 0), int(not ready))
    return _world().start()._replace(chunks=(chunk,), free=(), order=(0,), counts=counts)


def _possible(stage: int, pins: int) -> bool:
    return pins == 0 if stage in (PENDING, PROVEN) else pins > 0 or stage == OFFERED


def _told(before: int, pins: int, after: State) -> _Step:
    chunk = after.chunks[0]
    if chunk is None:
        return _Step(_GONE, -pins)
    if chunk.stage != READY:
        return _Step(before, chunk.pins - pins)
    return _Step(HIDDEN if chunk.withdrawn else OFFERED, chunk.pins - pins)


def _steps() -> Steps:
    """The tables, from the machine's own functions on one chunk."""
    world = _world()
    tables: dict[str, list[tuple[_Step | None, ...]]] = {name: [] for name in Steps._fields[:-1]}
    answers = []
    for stage in _STAGES:
        found: dict[str, list[_Step | None]] = {name: [] for name in tables}
        for pins in range(_MANY + 1):
            state = _state(stage, pins)
            follows = _follows(world, state, stage) if _possible(stage, pins) else {}
            for name, row in found.items():
                row.append(_told(stage, pins, follows[name]) if name in follows else None)
        for name, row in found.items():
            tables[name].append(tuple(row))
        answers.append(_answer(stage))
    return Steps(**{name: tuple(table) for name, table in tables.items()}, answers=tuple(answers))


def _answer(stage: int) -> str:
    state = _state(stage, 1 if stage == HIDDEN else 0)
    if rows.offered(state, 0):
        return HIT
    return WAIT if rows.pending(state, 0) else MISS


def _follows(world: World, state: State, stage: int) -> dict[str, State]:
    """The steps that the machine allows here, and the state after each."""
    follows = {}
    chunk = rows.chunk_of(state, 0)
    if rows.offered(state, 0):
        follows["pin"] = rows.pin(state, (0,))
    if chunk.pins > 0:
        hidden = rows.unpin(world, state, (0,))
        # The tier withdraws after its unpin: a step of its own to the monitor.
        kept = state.chunks[0]
        gone = kept is not None and hidden.chunks[0] is None
        follows["unpin"] = _kept(state) if gone else hidden
    if stage == PROVEN:
        follows["ready"] = rows.make_ready(state, 0)
    if rows.evictable(state, 0):
        follows["evict"] = rows.evict(world, state, (0,))
    if rows.pending(state, 0):
        follows["fail"] = rows.drop(world, state, 0)
    if chunk.stage == READY:
        follows["withdraw"] = rows.withdraw(world, state, 0)
    return follows


def _kept(state: State) -> State:
    """The last reader of a withdrawn chunk has ended and the tier has not yet removed it."""
    chunk = rows.chunk_of(state, 0)
    return state._replace(chunks=(chunk._replace(pins=chunk.pins - 1),))


_STEPS: Final = _steps()

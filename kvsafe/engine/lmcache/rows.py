# SPDX-License-Identifier: Apache-2.0
"""One row to a peers' server and back: converted, and attested or sealed anew.

On the way out a row becomes LMCache's chunks, one per worker, readable by any peer, and a
companion beside them. On the way back chunk and companion become the row again, which is then
opened like any other. A chunk without a companion is taken only under `trust: peer`: after every
check that is possible it is sealed here, in the name of this engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvsafe.engine.lmcache.names import ChunkNames
from kvsafe.engine.station import Station
from kvsafe.lmcache.answers import Answer as PeerAnswer
from kvsafe.lmcache.answers import ChunkShape, Fetch, Found, Lost, Offer, PeerStore
from kvsafe.lmcache.companion import Companions, Part
from kvsafe.lmcache.content import judge_content
from kvsafe.lmcache.frames import Dtype, Fmt
from kvsafe.lmcache.layout import ChunkLayout
from kvsafe.seal.header import bitmap, read_fixed
from kvsafe.seal.layout import FIXED, coverage_bytes
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.tiers import Answer, Outcome
from kvsafe.tiers.buffers import ThreadBuffers
from kvsafe.tiers.outcome import LATE

UNATTESTED = "unattested"
"""The `why` of a load that no companion vouches for."""


@dataclass(frozen=True, slots=True)
class PeerForm:
    """How chunks look to the peers.

    `forgets`: the server may drop what it has at any time, so an absence after a hit is an
    ordinary miss; elsewhere it is a refusal (1309).
    """

    layout: ChunkLayout
    shape: ChunkShape
    forgets: bool


class Place(NamedTuple):
    """A row and the chunk that belongs there: its key and its present epoch."""

    row: int
    key: bytes
    epoch: int


class RowMover:
    """Moves rows between the host region and one server. Thread-safe."""

    def __init__(self, store: PeerStore, station: Station, form: PeerForm, *, peers: bool) -> None:
        self._store = store
        self._station = station
        self._form = form
        self._peers = peers
        row = station.seal_setting.layout
        self._row = row
        self._companions = Companions(station.suite, station.keyring, row.header_bytes)
        length = self._companions.length
        self._companion = ChunkShape(int(Fmt.BINARY), int(Dtype.UINT8), (length, 0, 0, 0), length)
        self._buffers = ThreadBuffers(row.payload_bytes + length)
        self._slices = [station.slice_sealer(index) for index in range(len(row.slices))]
        self._header = station.header_sealer()
        self._whole = bitmap(row.slots, range(row.slots))

    def look(self, names: list[ChunkNames]) -> list[bool]:
        """Whether the server says that it has everything that a load would ask for."""
        groups = [self._needed(name) for name in names]
        found = iter(self._store.look([key for group in groups for key in group]))
        answers = [[next(found) for _ in group] for group in groups]
        return [all(answer is Found.HIT for answer in group) for group in answers]

    def _needed(self, names: ChunkNames) -> tuple[str, ...]:
        return names.parts if self._peers else (names.companion, *names.parts)

    def put(
        self, row: memoryview, names: ChunkNames, *, again: bool, wanted: Callable[[], bool]
    ) -> Outcome:
        """Store a row. `again`: also if the server says that it has it already."""
        if not self._covers_all(row):
            return Outcome(Answer.MISSING, "the chunk is not whole")
        if not again:
            known = self._store.look((names.companion, *names.parts))
            if all(answer is Found.HIT for answer in known):
                return Outcome(Answer.PRESENT)
        buffer = self._buffers.get()
        offers = self._offers(row, names, buffer)
        if not wanted():
            # The row may have been given away meanwhile: nobody may read what was made of it.
            return LATE
        return _worst(self._store.store(offers)) or Outcome(Answer.DONE)

    def _offers(self, row: memoryview, names: ChunkNames, buffer: memoryview) -> list[Offer]:
        """The chunks, then the companion: what it vouches for is there before it."""
        form, start = self._form, self._row.header_bytes
        offers = []
        for name, place in zip(names.parts, self._row.slices, strict=True):
            chunk = buffer[place.offset : place.offset + place.length]
            first = start + place.offset
            form.layout.to_chunk(row[first : first + place.length], chunk)
            offers.append(Offer(name, form.shape, chunk))
        companion = self._companions.make(row[:start], self._parts(names))
        return [*offers, Offer(names.companion, self._companion, memoryview(companion))]

    def _parts(self, names: ChunkNames) -> list[Part]:
        return [(name, self._form.shape.length) for name in names.parts]

    def _covers_all(self, row: memoryview) -> bool:
        at = FIXED.size + read_fixed(row).key_bytes
        return bytes(row[at : at + coverage_bytes(self._row.slots)]) == self._whole

    def get(
        self,
        rows: Callable[[int], memoryview],
        place: Place,
        names: ChunkNames,
        claim: Callable[[], bool],
    ) -> Outcome:
        """Load a row. It is written only after `claim` has said that it is still wanted."""
        buffer = self._buffers.get()
        companion = buffer[self._row.payload_bytes :]
        answers = self._store.fetch(self._items(names, buffer, companion))
        attested = not (self._peers and answers[0] is Found.ABSENT)
        wrong = _worst(answers if attested else answers[1:])
        if wrong is None:
            wrong = self._judge(names, companion, buffer, attested=attested)
        if wrong is not None:
            return self._forgiven(wrong)
        if not claim():
            return LATE
        with rows(place.row) as row:
            self._fill(row, buffer)
            if attested:
                row[: self._row.header_bytes] = companion[: self._row.header_bytes]
                return Outcome(Answer.DONE)
            return self._seal(row, place)

    def _items(self, names: ChunkNames, buffer: memoryview, companion: memoryview) -> list[Fetch]:
        items = [Fetch(names.companion, self._companion, companion)]
        for name, place in zip(names.parts, self._row.slices, strict=True):
            into = buffer[place.offset : place.offset + place.length]
            items.append(Fetch(name, self._form.shape, into))
        return items

    def _judge(
        self, names: ChunkNames, companion: memoryview, buffer: memoryview, *, attested: bool
    ) -> Outcome | None:
        refusal: Refusal | None = None
        if attested:
            refusal = self._companions.judge(companion, self._parts(names))
        else:
            for place in self._row.slices:
                chunk = buffer[place.offset : place.offset + place.length]
                shape = self._form.shape
                refusal = refusal or judge_content(
                    chunk, Dtype(shape.dtype), self._form.layout.dims
                )
        return None if refusal is None else Outcome(Answer.REFUSED, verdict=refusal)

    def _forgiven(self, wrong: Outcome) -> Outcome:
        """An absence after a hit: a server that forgets may say so, another one broke its word."""
        if wrong.answer is Answer.MISSING and not self._form.forgets:
            refusal = Refusal.of(RefusalKind.PEER_ABSENT, "chunk", "as at its lookup", "absent")
            return Outcome(Answer.REFUSED, verdict=refusal)
        return wrong

    def _fill(self, row: memoryview, buffer: memoryview) -> None:
        start = self._row.header_bytes
        for place in self._row.slices:
            first = start + place.offset
            chunk = buffer[place.offset : place.offset + place.length]
            self._form.layout.to_payload(chunk, row[first : first + place.length])
        end = start + self._row.payload_bytes
        row[end:] = bytes(len(row) - end)

    def _seal(self, row: memoryview, place: Place) -> Outcome:
        """Vouch for bytes of a peer, as the operator asked: sealed here, for this row only."""
        region = self._station.region
        if region is None:
            return Outcome(Answer.UNREACHABLE, "the region is closed")
        generation = region.ledger.generation(place.row)
        for sealer in self._slices:
            sealer.seal_slice(row, place.key, place.epoch, generation)
        refusal = self._header.seal(row, place.key, place.epoch, generation, self._whole)
        if refusal is not None:
            return Outcome(Answer.REFUSED, verdict=refusal)
        return Outcome(Answer.DONE, UNATTESTED)

    def remove(self, names: ChunkNames, *, chunk: bool) -> bool:
        """Remove the companion, and with `chunk` the chunk too. True if they are gone."""
        keys = (names.companion, *(names.parts if chunk else ()))
        return all(answer is Found.ABSENT for answer in self._store.remove(keys))


def _worst(answers: list[PeerAnswer]) -> Outcome | None:
    """What keeps a whole from being good: a refusal before silence, silence before absence."""
    refusals = [answer for answer in answers if isinstance(answer, Refusal)]
    if refusals:
        return Outcome(Answer.REFUSED, verdict=refusals[0])
    lost = [answer for answer in answers if isinstance(answer, Lost)]
    if lost:
        return Outcome(Answer.LATE if lost[0].late else Answer.UNREACHABLE, lost[0].why)
    return Outcome(Answer.MISSING) if Found.ABSENT in answers else None

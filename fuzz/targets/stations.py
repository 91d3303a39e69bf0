# SPDX-License-Identifier: Apache-2.0
"""Seal, host and a tier of objects as one small world: jobs that come late, rows used again."""

from __future__ import annotations

import shutil
from typing import NamedTuple

from blake3 import blake3

from fuzz.chunks import EPOCH, Engine, engines
from fuzz.target import ByteSource, Target, demand
from fuzz.targets.keys import scratch
from kvsafe.host.region import HostRegion, RegionError, RegionShape
from kvsafe.seal import header, sealing
from kvsafe.seal.refusal import Refusal

ROWS = 3
KEYS = tuple(bytes([number]) * 32 + (0).to_bytes(4, "big") for number in range(3))
_LATE = 8


class Store(NamedTuple):
    """One store on its way: into which allocation of which row, and what it writes."""

    row: int
    generation: int
    key: int
    epoch: int
    fill: int


class Stations(Target):
    """Stores, cascades, promotions, loads and resets over a real region, in any order.

    A transfer may report after its row was given to another chunk, objects may be exchanged or
    damaged, the region's first page may be anything. Oracles: what a load gets is what was
    stored for that key in that epoch; a late job changes nothing; two allocations never have
    one generation; a region of another shape is refused.
    """

    name = "stations"
    max_len = 240
    memory_mib = 64

    def __init__(self) -> None:
        self._folder = scratch("stations")
        # Engines whose rows are whole pages of the region.
        self._engines = tuple(made for made in engines() if len(made.slices) == 2)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def once(self, data: bytes) -> None:
        source = ByteSource(data)
        for path in self._folder.iterdir():
            path.unlink()
        engine = source.pick(self._engines)
        if source.below(16) == 15:
            self._join(source, engine)
            return
        region = HostRegion.open("launch", _shape(engine), self._folder)
        try:
            world = World(engine, region)
            while source.left:
                world.step(source)
            world.rest()
        finally:
            region.close()

    def _join(self, source: ByteSource, engine: Engine) -> None:
        """A second process joins a region whose first page, or length, is what it is."""
        shape = _shape(engine)
        region = HostRegion.open("launch", shape, self._folder)
        try:
            front = bytes(region.memory[:72])
            at, part = source.below(80), source.some(8)
            region.memory[at : at + len(part)] = part
            other = source.pick((shape, RegionShape(ROWS + 1, shape.row_bytes, 2)))
            good = bytes(region.memory[:72]) == front and other == shape
            try:
                joined = HostRegion.open("launch", other, self._folder)
            except RegionError:
                demand(not good, "a region of this launch was refused")
                return
            joined.close()
            demand(good, "a region of another shape was joined", "accepted")
            _registration(source, region)
        finally:
            region.close()

    def seeds(self) -> list[bytes]:
        good = bytes([0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 1, 2, 0, 3, 0, 4, 0, 5, 0, 6])
        return [good * 3, bytes(range(240)), bytes([0, 15, 9, 2, 1, 1])]


def _shape(engine: Engine) -> RegionShape:
    return RegionShape(ROWS, engine.layout.row_bytes, len(engine.slices))


def _registration(source: ByteSource, region: HostRegion) -> None:
    """What a worker leaves for the scheduler side is read whole or not at all."""
    text = source.some(60)
    rank = source.below(2)
    region.register_worker(rank, text)
    at, part = 4096 * (1 + rank) + source.below(90), source.some(4)
    region.memory[at : at + len(part)] = part
    found = region.registration(rank)
    demand(found is None or found == text, "another document than the worker left", "accepted")


class World:
    """One engine: its rows, its tier, and a plain account of what each key holds."""

    def __init__(self, engine: Engine, region: HostRegion) -> None:
        self.engine, self.region = engine, region
        self.sealers = [sealing.SliceSealer(engine.setting, n) for n in range(len(engine.slices))]
        self.closer = sealing.HeaderSealer(engine.setting, engine.geometry)
        self.covered = header.bitmap(engine.slots, list(range(engine.slots)))
        self.epoch = EPOCH
        self.writes = 0
        self.stores: list[Store] = []
        self.slices: set[tuple[Store, int]] = set()
        self.ready: dict[int, Store] = {}
        self.objects: dict[int, bytes] = {}
        self.sealed: dict[bytes, Store] = {}
        self.generations: set[int] = set()

    def step(self, source: ByteSource) -> None:
        """One thing happens."""
        ways = (
            self._store, self._copy, self._copy, self._finish, self._cascade, self._promote,
            self._load, self._damage, self._swap, self._reset, self._whole, self._whole,
        )  # fmt: skip
        ways[source.below(len(ways))](source)

    def _allocate(self, row: int) -> int:
        """A row begins anew; what it held is gone."""
        self.ready.pop(row, None)
        generation = self.region.ledger.allocate(row)
        demand(generation not in self.generations, "one generation, two allocations", "accepted")
        self.generations.add(generation)
        return generation

    def _store(self, source: ByteSource) -> None:
        self.writes += 1
        row = source.below(ROWS)
        made = Store(row, self._allocate(row), source.below(len(KEYS)), self.epoch, self.writes)
        self.stores = [*self.stores, made][-_LATE:]

    def _whole(self, source: ByteSource) -> None:
        """A store from its beginning to the tier, without any hitch."""
        self._store(source)
        self.stores = self.stores[-1:]
        for rank in range(len(self.sealers)):
            self._copy(ByteSource(bytes([rank])))
        self._finish(ByteSource(b""))
        self._cascade(source)

    def _copy(self, source: ByteSource) -> None:
        """A worker's copy of some store, as late as it may be: fence, copy, tag."""
        if not self.stores:
            return
        made, rank = source.pick(self.stores), source.below(len(self.sealers))
        if self.region.ledger.generation(made.row) != made.generation:
            return
        row, place = self.region.row(made.row), self.engine.layout.slices[rank]
        start = self.engine.layout.header_bytes + place.offset
        row[start : start + place.length] = self._bytes(made, rank)
        self.sealers[rank].seal_slice(row, KEYS[made.key], made.epoch, made.generation)
        self.slices.add((made, rank))

    def _bytes(self, made: Store, rank: int) -> bytes:
        seed = made.fill.to_bytes(4, "little") + bytes([rank])
        return blake3(seed).digest(self.engine.layout.slices[rank].length)

    def _finish(self, source: ByteSource) -> None:
        """The scheduler side closes the present store of a row, whoever has written into it."""
        if not self.stores:
            return
        made = source.pick(self.stores)
        row = self.region.row(made.row)
        if made.row in self.ready or self.region.ledger.generation(made.row) != made.generation:
            return
        refusal = self.closer.seal(row, KEYS[made.key], made.epoch, made.generation, self.covered)
        whole = all((made, rank) in self.slices for rank in range(len(self.sealers)))
        demand((refusal is None) == whole, "sealed without all its writers", "accepted")
        if refusal is None:
            self.ready[made.row] = made

    def _cascade(self, source: ByteSource) -> None:
        if self.ready:
            row = source.pick(sorted(self.ready))
            made = self.ready[row]
            self.objects[made.key] = bytes(self.region.row(row))
            self.sealed[self.objects[made.key]] = made

    def _promote(self, source: ByteSource) -> None:
        """From the tier into a row; ready only if it opens."""
        key, row = source.below(len(KEYS)), source.below(ROWS)
        if key not in self.objects:
            return
        self._allocate(row)
        view = self.region.row(row)
        view[:] = self.objects[key]
        answer = self.engine.opener.open(view, KEYS[key], self.epoch, range(self.engine.slots))
        made = self.sealed.get(self.objects[key])
        right = made is not None and made.key == key and made.epoch == self.epoch
        if isinstance(answer, Refusal):
            demand(not right, f"{answer.number} for what was stored")
            return
        demand(right, "what nobody stored for this key and epoch was opened", "accepted")
        if made is not None:
            self.ready[row] = made

    def _load(self, source: ByteSource) -> None:
        """A worker opens its slice of a ready row and takes the bytes."""
        if not self.ready:
            return
        row = source.pick(sorted(self.ready))
        made, view = self.ready[row], self.region.row(row)
        if made.epoch != self.epoch:
            return
        answer = self.engine.opener.open_header(view, KEYS[made.key], self.epoch)
        if isinstance(answer, Refusal):
            demand(False, f"{answer.number} for a ready row")
            return
        for rank, place in enumerate(self.engine.layout.slices):
            refusal = self.engine.opener.open_slice(view, answer, rank)
            demand(refusal is None, "a slice of a ready row was refused")
            start = self.engine.layout.header_bytes + place.offset
            found = view[start : start + place.length]
            demand(found == self._bytes(made, rank), "other bytes than were stored", "accepted")

    def _damage(self, source: ByteSource) -> None:
        if self.objects:
            key = source.pick(sorted(self.objects))
            row, at = bytearray(self.objects[key]), source.below(self.engine.layout.row_bytes)
            row[at] ^= 1 << source.below(8)
            self.objects[key] = bytes(row)

    def _swap(self, source: ByteSource) -> None:
        """An object stands in the place of another."""
        if len(self.objects) > 1:
            one, other = sorted(self.objects)[:2]
            if source.flag():
                one, other = other, one
            self.objects[one] = self.objects[other]

    def _reset(self, source: ByteSource) -> None:
        self.epoch += 1
        self.region.announce_epoch(self.epoch)
        self.ready = {}
        demand(self.region.epoch == self.epoch, "another epoch than was announced")

    def rest(self) -> None:
        """At the end everything that is ready can still be read."""
        for _ in range(len(self.ready)):
            self._load(ByteSource(b""))

# SPDX-License-Identifier: Apache-2.0
"""Our manager over a proven `kvsafe-fs`, with its real threads and files, in lockstep.

As in `disk`, each move waits for what it started, and lookups for the transfers before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import ScheduleEndContext

from kvsafe.engine.fs.tier import KVSafeFsTier
from kvsafe.engine.tiers.proving import ProvingTier
from kvsafe.lifecycle.words import ABSENT, DAMAGED, GOOD
from kvsafe.tiers.pool import Pool
from tests.lockstep.files import WAIT_S, FileBook, OnFiles, wait_until
from tests.lockstep.noting import Noting
from tests.lockstep.ours import LockstepWorld, Ours, SealBook
from tests.lockstep.runs import Dice, Make
from tests.lockstep.tiers import Job, Report


class CountedPool:
    """The real pool, which knows when everything that it was given is answered."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._given = self._taken = 0
        self.counts = pool.counts

    def submit(self, lane: int, tag: Hashable, work: Callable[[Any], object]) -> None:
        """One piece."""
        self.rest()
        self._given += 1
        self._pool.submit(lane, tag, work)

    def submit_all(self, lane: int, pieces: list[Any]) -> None:
        """Several pieces."""
        self._given += len(pieces)
        self._pool.submit_all(lane, pieces)
        self.rest()

    def poll(self) -> list[tuple[Hashable, object]]:
        """What is answered."""
        answered = self._pool.poll()
        self._taken += len(answered)
        return answered

    def rest(self) -> None:
        """Wait until all is answered, heard or not."""
        wait_until(
            lambda: self._taken + self._pool._done.qsize() >= self._given,
            "the pool does not come to rest",
        )

    def stop(self, wait_s: float) -> bool:
        """End its threads."""
        return self._pool.stop(wait_s)


class NotingStore(Noting, KVSafeFsTier):
    """`kvsafe-fs`, which notes what it is told."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rest_pool = CountedPool(self._pool)
        self._pool: Any = self.rest_pool

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Everything that was started is done after it."""
        super().on_schedule_end(context)
        self.rest_pool.rest()
        self._collect()


class StoreWorld(LockstepWorld):
    """`World` over one `kvsafe-fs`."""

    def _tier(self, index: int, kind: str) -> ProvingTier:
        spec = SimpleNamespace(station=self.station)
        tier = NotingStore(
            spec,
            self.primary.get_kv_memoryview(),
            "kvsafe-fs",
            root_dir=str(self.folder / "store"),
            capacity_bytes="16MiB",
            threads=2,
            deadline_s=WAIT_S,
        )
        # No housekeeping of its own: nothing happens that no move has asked for.
        tier.store.keeper.wait_counted()
        tier.store.keeper._stop = True
        proven = ProvingTier(tier, index, self.desk, tier.objects)
        # Its calls wait for real disks here, as no tier should.
        proven._door._pace.slow_s = math.inf
        return proven


class StoreBook(FileBook, SealBook):
    """The machine over `kvsafe-fs`.

    What was stored while an answer is kept is there for those who hear it, what could not be
    loaded is not. Each key of a job has its own fate. A file of the right length is not written
    again; a refused one is moved away when it is refused.
    """

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._settled: list[tuple[int, bool]] = []
        self.refused: set[int] = set()
        self._read: dict[tuple[int, int], int] = {}

    def _having(self, who: int, key: int) -> list[int]:
        if self.state.chunks[key] is not None:
            return []
        if key in self.refused:
            self.hear(who, key, 0)
            return []
        return [0] if self.ask(who, key) else []

    def _submit(self, tier: int, who: int, keys: Collection[int], *, load: bool) -> None:
        number = self._next
        super()._submit(tier, who, keys, load=load)
        if not load:
            self.refused -= set(keys)
        good = []
        for key in keys:
            there = self.object(key) != ABSENT
            if not load and not there:
                self.put(0, key, GOOD)
            if there or not load:
                good.append(key)
            if load:
                self._read[number, key] = self.object(key)
            if load and not there:
                self._settled.append((key, False))
            elif not load:
                self._settled.append((key, True))
        self._reports[tier].append(Report(self.jobs[number], tuple(good)))

    def fetch(self, job: Job, key: int) -> None:
        """What was read is judged, whatever has become of the file."""
        self.fetch_as(0, key, self._read.pop((job.number, key)))

    def quarantine(self, tier: int, key: int) -> None:
        """What is refused is moved away at once."""
        self.put(tier, key, ABSENT)

    def _judged(self, promotion: Any) -> None:
        kept = {key: self.object(key) for key in promotion.refused}
        super()._judged(promotion)
        self.hidden[0].clear()
        for key, value in kept.items():
            self.put(0, key, value)
            self.refused.add(key)

    def _settle_answers(self) -> None:
        for key, found in self._settled:
            if key in self.answers:
                self.answers[key] = found
        self._settled.clear()

    def _hear(self) -> None:
        self._settle_answers()
        super()._hear()

    def step(self) -> None:
        """`on_schedule_end`; lookups are answered with what there is after it."""
        super().step()
        self._settle_answers()


class OursOnDisk(OnFiles, Ours):
    """As `Ours`, over files; somebody may remove them, cut them or change a byte."""

    weights: ClassVar[dict[str, int]] = {**Ours.weights, "end_job": 0, "remove": 2, "cut": 2}
    book: StoreBook
    book_type = StoreBook
    world_type = StoreWorld
    kind, most_tiers = "kvsafe-fs", 1
    # Whoever meets a short file moves it away, so that it is as good as gone.
    left_bytes, left_value = 100, ABSENT

    def _path(self, key: int) -> Path:
        tier: Any = self.tiers[0]
        bucket, file = tier.store.folders.place(self._name(key))
        return next(path for path in (self.folder / "store").rglob(file) if bucket in path.parts)

    def damage(self, dice: Dice) -> None:
        """One byte of a file is another."""
        key = self._with(dice, GOOD)
        if key is not None:
            path = self._path(key)
            at = dice.number(0, path.stat().st_size - 1)
            with path.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0] ^ 1
                file.seek(at)
                file.write(bytes([byte]))
            self.book.put(0, key, DAMAGED)


def ours_on_disk(policy: str, folder: Path) -> Make:
    """How to begin such a world in a folder of its own."""
    return partial(OursOnDisk, policy=policy, folder=folder)

# SPDX-License-Identifier: Apache-2.0
"""Our manager over a proven `kvsafe-fs`, with its real threads and files, in lockstep.

As in `disk`, each move waits for what it started, and lookups for the transfers before them.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Collection, Hashable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvsafe.engine.fs.tier import KVSafeFsTier
from kvsafe.engine.tiers.proving import ProvingTier
from kvsafe.lifecycle.requests import with_request
from kvsafe.lifecycle.words import ABSENT, DAMAGED, GOOD
from kvsafe.tiers.pool import Pool
from tests.lockstep.ours import LockstepWorld, Ours, SealBook
from tests.lockstep.primary import KEYS, POLICIES, ROWS, SLOTS
from tests.lockstep.runs import Dice, Make
from tests.lockstep.tiers import Job, Report

WAIT_S = 60.0


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
        deadline = time.monotonic() + WAIT_S
        while self._taken + self._pool._done.qsize() < self._given:
            if time.monotonic() > deadline:
                raise TimeoutError("the pool does not come to rest")
            time.sleep(0.0002)

    def stop(self, wait_s: float) -> bool:
        """End its threads."""
        return self._pool.stop(wait_s)


class NotingStore(KVSafeFsTier):
    """`kvsafe-fs`, which notes what it is told."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.told: list[tuple[Any, ...]] = []
        self.wish = False
        self.rest_pool = CountedPool(self._pool)
        self._pool: Any = self.rest_pool

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Note it; answer with the wish of the moment."""
        self.told.append(("arrive", req_context.req_id))
        policy = OffloadPolicy.REQUEST_LEVEL if self.wish else OffloadPolicy.CHUNK_LEVEL
        return RequestOffloadingContext(policy=policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Note it."""
        super().on_request_finished(req_context)
        self.told.append(("finished", req_context.req_id))

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Note it."""
        super().submit_store(job_metadata)
        self._note_job("store", job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Note it."""
        super().submit_load(job_metadata)
        self._note_job("load", job_metadata)

    def _note_job(self, what: str, job: TransferJob) -> None:
        self.told.append((what, job.job_id, job.req_context.req_id, tuple(job.keys)))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Note it."""
        super().on_schedule_end(context)
        self.rest_pool.rest()
        self._collect()
        self.told.append(("step",))


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


class StoreBook(SealBook):
    """The machine over `kvsafe-fs`.

    The tier asks for a name once for all requests and keeps the answer while one of them lives;
    what was stored meanwhile is there for them, what could not be loaded is not. Each key of a
    job has its own fate. A file of the right length is not written again; a refused one is moved
    away when it is refused.
    """

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.world = self.world._replace(features=self.world.features | {"probe"})
        self.answers: dict[int, bool | None] = {}
        self.askers: dict[int, set[int]] = {}
        self._settled: list[tuple[int, bool]] = []
        self.refused: set[int] = set()
        self._read: dict[tuple[int, int], int] = {}

    def _having(self, who: int, key: int) -> list[int]:
        if self.state.chunks[key] is not None:
            return []
        probes = frozenset({(0, key, 0)})
        if key not in self.refused:
            answer = self.answers.setdefault(key, None)
            self.askers.setdefault(key, set()).add(who)
            probes = frozenset({(0, key, 2 if answer is None else int(answer))})
        self.state = with_request(self.state, who, probes=probes)
        return [0] if (0, key, 1) in probes else []

    def _answers(self) -> Any:
        yield "hit", (), "HIT"
        yield "pend", (), "HIT_PENDING"
        yield "promote", (0,), "HIT_PENDING"
        yield "no room", (0,), "MISS"
        yield "retry", (), "RETRY"
        yield "miss", (), "MISS"

    def object(self, key: int) -> int:
        """What the tier has under a key."""
        return self.state.objects[0][key]

    def _submit(self, tier: int, who: int, keys: Collection[int], *, load: bool) -> None:
        number = self._next
        super()._submit(tier, who, keys, load=load)
        if not load:
            self.refused -= set(keys)
        good = []
        for key in keys:
            there = self.object(key) != ABSENT
            if not load and not there:
                self._put(0, key, GOOD)
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

    def end_job(self, number: int, good: Collection[int]) -> None:
        """Jobs end by themselves here."""

    def quarantine(self, tier: int, key: int) -> None:
        """What is refused is moved away at once."""
        self._put(tier, key, ABSENT)

    def _judged(self, promotion: Any) -> None:
        kept = {key: self.object(key) for key in promotion.refused}
        super()._judged(promotion)
        self.hidden[0].clear()
        for key, value in kept.items():
            self._put(0, key, value)
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
        for key, answer in self.answers.items():
            if answer is None:
                self.answers[key] = self.object(key) != ABSENT
        self._settle_answers()

    def leave(self, who: int) -> None:
        """An answer is kept while a request lives that asked."""
        here = who in self._present
        super().leave(who)
        if here and who not in self._present:
            for key, askers in list(self.askers.items()):
                askers.discard(who)
                if not askers:
                    del self.askers[key], self.answers[key]


class OursOnDisk(Ours):
    """As `Ours`, over files; somebody may remove them, cut them or change a byte."""

    weights: ClassVar[dict[str, int]] = {**Ours.weights, "end_job": 0, "remove": 2, "cut": 2}
    book: StoreBook
    kind = "kvsafe-fs"
    source = CacheHitSource.DISK

    def __init__(
        self, dice: Dice, policy: str, folder: Path, world: type[LockstepWorld] = StoreWorld
    ) -> None:
        super().__init__(dice, policy, folder, world=world)
        self.world.close()
        shutil.rmtree(folder, ignore_errors=True)
        self._begin(policy, folder, world)

    def _begin(self, policy: str, folder: Path, world: type[LockstepWorld]) -> None:
        self.book = StoreBook(POLICIES[policy], keys=KEYS, rows=ROWS, requests=SLOTS, tiers=1)
        self.book.as_vllm = self.book.as_vllm - {"revokes nothing"}
        self.book.sort = lambda who, keys: self.names.sort(keys, self.positions[who])
        self.world = world(
            folder,
            rows=ROWS,
            policy=policy,
            tiers=[self.kind],
            events=True,
            threads=self.threads,
            monitor="log",
        )
        self.tiers = [tier.inner for tier in self.world.tiers]
        self.real = self.world.manager
        self.eye.real, self.eye.book = self.world.primary, self.book

    def _file(self, key: int) -> Path:
        tier: Any = self.tiers[0]
        bucket, file = tier.store.folders.place(self._name(key))
        return next(path for path in (self.folder / "store").rglob(file) if bucket in path.parts)

    def _with(self, dice: Dice, *values: int) -> int | None:
        keys = [key for key in range(KEYS) if self.book.object(key) in values]
        return dice.pick(keys) if keys else None

    def remove(self, dice: Dice) -> None:
        """A file goes."""
        key = self._with(dice, GOOD, DAMAGED)
        if key is not None:
            self._file(key).unlink()
            self.book._put(0, key, ABSENT)

    def cut(self, dice: Dice) -> None:
        """A file is cut short: whoever meets it moves it away, so that it is as good as gone."""
        key = self._with(dice, GOOD)
        if key is not None:
            with self._file(key).open("r+b") as file:
                file.truncate(100)
            self.book._put(0, key, ABSENT)

    def damage(self, dice: Dice) -> None:
        """One byte of a file is another."""
        key = self._with(dice, GOOD)
        if key is not None:
            path = self._file(key)
            at = dice.number(0, path.stat().st_size - 1)
            with path.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0] ^ 1
                file.seek(at)
                file.write(bytes([byte]))
            self.book._put(0, key, DAMAGED)


def ours_on_disk(policy: str, folder: Path) -> Make:
    """How to begin such a world in a folder of its own."""
    return partial(OursOnDisk, policy=policy, folder=folder)

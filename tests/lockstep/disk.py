# SPDX-License-Identifier: Apache-2.0
"""vLLM's `TieringOffloadingManager` over its real file tier, driven in lockstep with the machine.

Files and threads are real. To know what there is to compare, the tier's lookups wait for its
transfers, and each move waits for both; what the manager hears, and when, is as it is.
"""

from __future__ import annotations

import mmap
import shutil
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    Locality,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvsafe.lifecycle.requests import with_request
from kvsafe.lifecycle.transfers import set_object
from kvsafe.lifecycle.words import ABSENT, DAMAGED, GOOD
from tests.engine_unit.sealed_world import _spec
from tests.lockstep.book import DIVERGENCES
from tests.lockstep.compare import differ
from tests.lockstep.hand import Tiered
from tests.lockstep.primary import KEYS, POLICIES, ROWS, SLOTS
from tests.lockstep.runs import Dice, Make
from tests.lockstep.tiers import Job, Report, TieredBook

PAGE = 4096
WAIT_S = 60.0


class Pages:
    """Rows that direct I/O accepts."""

    def __init__(self, rows: int) -> None:
        self.rows = memoryview(mmap.mmap(-1, rows * PAGE)).cast("B", (rows, PAGE))

    def create_kv_memoryview(self) -> memoryview:
        """All rows."""
        return self.rows

    def cleanup(self) -> None:
        """Nothing to give back."""


class NotingFiles(FileSystemTierManager):
    """The real file tier; it notes what it is told and answers when its files are at rest."""

    def __init__(self, rows: memoryview, root: Path) -> None:
        super().__init__(
            _spec(), rows, "fs", root_dir=str(root), n_read_threads=1, n_write_threads=1
        )
        self.told: list[tuple[Any, ...]] = []
        self.wish = False
        look = self._lookup_manager.batch_lookup

        def looked(keys: Any, context: ReqContext) -> Any:
            self._pool.wait_idle()
            return list(look(keys, context))

        self._lookup_manager.batch_lookup = looked

    def rest(self) -> None:
        """Wait until every transfer is done and every lookup answered."""
        self._pool.wait_idle()
        asked = self._lookup_manager
        deadline = time.monotonic() + WAIT_S
        waiting = any(state.phase.name == "IN_FLIGHT" for state in asked._lookup_state.values())
        while waiting and asked._pending_results.empty():
            if time.monotonic() > deadline:
                raise TimeoutError("a lookup was not answered")
            time.sleep(0.0002)

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
        self._note("store", job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Note it."""
        super().submit_load(job_metadata)
        self._note("load", job_metadata)

    def _note(self, what: str, job: TransferJob) -> None:
        self.told.append((what, job.job_id, job.req_context.req_id, tuple(job.keys)))
        # One job after the other: what a store finds must not depend on threads.
        self._pool.wait_idle()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Note it."""
        super().on_schedule_end(context)
        self.told.append(("step",))


class DiskBook(TieredBook):
    """The machine over vLLM's file tier.

    The tier asks for a key once for all requests and keeps the answer while one of them lives.
    A batch stops at the first key that goes wrong (finding K); a file that is there is not
    written again, whatever is in it (finding K).
    """

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.world = self.world._replace(features=self.world.features | {"probe"})
        self.answers: dict[int, bool | None] = {}
        self.askers: dict[int, set[int]] = {}
        self.blocked: set[int] = set()

    def lookup(self, who: int, key: int) -> str:
        """`lookup`, which may have to be repeated."""
        self.poll()
        if self.state.chunks[key] is None:
            answer = self.answers.setdefault(key, None)
            self.askers.setdefault(key, set()).add(who)
            probes = frozenset({(0, key, 2 if answer is None else int(answer))})
            self.state = with_request(self.state, who, probes=probes)
        return super().lookup(who, key)

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

    def put(self, key: int, value: int) -> None:
        """The tier has this now."""
        self.state = set_object(self.state, 0, key, value)

    def _submit(self, tier: int, who: int, keys: Collection[int], *, load: bool) -> None:
        number = self._next
        super()._submit(tier, who, keys, load=load)
        good = []
        for key in keys:
            if not (self._load(key) if load else self._store(key)):
                break
            good.append(key)
        self._reports[tier].append(Report(self.jobs[number], tuple(good)))

    def _load(self, key: int) -> bool:
        found = self.object(key)
        if found == DAMAGED:
            self.put(key, ABSENT)
        return found == GOOD

    def fetch(self, job: Job, key: int) -> None:
        """What was read was whole; vLLM looks at no more than that."""
        self.fetch_as(0, key, GOOD)

    def _store(self, key: int) -> bool:
        if key in self.blocked:
            return False
        if self.object(key) == ABSENT:
            self.put(key, GOOD)
        return True

    def end_job(self, number: int, good: Collection[int]) -> None:
        """Jobs end by themselves here."""

    def _hear(self) -> None:
        for reports in self._reports:
            for job, good in reports:
                for key in job.keys if job.load else ():
                    if key not in good and key in self.answers:
                        self.answers[key] = False
        super()._hear()

    def step(self) -> None:
        """`on_schedule_end`; lookups are answered with what there is after it."""
        super().step()
        for key, answer in self.answers.items():
            if answer is None:
                self.answers[key] = self.object(key) != ABSENT

    def leave(self, who: int) -> None:
        """An answer is kept while a request lives that asked."""
        here = who in self._present
        super().leave(who)
        if here and who not in self._present:
            for key, askers in list(self.askers.items()):
                askers.discard(who)
                if not askers:
                    del self.askers[key], self.answers[key]


class OnDisk(Tiered):
    """As `Tiered`, over real files; somebody may remove them, cut them or block their folders."""

    weights: ClassVar[dict[str, int]] = {
        **Tiered.weights,
        "end_job": 0,
        "remove": 2,
        "cut": 2,
        "block": 1,
        "unblock": 1,
    }
    book: DiskBook
    source = CacheHitSource.DISK

    def __init__(
        self,
        dice: Dice,
        policy: str,
        root: Path,
        as_vllm: tuple[str, ...] = tuple(DIVERGENCES),
    ) -> None:
        super().__init__(dice, policy, as_vllm=as_vllm)
        self.root = root
        shutil.rmtree(root, ignore_errors=True)
        self.book = DiskBook(
            POLICIES[policy], keys=KEYS, rows=ROWS, requests=SLOTS, tiers=1, as_vllm=as_vllm
        )
        self.book.sort = lambda who, keys: self.names.sort(keys, self.positions[who])
        self.memory = Pages(ROWS)  # type: ignore[assignment]
        lower = CPUPrimaryTierOffloadingManager(
            ROWS, self.memory, cache_policy=policy, enable_events=True
        )
        self.files = NotingFiles(self.memory.rows, root)
        self.files.locality = Locality.LOCAL
        self.tiers = [self.files]
        self.real = TieringOffloadingManager(lower, [self.files])
        self.eye.real, self.eye.book = lower, self.book

    def move(self, name: str, dice: Dice) -> None:
        """One move; everything that it started is done before the look."""
        getattr(self, name)(dice)
        self.files.rest()
        self.look()

    def content(self, key: int) -> bytes:
        """The bytes of a chunk."""
        return bytes([key + 1]) * PAGE

    def _path(self, key: int) -> Path:
        return Path(self.files.file_mapper.get_file_name(self.names.keys[key]))

    def _with(self, dice: Dice, *values: int) -> int | None:
        keys = [key for key in range(KEYS) if self.book.object(key) in values]
        return dice.pick(keys) if keys else None

    def remove(self, dice: Dice) -> None:
        """A file goes."""
        key = self._with(dice, GOOD, DAMAGED)
        if key is not None:
            self._path(key).unlink()
            self.book.put(key, ABSENT)

    def cut(self, dice: Dice) -> None:
        """A file is cut short."""
        key = self._with(dice, GOOD)
        if key is not None:
            with self._path(key).open("r+b") as file:
                file.truncate(PAGE // 2)
            self.book.put(key, DAMAGED)

    def block(self, dice: Dice) -> None:
        """A folder cannot be made, so that nothing can be stored in it."""
        key = dice.number(0, KEYS - 1)
        folder = self._path(key).parents[1]
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.write_bytes(b"")
            self.book.blocked.add(key)

    def unblock(self, dice: Dice) -> None:
        """It can be made again."""
        for key in list(self.book.blocked):
            self._path(key).parents[1].unlink()
            self.book.blocked.discard(key)

    def reset(self, dice: Dice) -> None:
        """The cache is reset."""
        if dice.rarely(4):
            self.real.reset_cache()
            self.book.reset()
            self.stores.clear()

    def look(self) -> None:
        """All that can be compared is the same, files included."""
        super().look()
        for key in range(KEYS):
            path = self._path(key)
            found = ABSENT
            if path.is_file():
                found = GOOD if path.read_bytes() == self.content(key) else DAMAGED
            differ(f"file of key {key}", self.book.object(key), found)

    def close(self) -> None:
        """End the tier's threads."""
        self.files.shutdown()
        shutil.rmtree(self.root, ignore_errors=True)


def on_disk(policy: str, root: Path, **parts: Any) -> Make:
    """How to begin such a world in a folder of its own."""
    return partial(OnDisk, policy=policy, root=root, **parts)

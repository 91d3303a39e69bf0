# SPDX-License-Identifier: Apache-2.0
"""vLLM's `TieringOffloadingManager` over its real file tier, driven in lockstep with the machine.

Files and threads are real. To know what there is to compare, the tier's lookups wait for its
transfers, and each move waits for both; what the manager hears, and when, is as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import Locality, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvsafe.lifecycle.words import ABSENT, DAMAGED, GOOD
from tests.engine_unit.sealed_world import _spec
from tests.lockstep.book import DIVERGENCES
from tests.lockstep.compare import differ
from tests.lockstep.files import FileBook, OnFiles, wait_until
from tests.lockstep.hand import Tiered
from tests.lockstep.noting import Noting
from tests.lockstep.primary import KEYS, ROWS
from tests.lockstep.runs import Dice, Make
from tests.lockstep.tiers import Job, Report


class NotingFiles(Noting, FileSystemTierManager):
    """The real file tier; it notes what it is told and answers when its files are at rest."""

    def __init__(self, rows: memoryview, root: Path) -> None:
        super().__init__(
            _spec(), rows, "fs", root_dir=str(root), n_read_threads=1, n_write_threads=1
        )
        look = self._lookup_manager.batch_lookup

        def looked(keys: Any, context: ReqContext) -> Any:
            self._pool.wait_idle()
            return list(look(keys, context))

        self._lookup_manager.batch_lookup = looked

    def rest(self) -> None:
        """Wait until every transfer is done and every lookup answered."""
        self._pool.wait_idle()
        asked = self._lookup_manager
        if any(state.phase.name == "IN_FLIGHT" for state in asked._lookup_state.values()):
            wait_until(lambda: not asked._pending_results.empty(), "a lookup was not answered")

    def _note_job(self, what: str, job: TransferJob) -> None:
        super()._note_job(what, job)
        # One job after the other: what a store finds must not depend on threads.
        self._pool.wait_idle()


class DiskBook(FileBook):
    """The machine over vLLM's file tier.

    A batch stops at the first key that goes wrong (finding K); a file that is there is not
    written again, whatever is in it (finding K).
    """

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.blocked: set[int] = set()

    def lookup(self, who: int, key: int) -> str:
        """`lookup`, which may have to be repeated."""
        self.poll()
        if self.state.chunks[key] is None:
            self.ask(who, key)
        return super().lookup(who, key)

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
            self.put(0, key, ABSENT)
        return found == GOOD

    def fetch(self, job: Job, key: int) -> None:
        """What was read was whole; vLLM looks at no more than that."""
        self.fetch_as(0, key, GOOD)

    def _store(self, key: int) -> bool:
        if key in self.blocked:
            return False
        if self.object(key) == ABSENT:
            self.put(0, key, GOOD)
        return True

    def _hear(self) -> None:
        for reports in self._reports:
            for job, good in reports:
                for key in job.keys if job.load else ():
                    if key not in good and key in self.answers:
                        self.answers[key] = False
        super()._hear()


class OnDisk(OnFiles):
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
    row_bytes = 4096
    left_bytes, left_value = row_bytes // 2, DAMAGED

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
        self.book = self._new_book(DiskBook, policy, tiers=1, as_vllm=as_vllm)
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

    def _path(self, key: int) -> Path:
        return Path(self.files.file_mapper.get_file_name(self.names.keys[key]))

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

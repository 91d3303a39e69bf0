# SPDX-License-Identifier: Apache-2.0
"""Housekeeping beside the serving: sweeps, counts, time to live, recency, the reserve.

Nothing waits for it: lookups and loads go by name from the first moment. Stores wait for
the first count only where the account is not known (first start, or after a reboot).
"""

import errno
import os
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvsafe.tiers.calls import Os
from kvsafe.tiers.folders import Folders
from kvsafe.tiers.leases import DeadWriters, Lease, sweep_probes
from kvsafe.tiers.ledger import Ledger
from kvsafe.tiers.naming import HIDDEN
from kvsafe.tiers.outcome import GONE
from kvsafe.tiers.room import Candidate, Room, counted_bytes

TICK_S = 5.0
_SWEEP_S = 60.0
_COUNT_S = 3600.0
_TOUCHED_LIMIT = 1 << 16
_PAUSE_EVERY = 128
_PAUSE_S = 0.0005
_QUICK_S = 0.25
_COUNT_SHARE = 10
FRESH_S = 30.0
"""A file used less than this long ago is not marked as used again."""


@dataclass(slots=True)
class Counted:
    """What the last count found."""

    files: int = 0
    bytes: int = 0
    expired: int = 0
    seconds: float = 0.0


class Keeper:
    """The background thread of one store."""

    def __init__(
        self, calls: Os, folders: Folders, ledger: Ledger, lease: Lease, ttl_s: float | None
    ) -> None:
        self._calls = calls
        self._folders = folders
        self._ledger = ledger
        self._lease = lease
        self.ttl_s = ttl_s
        self.room: Room | None = None
        self.counted = Counted()
        self.counts = 0
        self.swept = 0
        self.errors: Counter[str] = Counter()
        self._touched: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = False
        self._done = threading.Condition()
        self._wanted = True
        self._failed = False
        self._asked = self._low = False
        self._last_look = self._last_count = float("-inf")
        self._thread = threading.Thread(target=self._run, name="kvsafe-fs-keeper", daemon=True)

    def start(self) -> None:
        """Begin; the first tick sweeps and counts."""
        self._thread.start()

    def want_count(self) -> None:
        """Ask for a count soon: the account is not known, or candidates run out."""
        self._wanted, self._failed = True, False
        self._asked = True
        self._wake.set()

    def ask_ahead(self) -> None:
        """Get room for the stores to come, now. Never waits."""
        self._low = True
        self._wake.set()

    def recount(self) -> None:
        """Ask for a count and, where counts are quick, wait for it."""
        before = self.counts
        self.want_count()
        if self.counted.seconds < _QUICK_S:
            self.wait_counted(before + 1, 4 * _QUICK_S)

    def touch(self, places: Iterable[tuple[str, str]]) -> None:
        """Note names as used; the marks are set in batches."""
        with self._lock:
            for place in places:
                self._touched[place] = None
                self._touched.move_to_end(place)
            while len(self._touched) > _TOUCHED_LIMIT:
                self._touched.popitem(last=False)

    def wait_counted(self, counts: int = 1, timeout_s: float = 30.0) -> bool:
        """Wait until `counts` counts have ended in all (for tests and commands)."""
        with self._done:
            return self._done.wait_for(lambda: self.counts >= counts, timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """End the thread; False if it is stuck in a call."""
        self._stop = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = float("-inf")
        while not self._stop:
            self._wake.clear()
            if self._low:
                self._low = False
                self._try(self._ask_ahead)
            if self._asked or self._calls.clock() >= due:
                self._asked = False
                self.tick()
                due = self._calls.clock() + self._pause()
            self._wake.wait(max(0.0, due - self._calls.clock()))

    def _pause(self) -> float:
        """Seconds to the next tick; less where a count is asked for and only had to wait."""
        if not self._wanted or self._failed:
            return TICK_S
        since = self._calls.clock() - self._last_count
        return min(TICK_S, max(0.01, _COUNT_SHARE * self.counted.seconds - since))

    def tick(self) -> None:
        """One round. A failed part is counted and tried again next time."""
        for part in (self._look_for_dead, self._mark_used, self._count, self._relieve):
            self._try(part)

    def _try(self, part: Callable[[], None]) -> None:
        try:
            if not self._stop:
                part()
        except Exception as exc:  # also a fault of our own: without rounds the store ends
            self.errors[f"{part.__name__}: {type(exc).__name__}"] += 1

    def _ask_ahead(self) -> None:
        if self.room is not None:
            self.room.ask_ahead()

    def _look_for_dead(self) -> None:
        """Whether a writer has ended without a word: then count, which removes what it left."""
        now = self._calls.clock()
        if now - self._last_look < _SWEEP_S or self._wanted:
            return
        self._last_look = now
        dead = DeadWriters(self._calls, self._folders, self._lease.name)
        self._wanted = bool(dead.names)
        dead.close(complete=False)

    def _relieve(self) -> None:
        if self.room is not None:
            self.room.relieve()
            self.room.return_idle()

    def _count(self) -> None:
        clock = self._calls.clock
        since = clock() - self._last_count
        often = min(_COUNT_S, max(TICK_S, self.ttl_s / 10)) if self.ttl_s else _COUNT_S
        if not self._wanted and since < often:
            return
        # Counting costs: however often it is asked for, a tenth of the time at most.
        if since < _COUNT_SHARE * self.counted.seconds or self.room is None:
            return
        self._wanted = False
        start = clock()
        self.counted = Counted()
        self._failed = True
        dead = DeadWriters(self._calls, self._folders, self._lease.name)
        complete = False
        try:
            begun = self._ledger.begin_count(dead.names)
            self.room.offer(self._candidates(dead))
            self._ledger.end_count(begun, self.counted.bytes)
            complete = True
            self._failed = False
        except OSError:
            self._wanted = True
            raise
        finally:
            dead.close(complete=complete)
            self.swept += dead.removed
            self.counted.seconds = clock() - start
            self._last_count = clock()
        self.swept += sweep_probes(self._calls, self._folders)
        with self._done:
            self.counts += 1
            self._done.notify_all()

    def _candidates(self, dead: DeadWriters) -> Iterator[Candidate]:
        seen = 0
        # Quarantine last: files move into it meanwhile, and must not be seen in neither place.
        for bucket in (*self._folders.bucket_names(), ""):
            entries = self._entries(bucket)
            seen += 1 + len(entries)
            if entries:
                with self._folders.bucket(bucket) as folder:
                    for name, info in entries:
                        if stat.S_ISREG(info.st_mode):
                            yield from self._candidate(bucket, folder, name, info, dead)
            if seen >= _PAUSE_EVERY:
                # Let the serving threads have the interpreter.
                seen = 0
                time.sleep(_PAUSE_S)

    def _entries(self, bucket: str) -> list[tuple[str, os.stat_result]]:
        """What is in a bucket. Raises `OSError` where that cannot be told: it may not be empty."""
        try:
            return self._listed(bucket)
        except OSError:
            # The one that was held open has been removed; another may stand at its name now.
            self._folders.forget_bucket(bucket)
            return self._listed(bucket)

    def _listed(self, bucket: str) -> list[tuple[str, os.stat_result]]:
        with self._folders.bucket(bucket) as folder:
            if bucket and not self._folders.stands(bucket, folder):
                raise FileNotFoundError(errno.ENOENT, "a bucket that is not at its name")
            return self._folders.listing(folder)

    def _candidate(
        self, bucket: str, folder: int, name: str, info: os.stat_result, dead: DeadWriters
    ) -> Iterator[Candidate]:
        """Count one file. It is no candidate if it is being written, or goes now."""
        if bucket and name.startswith(HIDDEN):
            if not dead.clear(folder, name):
                self.counted.bytes += counted_bytes(info)
        elif not (bucket and self.outlived(info) and self._remove(bucket, name)):
            self.counted.files += 1
            self.counted.bytes += counted_bytes(info)
            yield info.st_atime_ns, bucket, name

    def _remove(self, bucket: str, name: str) -> bool:
        """Remove a chunk that has outlived its time. What is in quarantine stays."""
        try:
            gone = self.room is not None and self.room.remove(bucket, name)
        except OSError:
            return False
        self.counted.expired += gone
        return True

    def outlived(self, info: os.stat_result) -> bool:
        """Whether a file was written longer ago than its time to live."""
        return self.ttl_s is not None and self._calls.now() - info.st_mtime > self.ttl_s

    def _mark_used(self) -> None:
        with self._lock:
            places, self._touched = self._touched, OrderedDict()
        for bucket, name in places:
            if self._stop:
                return
            self._mark_one(bucket, name)

    def _mark_one(self, bucket: str, name: str) -> None:
        try:
            with self._folders.bucket(bucket) as folder:
                fd = self._calls.open(folder, name, os.O_RDONLY)
            try:
                mark_used(self._calls, fd, self._calls.fstat(fd))
            finally:
                self._calls.release(fd)
        except OSError as exc:
            if exc.errno not in GONE:
                self.errors[f"touch: {exc.errno}"] += 1


def mark_used(calls: Os, fd: int, info: os.stat_result) -> None:
    """Set the time of last use, unless it is recent. The time of writing stays."""
    now = calls.now()
    if now - info.st_atime > FRESH_S:
        calls.utime(fd, int(now * 1e9), info.st_mtime_ns)

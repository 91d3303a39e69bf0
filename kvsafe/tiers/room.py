# SPDX-License-Identifier: Apache-2.0
"""Room to write: grants from the shared ledger, and eviction of what was used least lately.

A process takes room in grants of several rows, so that most writes ask nobody. Candidates
for eviction are the oldest few thousand names of the last listing, looked at again before
they go; so memory does not grow with the store, and recency lives in the files themselves.
"""

import heapq
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable

from kvsafe.tiers.calls import Os
from kvsafe.tiers.folders import Folders
from kvsafe.tiers.leases import Lease
from kvsafe.tiers.ledger import Account, Ledger, Limits, free_bytes, whole_pages
from kvsafe.tiers.outcome import GONE

CANDIDATES = 16384
_GRANT_BYTES = 128 << 20
_GRANT_ROWS = 128
"""At most so much is asked for, and evicted, at once."""
_MANY_ROWS = 8
_IDLE_ROUNDS = 12
"""Of the housekeeping, five seconds each."""
_ATTEMPTS = 4
_WAIT_S = 5.0
_LATER_NS = 1_000_000

Candidate = tuple[int, str, str]
"""(time of last use in ns, bucket or "" for quarantine, file name)"""


class Room:
    """The room of one process. Thread-safe."""

    def __init__(
        self,
        calls: Os,
        folders: Folders,
        ledger: Ledger,
        lease: Lease,
        limits: Limits,
        recount: Callable[[], object],
    ) -> None:
        self._calls = calls
        self._folders = folders
        self._ledger = ledger
        self._lease = lease
        self._limits = limits
        self._recount = recount
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._unspent = 0
        self._in_flight = 0
        self._more = True
        """Whether the last grant was given: else something has to go first."""
        self._ahead = False
        """Whether there was a grant since one was last asked for ahead."""
        self._idle_rounds = 0
        self._candidates: list[Candidate] = []
        self.evicted: Counter[str] = Counter()
        self.on_low: Callable[[], None] = lambda: None
        self.on_gone: Callable[[str], None] | None = None
        rows = limits.capacity // (64 * whole_pages(folders.row_bytes))
        rows = max(1, min(rows, _GRANT_ROWS, _GRANT_BYTES // whole_pages(folders.row_bytes)))
        self.grant_bytes = rows * whole_pages(folders.row_bytes)
        self._many_rows = rows >= _MANY_ROWS

    @property
    def held(self) -> int:
        """Bytes that this process may still write, in flight included."""
        with self._lock:
            return self._unspent + self._in_flight

    @property
    def short(self) -> bool:
        """Whether few candidates are left to evict."""
        return len(self._candidates) < CANDIDATES // 8

    def account(self) -> Account:
        """The shared account, as it is now."""
        return self._ledger.peek()

    def take(self, amount: int) -> bool:
        """Reserve `amount` bytes, evicting if need be. False if there is no room."""
        for attempt in range(_ATTEMPTS):
            if self._take_unspent(amount):
                return True
            if not self._asking.acquire(timeout=_WAIT_S):
                return False
            try:
                if self._take_unspent(amount):
                    return True
                if not self._ask(amount) and not self.evict(self._wanted(amount)):
                    self._recount()
                    if attempt:
                        return False
            finally:
                self._asking.release()
        return False

    def take_granted(self, amount: int, within_s: float) -> bool:
        """Reserve `amount` bytes that were granted, or are now. Nothing is evicted for them.

        Another thread of this process that is asking for the next grant is waited for `within_s`,
        and whoever else holds the ledger. Never raises `OSError`.
        """
        if self._take_unspent(amount):
            return True
        if not self._asking.acquire(timeout=within_s):
            return False
        try:
            if self._take_unspent(amount):
                return True
            return self._more and self._ask(amount, within_s) and self._take_unspent(amount)
        except OSError:
            self._more = False  # as far as is known
            return False
        finally:
            self._asking.release()

    @property
    def _is_low(self) -> bool:
        """Whether half of a grant is left, and it has use to ask for the next one.

        Never where a grant is a few rows: it would cost a thread a call for each.
        """
        return self._ahead and self._unspent * 2 <= self.grant_bytes and self._many_rows

    def ask_ahead(self) -> None:
        """Get the next grant, in the background, so that no store has to wait for it.

        If need be it evicts: a grant is a small part of a capacity. Raises `OSError`.
        """
        if not self._is_low or not self._asking.acquire(blocking=False):
            return
        self._ahead = False
        try:
            if not self._ask(self.grant_bytes) and self.evict(self.grant_bytes):
                self._ask(self.grant_bytes)
        finally:
            self._asking.release()

    def take_now(self, amount: int, count: int, within_s: float) -> int:
        """How many times `amount`, at most `count`, could be reserved, nearly without waiting.

        Not for a count, and for others only with nothing in hand, for `within_s`: another thread of
        this process, which is asking for the next grant then, or who holds the ledger. Never raises
        `OSError`.
        """
        taken = self._take_unspent_some(amount, count)
        try:
            while taken < count and self._take_one_now(amount, 0.0 if taken else within_s):
                taken += 1
                taken += self._take_unspent_some(amount, count - taken)
        except BaseException:
            self.give_back(taken * amount)
            raise
        return taken

    def _take_one_now(self, amount: int, within_s: float) -> bool:
        if not self._asking.acquire(timeout=within_s):
            return False
        try:
            if self._take_unspent(amount):
                return True
            granted = self._ask(amount, within_s) or (
                self.evict(self._wanted(amount)) and self._ask(amount, within_s)
            )
            return granted and self._take_unspent(amount)
        except OSError:
            return False
        finally:
            self._asking.release()

    def _take_unspent(self, amount: int) -> bool:
        return self._take_unspent_some(amount, 1) == 1

    def _take_unspent_some(self, amount: int, count: int) -> int:
        with self._lock:
            taken = min(count, self._unspent // amount)
            self._unspent -= taken * amount
            self._in_flight += taken * amount
            return taken

    def _wanted(self, amount: int) -> int:
        return max(amount, self.grant_bytes)

    def _ask(self, amount: int, within_s: float | None = None) -> bool:
        for want in sorted({self._wanted(amount), amount}, reverse=True):
            if self._ledger.grant(self._lease, want, lambda: self.held, self._limits, within_s):
                with self._lock:
                    self._unspent += want
                self._more = self._ahead = True
                return True
        self._more = False
        return False

    def spent(self, amount: int) -> None:
        """The reserved bytes are in a published file now. More is likely to come."""
        with self._lock:
            self._in_flight -= amount
        self._idle_rounds = 0
        if self._is_low:
            self.on_low()

    def give_back(self, amount: int) -> None:
        """The reserved bytes were not used, and nothing of them is on the disk."""
        with self._lock:
            self._in_flight -= amount
            self._unspent += amount

    def return_unspent(self) -> None:
        """Give unused grants back to everybody.

        Raises `OSError`: nobody knows then whether the account heard of it, so they are not used,
        and stay charged until a count.
        """
        with self._lock:
            amount, self._unspent = self._unspent, 0
        self._ledger.settle(self._lease, lambda: self.held, amount)

    def return_idle(self) -> None:
        """Once a round: give back what was granted when nothing was stored for many of them.

        Else processes that store no more would hold what others could use. Raises `OSError`.
        """
        self._idle_rounds += 1
        if self._idle_rounds >= _IDLE_ROUNDS and self._unspent:
            self._ahead = False
            self.return_unspent()

    def offer(self, candidates: Iterable[Candidate]) -> None:
        """Take the oldest names of a listing as candidates for eviction."""
        chosen = heapq.nsmallest(CANDIDATES, candidates)
        self._candidates = chosen  # sorted, so already a heap

    def offer_new(self, files: Iterable[tuple[str, str]]) -> None:
        """Take files that were just written as the newest candidates, while there is place.

        Bucket and name of each.
        """
        if len(self._candidates) >= CANDIDATES:
            return
        now = int(self._calls.now() * 1e9)
        for bucket, name in files:
            if len(self._candidates) < CANDIDATES:
                heapq.heappush(self._candidates, (now, bucket, name))

    def evict(self, amount: int) -> bool:
        """Remove least lately used files of `amount` bytes at least. True if any went.

        While the account is not known none goes: there may be room, and a count will tell.
        """
        account = self._ledger.peek()
        if not account.known:
            return False
        freed = 0
        for _ in range(2 * CANDIDATES):
            if freed >= amount or not self._candidates:
                break
            freed += self._evict_oldest()
        return freed > 0 and self._ledger.removed(freed, account.epoch)

    def _evict_oldest(self) -> int:
        try:
            used, bucket, name = heapq.heappop(self._candidates)
        except IndexError:
            return 0
        try:
            with self._folders.bucket(bucket) as folder:
                info = self._calls.stat(folder, name)
                if info.st_atime_ns > used + _LATER_NS:
                    heapq.heappush(self._candidates, (info.st_atime_ns, bucket, name))
                    return 0
                return self._remove(folder, bucket, name, info)
        except OSError as exc:
            if exc.errno not in GONE:
                self.evicted["failed"] += 1
            return 0

    def _remove(self, folder: int, bucket: str, name: str, info: os.stat_result) -> int:
        if not stat.S_ISREG(info.st_mode):
            return 0
        self._calls.unlink(folder, name)
        self.gone(bucket, name)
        self.evicted["chunk" if bucket else "quarantined"] += 1
        return self._charged(info)

    def _charged(self, info: os.stat_result) -> int:
        """What a removed file was charged: never more than a row, whatever it has become."""
        return min(whole_pages(info.st_size), whole_pages(self._folders.row_bytes))

    def remove(self, bucket: str, name: str) -> bool:
        """Remove one file and uncharge it. Raises `OSError`; False if it was gone."""
        epoch = self._ledger.peek().epoch
        try:
            with self._folders.bucket(bucket) as folder:
                info = self._calls.stat(folder, name)
                self._calls.unlink(folder, name)
        except FileNotFoundError:
            return False
        self.gone(bucket, name)
        if stat.S_ISREG(info.st_mode):
            self._ledger.removed(self._charged(info), epoch)
        return True

    def gone(self, bucket: str, name: str) -> None:
        """Tell whoever wants to know that a chunk is no longer at its name."""
        if bucket and self.on_gone is not None:
            self.on_gone(name)

    def relieve(self) -> None:
        """Evict when others have eaten into the reserve, or a smaller capacity was set."""
        over = self.account().charged - self._limits.capacity
        if self._limits.reserve:
            over = max(over, self._limits.reserve - free_bytes(self._calls, self._folders))
        if over > 0 and self._asking.acquire(timeout=_WAIT_S):
            try:
                self.evict(over)
            finally:
                self._asking.release()


def counted_bytes(info: os.stat_result) -> int:
    """What a file counts for in a count: no less than it holds."""
    return max(whole_pages(info.st_size), info.st_blocks * 512)

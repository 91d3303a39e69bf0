# SPDX-License-Identifier: Apache-2.0
"""A hand in a `kvsafe-fs` store, beside the engines that use it.

It has a lease and the ledger like every writer, but no keeper thread, no capacity of its
own and no wish to evict: it moves what it is told to move and removes what it is told to
remove. Removed bytes are not uncharged one by one, since what a file was charged cannot be
told from a file that may have been changed; `recount` lets the store's own count settle the
account afterwards. Until then it says too much, never too little.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from types import TracebackType
from typing import Self

from kvsafe.cli import UsageError
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.tiers import Os, StoreRefused
from kvsafe.tiers.folders import Folders
from kvsafe.tiers.keeper import Keeper
from kvsafe.tiers.leases import Lease
from kvsafe.tiers.ledger import Ledger, Limits
from kvsafe.tiers.outcome import GONE, FileId
from kvsafe.tiers.quarantine import Quarantine
from kvsafe.tiers.room import Room

__all__ = ["StoreHand"]

_NO_LIMIT = Limits(capacity=1 << 61, reserve=0)
_LOCK_WAIT_S = 10.0


class StoreHand:
    """Opens a store by its root; one thread at a time."""

    def __init__(self, root: str, calls: Os | None = None) -> None:
        """Raises `UsageError` for a store that is not this user's, or cannot be used."""
        self._calls = calls = calls or Os()
        try:
            self._folders = Folders(calls, root, 4096, int(RefusalKind.TIER_OBJECT))
        except StoreRefused as exc:
            raise UsageError(f"{exc} (run this as the user of the engine)") from None
        with contextlib.ExitStack() as held:
            held.callback(self._folders.close)
            try:
                self._assemble(calls, self._folders, held)
            except OSError as exc:
                raise UsageError(f"{root} cannot be used: {exc.strerror or exc}") from None
            self._held = held.pop_all()

    def _assemble(self, calls: Os, folders: Folders, held: contextlib.ExitStack) -> None:
        """Put the parts together; `held` lets go of what was opened."""
        self._ledger = Ledger(calls, folders, _LOCK_WAIT_S)
        held.callback(self._ledger.close)
        self._lease = Lease(calls, folders)
        held.callback(self._lease.close, clean=True)
        self._keeper = Keeper(calls, folders, self._ledger, self._lease, None)
        room = Room(calls, folders, self._ledger, self._lease, _NO_LIMIT, lambda: None)
        self._keeper.room = self._room = room
        self._quarantine = Quarantine(folders, room, "aside", Counter())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        clean = False
        with contextlib.suppress(OSError):
            self._room.return_unspent()
            clean = self._room.held == 0
        # Let go of in any case: a file that stays is cleared by whoever counts next, and a lock
        # that stayed would make that impossible for as long as this process lives.
        self._lease.close(clean=clean)
        self._held.close()

    def is_place(self, bucket: str, file: str) -> bool:
        """Whether the tier would look for a chunk here."""
        stem = file.partition(".")[0]
        try:
            return self._folders.place(bytes.fromhex(stem)) == (bucket, file)
        except ValueError:
            return False

    def move_aside(self, file: str, refusal: Refusal, seen: FileId, size: int) -> bool:
        """Move a chunk file into the quarantine, if it still is the one that was seen."""
        name = bytes.fromhex(file.partition(".")[0])
        try:
            # Minutes may have passed, and a file system may give a new file the old inode.
            bucket, _ = self._folders.place(name)
            with self._folders.bucket(bucket) as folder:
                if FileId.of(self._calls.stat(folder, file)) != seen:
                    return False
        except OSError:
            return False
        # What a newer file of this name would be charged, should it have to be put back.
        self._folders.row_bytes = max(4096, size)
        return self._quarantine.move(name, refusal.number, str(refusal), seen)

    def remove(self, bucket: str, file: str, seen: FileId) -> bool:
        """Remove one file, if it still is the one that was seen; the bucket "" is quarantine.

        Raises `OSError`; False if it was gone or is another one now.
        """
        try:
            with self._folders.bucket(bucket) as folder:
                if FileId.of(self._calls.stat(folder, file)) != seen:
                    return False
                self._calls.unlink(folder, file)
        except OSError as exc:
            if exc.errno in GONE:
                return False
            raise
        return True

    def recount(self) -> bool:
        """Count the store as its keeper does, which settles the account. False if it failed."""
        self._keeper.want_count()
        self._keeper.tick()
        return self._keeper.counts > 0

    @property
    def charged(self) -> int | None:
        """Bytes charged to the folder now; None where the account cannot be read."""
        try:
            return self._room.account().charged
        except OSError:
            return None

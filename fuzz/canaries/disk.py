# SPDX-License-Identifier: Apache-2.0
"""Seeded faults in the disk store."""

from __future__ import annotations

from typing import Any

from fuzz.canaries import Canary
from fuzz.canaries.tools import gone, instead
from kvsafe.tiers import calls, chunkfile, room, store, storing
from kvsafe.tiers.folders import Folders
from kvsafe.tiers.ledger import Ledger
from kvsafe.tiers.outcome import Answer, Outcome
from kvsafe.tiers.quarantine import Quarantine

_flaw = Folders.flaw
_get = store.ChunkStore.get


def _follows(self: Any, bucket: str, file: str) -> Any:
    import os

    with self.folders.bucket(bucket) as folder:
        return os.stat(file, dir_fd=folder)


def _any_length(self: Any, info: Any) -> Any:
    flaw = _flaw(self, info)
    return None if flaw is not None and flaw.field == "file bytes" else flaw


def _no_links(self: Any, info: Any) -> Any:
    flaw = _flaw(self, info)
    return None if flaw is not None and flaw.field == "file links" else flaw


def _short_is_whole(self: Any, fd: int, into: memoryview) -> None:
    self._calls.read(fd, into, 0)


def _short_write(self: Any, fd: int, row: memoryview) -> None:
    self._calls.write(fd, row, 0)


def _unread(self: Any, name: bytes, into: memoryview, judge: Any = None) -> Outcome:
    return _get(self, name, into, None)


def _plain_rename(self: Any, source: int, name: str, target: int, new_name: str) -> None:
    self.rename(source, name, target, new_name)


def _leaky_undo(self: Any, folder: int, temporary: str, outcome: Outcome, written: bool) -> Outcome:
    self._room.give_back(self._charge)
    return outcome


def _twice(self: Any, amount: int) -> None:
    with self._lock:
        self._in_flight -= amount
        self._unspent += 2 * amount


CANARIES = (
    Canary("a file of any length is a row", "disk", "the length is not compared", 200,
           instead(Folders, "flaw", _any_length)),
    Canary("a second name is no flaw", "disk", "a file of somebody else is moved or read", 400,
           instead(Folders, "flaw", _no_links)),
    Canary("links are followed", "disk", "what a link leads to is taken for ours", 400,
           instead(calls, "OPEN_FLAGS", 0o2000000 | 0o4000)),
    Canary("a short read is a whole one", "disk", "the rest of the buffer is an older row", 400,
           instead(chunkfile.Reader, "_fill", _short_is_whole)),
    Canary("a short write is a whole one", "disk", "a torn file is published", 3000,
           instead(chunkfile.Writer, "_fill", _short_write)),
    Canary("the judge is not asked", "disk", "what lies there is loaded unopened", 300,
           instead(store.ChunkStore, "get", _unread)),
    Canary("publishing replaces", "disk", "a good file is replaced", 300,
           instead(calls.Os, "publish", _plain_rename)),
    Canary("a failed store leaves its file", "disk", "temporaries stay, uncharged", 600,
           instead(storing.Storing, "undo", _leaky_undo)),
    Canary("room is given back twice", "disk", "the account falls below what lies there", 12000,
           instead(room.Room, "give_back", _twice)),
    Canary("a late store is published", "disk", "nobody asks whether the row is still wanted", 400,
           instead(store.ChunkStore, "put",
                   lambda self, name, row, *, wanted, right=store.ChunkStore.put: right(
                       self, name, row))),
    Canary("descriptors are not given back", "disk", "a folder's handle stays open", 300,
           gone(Folders, "close")),
    Canary("quarantine takes whatever is there", "disk", "a good chunk goes to quarantine", 6000,
           instead(Quarantine, "move_read",
                   lambda self, name, number, text: self.move(name, number, text, None))),
    Canary("removed bytes are uncharged twice", "disk", "the account falls too low", 400,
           instead(Ledger, "removed",
                   lambda self, amount, epoch, right=Ledger.removed: right(
                       self, 2 * amount, epoch))),
)  # fmt: skip

__all__ = ["CANARIES", "Answer"]

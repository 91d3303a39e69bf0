# SPDX-License-Identifier: Apache-2.0
"""The plain course of many files at once: what goes as it should, in a few calls for all.

What does not, for whatever reason, is undone, handed back (None) and taken the long way by
`ChunkStore`, one file at a time: this module refuses nothing, moves nothing into quarantine, waits
for no room, and serves nothing that is not a plain file of one row. Only built where `Batch` is.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvsafe.tiers.batch import ABSENT, ASIDE, PLAIN, Batch, Rule, check_lengths
from kvsafe.tiers.chunkfile import Sync
from kvsafe.tiers.folders import Folders
from kvsafe.tiers.handles import Handle
from kvsafe.tiers.keeper import FRESH_S
from kvsafe.tiers.making import Files, Made
from kvsafe.tiers.naming import Names
from kvsafe.tiers.order import Order
from kvsafe.tiers.outcome import LATE, PRESENT, FileId, Outcome
from kvsafe.tiers.storing import Storing

_SOON_S = 0.05
"""Far longer than another thread takes to ask for room."""
_NEW_FOLDERS = 64
"""So many folders, each maybe a read from the disk, are opened before names are looked for."""
_THERE = {PLAIN: True, ABSENT: False, ASIDE: None}


class PlainCourse:
    """Looks, reads and stores of one store folder that go as they should. Thread-safe.

    Names of several lengths in one call all go the long way.

    Args:
        direct: whether rows that begin on a page go past the page cache.
        ttl_s: how old a chunk may be, in seconds (None: any).
        batch_s: longest time in one call, in seconds; what is not begun by then is handed back.
    """

    def __init__(
        self,
        batch: Batch,
        folders: Folders,
        direct: bool,
        sync: Sync,
        ttl_s: float | None,
        batch_s: float,
    ) -> None:
        self._batch = batch
        self._calls = folders.calls
        self._folders = folders
        self._direct = direct
        self._sync = sync != "none"
        self._ttl_s = ttl_s
        self._batch_s = batch_s

    def look(self, names: Sequence[bytes], within_s: float) -> list[bool | None]:
        """Per name whether a chunk can be there, None for the long way, as far as time goes.

        At least one answer, where there is a name.
        """
        asked = Names.of(names)
        if asked is None:
            return [None] * len(names)
        handles = self._folders.take_all(asked.buckets, make=False, most_new=_NEW_FOLDERS)
        try:
            there = _with_folders(asked, handles)
            found = self._batch.look(there.folders, there.names, self._rule(within_s))
        finally:
            self._folders.drop_all(handles)
        # What is in a folder that is not there is not there.
        answers: list[bool | None] = [False if handle else None for handle in handles]
        for at, answer in zip(there.at, found, strict=False):
            answers[at] = _THERE[answer]
        return answers if len(found) == len(there) else answers[: there.at[len(found)]]

    def read(self, names: Sequence[bytes], into: Sequence[memoryview]) -> list[FileId | None]:
        """Fill buffers of one row each; per name the file it was, None for the long way."""
        answers: list[FileId | None] = [None] * len(names)
        with self._opened(names) as files:
            if not files:
                return answers
            seen = self._batch.read(
                files.folders, files.names, files.of(into), self._direct, self._rule()
            )
            for at, which in zip(files.at, seen, strict=True):
                answers[at] = which
        return answers

    def store(
        self, names: Sequence[bytes], rows: Sequence[memoryview], storing: Storing, order: Order
    ) -> list[Outcome | None]:
        """Store a row under each name; per name the outcome, None for the long way.

        Once the order is withdrawn no further file gets its name. Raises `ValueError` for a row of
        another length, before anything is begun.
        """
        check_lengths(rows, self._folders.row_bytes)
        answers: list[Outcome | None] = [None] * len(names)
        with self._opened(names, make=True) as files:
            if not files:
                return answers
            made, soon_s = Made(self._batch, storing), max(0.0, min(_SOON_S, self._batch_s / 4))
            try:
                if not made.begin_granted(files, soon_s):
                    # Something may have to go: for no more than what is not there already.
                    made.begin_now(self._standing(files, answers), soon_s)
                if made.files and order.more():
                    made.make(rows, self._direct, self._sync, self._rule(), order)
            finally:
                # Whatever happens, also a fault of our own: what was begun and has no name goes.
                made.end()
            made.answer(answers)
            self._settle(files, answers, storing, order)
        return answers

    def _standing(self, files: Files, answers: list[Outcome | None]) -> Files:
        """Answer for what is there; which files are to be made."""
        found = self._batch.look(files.folders, files.names, self._rule())
        for at, how in zip(files.at, found, strict=False):
            answers[at] = PRESENT if how == PLAIN else None
        return files.some([place for place, how in enumerate(found) if how == ABSENT])

    def _settle(
        self,
        files: Files,
        answers: list[Outcome | None],
        storing: Storing,
        order: Order,
    ) -> None:
        """Make the names of what is reported survive, if that is set, each folder once."""
        if not storing.settles:
            return
        reported = {
            at: folder
            for at, folder in zip(files.at, files.folders, strict=True)
            if answers[at] is not None
        }
        said = {
            folder: storing.settled_bucket(folder) if order.more() else LATE
            for folder in set(reported.values())
        }
        last = storing.settled_buckets() if reported and order.more() else None
        for at, folder in reported.items():
            answers[at] = said[folder] or last or answers[at]

    def copy(self, targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
        """Copy buffers of one length, each to each."""
        self._batch.copy(targets, sources)

    def _rule(self, within_s: float | None = None) -> Rule:
        return Rule.of(
            self._folders.row_bytes,
            self._calls.now(),
            self._calls.clock() + (self._batch_s if within_s is None else within_s),
            self._ttl_s,
            FRESH_S,
        )

    @contextmanager
    def _opened(self, names: Sequence[bytes], *, make: bool = False) -> Iterator[Files | None]:
        """Files whose bucket could be opened; the others are left out. None if all go alone."""
        asked = Names.of(names)
        if asked is None:
            yield None
            return
        handles = self._folders.take_all(asked.buckets, make)
        try:
            yield _with_folders(asked, handles)
        finally:
            self._folders.drop_all(handles)


def _with_folders(names: Names, handles: Sequence[Handle | None]) -> Files:
    """Those of some names whose bucket is open."""
    at = [at for at, one in enumerate(handles) if one and one.fd >= 0]
    return Files(at, [one.fd for one in handles if one and one.fd >= 0], names.some(at))

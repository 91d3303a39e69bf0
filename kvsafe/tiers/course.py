# SPDX-License-Identifier: Apache-2.0
"""The plain course of many files at once: what goes as it should, in a few calls for all.

What does not, for whatever reason, is undone, handed back (None) and taken the long way by
`ChunkStore`, one file at a time: this module refuses nothing, moves nothing into quarantine, waits
for no room, and serves nothing that is not a plain file of one row. Only built where `Batch` is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvsafe.tiers.batch import ABSENT, ASIDE, PLAIN, Batch, Rule, check_lengths
from kvsafe.tiers.chunkfile import Sync
from kvsafe.tiers.folders import Folders
from kvsafe.tiers.keeper import FRESH_S
from kvsafe.tiers.outcome import DONE, PRESENT, Answer, FileId, Outcome
from kvsafe.tiers.storing import Storing

Wanted = Callable[[], bool]


class PlainCourse:
    """Looks, reads and stores of one store folder that go as they should. Thread-safe.

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
        places = [self._folders.place(name) for name in names]
        buckets = [bucket for bucket, _ in places]
        handles = self._folders.take_all(buckets, make=False, most_new=_NEW_FOLDERS)
        try:
            rule = self._rule(within_s)
            there = [(at, one.fd) for at, one in enumerate(handles) if one and one.fd >= 0]
            files = [places[at][1].encode() for at, _ in there]
            found = self._batch.look([fd for _, fd in there], files, rule)
        finally:
            self._folders.drop_all(handles)
        # What is in a folder that is not there is not there.
        answers: list[bool | None] = [False if handle else None for handle in handles]
        for (at, _), answer in zip(there, found, strict=False):
            answers[at] = _THERE[answer]
        return answers if len(found) == len(there) else answers[: there[len(found)][0]]

    def read(self, names: Sequence[bytes], into: Sequence[memoryview]) -> list[FileId | None]:
        """Fill buffers of one row each; per name the file it was, None for the long way."""
        answers: list[FileId | None] = [None] * len(names)
        with self._opened(names) as files:
            buffers = [into[file.at] for file in files]
            seen = self._batch.read(
                [file.folder for file in files],
                [file.name.encode() for file in files],
                buffers,
                self._direct,
                self._rule(),
            )
            for file, which in zip(files, seen, strict=True):
                answers[file.at] = which
        return answers

    def store(
        self,
        names: Sequence[bytes],
        rows: Sequence[memoryview],
        storing: Storing,
        wanted: Wanted,
        more: Wanted,
    ) -> list[Outcome | None]:
        """Store a row under each name; per name the outcome, None for the long way.

        `more` begins a new part of the work, with a deadline of its own; False: it was given up.
        `wanted` is asked when all are written and before any is published. Raises `ValueError`
        for a row of another length, before anything is begun.
        """
        check_lengths(rows, self._folders.row_bytes)
        answers: list[Outcome | None] = [None] * len(names)
        with self._opened(names, make=True) as files:
            new = []
            for file, found in zip(files, self._found(files), strict=True):
                if found == PLAIN:
                    answers[file.at] = PRESENT
                elif found == ABSENT:
                    new.append(file)
            making = _Making(self._batch, storing, new)
            try:
                making.begin(max(0.0, min(_SOON_S, self._batch_s / 4)))
                if more():
                    how = self._direct, self._sync, self._rule()
                    making.write([rows[file.at] for file in making.begun], how)
                if more() and wanted():
                    making.publish()
            finally:
                # Whatever happens, also a fault of our own: what was begun and not published goes.
                making.undo()
            for file in making.published:
                answers[file.at] = DONE
            self._settle(files, answers, storing, more)
        return answers

    def _settle(
        self,
        files: Sequence["_File"],
        answers: list[Outcome | None],
        storing: Storing,
        more: Wanted,
    ) -> None:
        """Make the names of what is reported survive, if that is set, each folder once."""
        if not storing.settles:
            return
        reported = [file for file in files if answers[file.at] is not None]
        said = {
            folder: storing.settled_bucket(folder) if more() else _GIVEN_UP
            for folder in {file.folder for file in reported}
        }
        last = storing.settled_buckets() if reported and more() else None
        for file in reported:
            answers[file.at] = said[file.folder] or last or answers[file.at]

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

    def _found(self, files: Sequence["_File"]) -> list[int]:
        folders = [file.folder for file in files]
        found = self._batch.look(folders, [file.name.encode() for file in files], self._rule())
        return found + [ASIDE] * (len(files) - len(found))

    @contextmanager
    def _opened(self, names: Sequence[bytes], *, make: bool = False) -> Iterator[list["_File"]]:
        """Files whose bucket could be opened; the others are left out."""
        places = [self._folders.place(name) for name in names]
        handles = self._folders.take_all([bucket for bucket, _ in places], make)
        try:
            yield [
                _File(at, handle.fd, bucket, name)
                for at, (handle, (bucket, name)) in enumerate(zip(handles, places, strict=True))
                if handle and handle.fd >= 0
            ]
        finally:
            self._folders.drop_all(handles)


_GIVEN_UP = Outcome(Answer.LATE)
_SOON_S = 0.05
"""Far longer than another thread takes to ask for room."""
_NEW_FOLDERS = 64
"""So many folders, each maybe a read from the disk, are opened before names are looked for."""
_THERE = {PLAIN: True, ABSENT: False, ASIDE: None}


@dataclass(slots=True)
class _File:
    """One file of a batch: which name it is for, and where it is."""

    at: int
    folder: int
    bucket: str
    name: str
    temporary: str = ""


class _Making:
    """New files on their way: begun (room taken), written, published; or undone.

    Room is taken only as far as there is some: whoever waits for room with room in his hands
    waits for others who do the same.
    """

    def __init__(self, batch: Batch, storing: Storing, new: Sequence[_File]) -> None:
        self._batch = batch
        self._storing = storing
        self._new = new
        self.begun: list[_File] = []
        self._written: list[_File] = []
        self.published: list[_File] = []

    def begin(self, within_s: float) -> None:
        """Take room and a temporary name for each, as far as it goes."""
        self.begun = list(self._new[: self._storing.begin_now(len(self._new), within_s)])
        for file in self.begun:
            file.temporary = self._storing.temporary()

    def write(self, rows: Sequence[memoryview], how: tuple[bool, bool, Rule]) -> None:
        """Write each under its temporary name."""
        wrote = self._batch.write(
            [file.folder for file in self.begun],
            [file.temporary.encode() for file in self.begun],
            rows,
            *how,
        )
        self._written = _plain_ones(self.begun, wrote)

    def publish(self) -> None:
        """Give each that was written whole its name."""
        named = self._batch.publish(
            [file.folder for file in self._written],
            [file.temporary.encode() for file in self._written],
            [file.name.encode() for file in self._written],
        )
        self.published = _plain_ones(self._written, named)
        self._storing.spent([(file.bucket, file.name) for file in self.published])

    def undo(self) -> None:
        """Remove what has no name, and give its room back."""
        named = {file.at for file in self.published}
        whole = {file.at for file in self._written}
        for file in self.begun:
            if file.at not in named:
                self._storing.undo(file.folder, file.temporary, _GIVEN_UP, file.at in whole)


def _plain_ones(files: Sequence[_File], answers: Sequence[int]) -> list[_File]:
    return [file for file, answer in zip(files, answers, strict=True) if answer == PLAIN]

# SPDX-License-Identifier: Apache-2.0
"""The plain course of many files at once: what goes as it should, in a few calls for all.

What does not is handed back (None) and taken the long way by `ChunkStore`, one file at a time:
this module refuses nothing, moves nothing into quarantine, and serves nothing that is not a
plain file of one row. Only built where `Batch` is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvsafe.tiers.batch import ABSENT, ASIDE, PLAIN, Batch, Rule, error_of
from kvsafe.tiers.buffers import page_aligned
from kvsafe.tiers.chunkfile import Sync
from kvsafe.tiers.folders import Folders
from kvsafe.tiers.keeper import FRESH_S
from kvsafe.tiers.outcome import Answer, FileId, Outcome
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

    def look(self, names: Sequence[bytes]) -> list[bool | None]:
        """Per name whether a chunk can be there; None for the long way."""
        answers: list[bool | None] = [None] * len(names)
        with self._opened(names) as files:
            for file, found in zip(files, self._found(files), strict=True):
                answers[file.at] = None if found == ASIDE else found == PLAIN
        return answers

    def read(self, names: Sequence[bytes], into: Sequence[memoryview]) -> list[FileId | None]:
        """Fill buffers of one row each; per name the file it was, None for the long way."""
        answers: list[FileId | None] = [None] * len(names)
        with self._opened(names) as files:
            buffers = [into[file.at] for file in files]
            seen = self._batch.read(
                [file.folder for file in files],
                [file.name.encode() for file in files],
                buffers,
                self._direct and all(map(page_aligned, buffers)),
                self._rule(),
            )
            for file, which in zip(files, seen, strict=True):
                answers[file.at] = which
        return answers

    def store(
        self, names: Sequence[bytes], rows: Sequence[memoryview], storing: Storing, wanted: Wanted
    ) -> list[Outcome | None]:
        """Store a row under each name; per name the outcome, None for the long way.

        `wanted` is asked once, when all are written and before any is published.
        """
        answers: list[Outcome | None] = [None] * len(names)
        with self._opened(names, make=True) as files:
            new = []
            for file, found in zip(files, self._found(files), strict=True):
                if found == PLAIN:
                    answers[file.at] = storing.present(file.bucket)
                elif found == ABSENT:
                    answers[file.at] = short = storing.begin()
                    if short is None:
                        new.append(file)
            written = self._write(new, [rows[file.at] for file in new], storing, answers)
            if wanted():
                self._publish(written, storing, answers)
            else:
                for file in written:
                    answers[file.at] = storing.undo(*file.making, Outcome(Answer.LATE), True)
        return answers

    def _write(
        self,
        new: list["_File"],
        rows: list[memoryview],
        storing: Storing,
        answers: list[Outcome | None],
    ) -> list["_File"]:
        """Write files under temporary names; returns those that are whole."""
        for file in new:
            file.temporary = storing.temporary()
        wrote = self._batch.write(
            [file.folder for file in new],
            [file.temporary.encode() for file in new],
            rows,
            self._direct and all(map(page_aligned, rows)),
            self._sync,
            self._rule(),
        )
        whole = []
        for file, answer in zip(new, wrote, strict=True):
            if answer == PLAIN:
                whole.append(file)
            elif answer == ASIDE:  # a part of it, or nothing yet: the long way begins anew
                storing.undo(*file.making, Outcome(Answer.LATE), False)
            else:
                answers[file.at] = storing.failed(
                    file.folder, file.bucket, file.temporary, error_of(answer), False
                )
        return whole

    def _publish(
        self, written: list["_File"], storing: Storing, answers: list[Outcome | None]
    ) -> None:
        published = self._batch.publish(
            [file.folder for file in written],
            [file.temporary.encode() for file in written],
            [file.name.encode() for file in written],
        )
        for file, answer in zip(written, published, strict=True):
            if answer == PLAIN:
                answers[file.at] = storing.published(file.folder, file.bucket, file.name)
            else:
                answers[file.at] = storing.failed(
                    file.folder, file.bucket, file.temporary, error_of(answer), True
                )

    def copy(self, targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
        """Copy buffers of one length, each to each."""
        self._batch.copy(targets, sources)

    def _rule(self) -> Rule:
        return Rule.of(
            self._folders.row_bytes,
            self._calls.now(),
            self._calls.clock() + self._batch_s,
            self._ttl_s,
            FRESH_S,
        )

    def _found(self, files: Sequence["_File"]) -> list[int]:
        folders = [file.folder for file in files]
        return self._batch.look(folders, [file.name.encode() for file in files], self._rule())

    @contextmanager
    def _opened(self, names: Sequence[bytes], *, make: bool = False) -> Iterator[list["_File"]]:
        """Files whose bucket could be opened; the others are left out."""
        places = [self._folders.place(name) for name in names]
        handles = self._folders.take_all([bucket for bucket, _ in places], make)
        try:
            yield [
                _File(at, handle.fd, bucket, name)
                for at, (handle, (bucket, name)) in enumerate(zip(handles, places, strict=True))
                if handle is not None
            ]
        finally:
            self._folders.drop_all(handles)


@dataclass(slots=True)
class _File:
    """One file of a batch: which name it is for, and where it is."""

    at: int
    folder: int
    bucket: str
    name: str
    temporary: str = ""

    @property
    def making(self) -> tuple[int, str]:
        """Where it is while it is written."""
        return self.folder, self.temporary

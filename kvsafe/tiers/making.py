# SPDX-License-Identifier: Apache-2.0
"""New files of one batch on their way: their room, their names, and the end of what has none."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsafe.tiers.batch import ASIDE, PART, PLAIN, STANDS, WHOLE, Batch, Making, Rule, nothing_made
from kvsafe.tiers.naming import Names
from kvsafe.tiers.order import Order
from kvsafe.tiers.outcome import DONE, LATE, PRESENT, Outcome
from kvsafe.tiers.storing import Storing

_OUTCOMES = {PLAIN: DONE, STANDS: PRESENT}


@dataclass(frozen=True, slots=True)
class Files:
    """Files of one batch: which of its names they are for, their open folders, their names."""

    at: Sequence[int]
    folders: Sequence[int]
    names: Names

    def __len__(self) -> int:
        return len(self.at)

    def some(self, places: Sequence[int]) -> "Files":
        """Those at these places."""
        return Files(
            [self.at[place] for place in places],
            [self.folders[place] for place in places],
            self.names.some(places),
        )

    def of(self, rows: Sequence[memoryview]) -> Sequence[memoryview]:
        """The rows of these files, of those of the whole batch."""
        return rows if len(rows) == len(self) else [rows[at] for at in self.at]


class Made:
    """Room is taken for each, then they are made, then what has no name goes again.

    Room is taken only as far as there is some: whoever waits for room with room in his hands
    waits for others who do the same.
    """

    def __init__(self, batch: Batch, storing: Storing) -> None:
        self._batch = batch
        self._storing = storing
        self.files: Files | None = None
        """Those that there is room for."""
        self._taken = 0
        self._before, self._first = "", 0
        self._came: list[int] = []

    def begin_granted(self, files: Files, within_s: float) -> bool:
        """Take the room of all, if nothing has to go for it. What is there gives it back."""
        came = [ASIDE] * len(files)
        if not self._storing.begin_granted(len(files), within_s):
            return False
        self._taken, self.files, self._came = len(files), files, came
        return True

    def begin_now(self, files: Files, within_s: float) -> None:
        """Take room as far as it goes, evicting where there is none."""
        self._taken = self._storing.begin_now(len(files), within_s)
        self._came = [ASIDE] * self._taken
        if self._taken:
            self.files = files.some(range(self._taken))

    def make(
        self, rows: Sequence[memoryview], direct: bool, sync: bool, rule: Rule, order: Order
    ) -> None:
        """Make them. `rows` are those of the whole batch."""
        files = self.files
        if files is None:
            return
        self._before, self._first = self._storing.temporaries(len(files))
        came = nothing_made(len(files))
        try:
            self._batch.store(
                files.folders,
                files.names,
                files.of(rows),
                Making(self._before, self._first, direct, sync),
                rule,
                order.withdrawn,
                came,
            )
        finally:
            self._came = came[:]

    def end(self) -> None:
        """Remove what has no name; room is spent, or given back."""
        files, came = self.files, self._came
        if files is None:
            self._storing.not_needed(self._taken)
            return
        made = came.count(PLAIN)
        if made < len(came):
            self._storing.not_needed(came.count(STANDS) + came.count(ASIDE))
            for place, how in enumerate(came):
                if how in (PART, WHOLE):
                    temporary = f"{self._before}{self._first + place:x}"
                    self._storing.undo(files.folders[place], temporary, LATE, how == WHOLE)
        if made:
            names = files.names
            self._storing.spent(
                made,
                ((names.buckets[at], names.file(at)) for at in range(len(came)) if not came[at]),
            )

    def answer(self, answers: list[Outcome | None]) -> None:
        """What came of each, None for the long way."""
        if self.files is None:
            return
        if len(self.files) == len(answers) and not any(self._came):
            answers[:] = [DONE] * len(answers)  # as nearly always
        else:
            for at, how in zip(self.files.at, self._came, strict=True):
                answers[at] = _OUTCOMES.get(how)

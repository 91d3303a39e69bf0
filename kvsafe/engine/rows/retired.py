# SPDX-License-Identifier: Apache-2.0
"""Rows of transfers that a reset has overtaken: nobody gets them before the transfer has ended.

vLLM gives all rows away at once and has the workers wait for the old transfers in the next step.
By then a tier may already write into a row that a worker still reads, or a worker into a row that
a tier has just filled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


class RowStore(Protocol):
    """Who can take rows out of use."""

    def hold_back(self, rows: Iterable[int]) -> None:
        """Give these rows to nobody until they are returned."""
        ...

    def give_back(self, rows: Iterable[int]) -> None:
        """These rows may be used again."""
        ...


@dataclass(slots=True)
class _Transfer:
    rows: tuple[int, ...]
    workers: int


class TransferRows:
    """Which rows each transfer of the workers touches, from its building to its last report."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._running: dict[int, _Transfer] = {}
        self._retired: dict[int, _Transfer] = {}

    def begin(self, job: int, rows: Iterable[int]) -> None:
        """A transfer was built."""
        self._running[job] = _Transfer(tuple(rows), self._workers)

    def report(self, completed: Mapping[int, int], keeper: RowStore) -> None:
        """So many workers have ended these jobs; retired rows return with their last worker."""
        for job, count in completed.items():
            retired = job in self._retired
            transfers = self._retired if retired else self._running
            transfer = transfers.get(job)
            if transfer is None:
                continue
            transfer.workers -= count
            if transfer.workers <= 0:
                del transfers[job]
                if retired:
                    keeper.give_back(transfer.rows)

    def retire(self, keeper: RowStore) -> None:
        """Everything is about to be forgotten: keep the rows of what still runs apart."""
        for job, transfer in self._running.items():
            keeper.hold_back(transfer.rows)
            self._retired[job] = transfer
        self._running.clear()

    @property
    def owed(self) -> bool:
        """Whether retired rows still wait for a report."""
        return bool(self._retired)

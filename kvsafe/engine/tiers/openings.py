# SPDX-License-Identifier: Apache-2.0
"""Opening of what one tier brings, and the count of it: by the row, or many rows together."""

import time
from collections.abc import Sequence

from kvsafe.engine.counters import Counters
from kvsafe.engine.rows.epochs import EpochKeeper
from kvsafe.engine.station import Station
from kvsafe.seal.refusal import Refusal


class Openings:
    """Opens rows in the present epoch, for a tier of this label. Used by threads."""

    def __init__(
        self, station: Station, epochs: EpochKeeper, counters: Counters, label: str
    ) -> None:
        self._station = station
        self._epochs = epochs
        self._counters = counters
        self._label = label

    def open(self, key: bytes, row: memoryview) -> Refusal | None:
        """All ten steps on one row; None if it is right."""
        start = time.perf_counter()
        answer = self._station.open_row(row, key, self._epochs.epoch)
        if isinstance(answer, Refusal):
            return answer
        taken = time.perf_counter() - start
        self._counters.proven(self._label, answer.fixed.payload_bytes, taken)
        return None

    def right(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        """Per row whether it is right: all together, then what was not found so by itself."""
        start = time.perf_counter()
        found = self._station.right_rows(rows, keys, self._epochs.epoch)
        taken, count = time.perf_counter() - start, sum(found)
        if count:
            payload = self._station.seal_setting.layout.payload_bytes
            self._counters.proven(self._label, payload, taken / len(found), count)
        return [
            good or self.open(key, row) is None
            for good, key, row in zip(found, keys, rows, strict=True)
        ]

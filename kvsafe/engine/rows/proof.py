# SPDX-License-Identifier: Apache-2.0
"""The proof around a worker's copies: fence, tag, open. Wires `seal/` and `host/` to `device/`."""

import threading
import time
from dataclasses import dataclass

from kvsafe.device import RowPlan
from kvsafe.engine.rows.transfer import ProofCounts
from kvsafe.engine.station import Station
from kvsafe.host import HostRegion
from kvsafe.seal.refusal import Refusal, RefusalKind


@dataclass(frozen=True, slots=True)
class SealedRowPlan(RowPlan):
    """A row plan that knows which chunk, which allocation and which epoch it is for."""

    key: bytes
    generation: int
    epoch: int


class RowProof:
    """Proves the rows of one worker. Called from the copier's threads.

    Args:
        slot: index of this worker's slice in the layout.
        once: skip step 10 for a row that this process has proven or tagged itself in the
            present allocation. What that gives up: a bit that flips in host memory between
            two loads, or another process of this user that writes into the region.
    """

    def __init__(self, station: Station, region: HostRegion, slot: int, *, once: bool) -> None:
        self._station = station
        self._region = region
        self._slot = slot
        self._once = once
        self._sealer = station.slice_sealer(slot)
        self._slice_bytes = station.seal_setting.layout.slices[slot].length
        self._known: dict[int, int] = {}
        self._lock = threading.Lock()
        self._counts = ProofCounts()

    def fence(self, row: RowPlan) -> Refusal | None:
        """Whether the row still belongs to the job that the plan was made for."""
        if not isinstance(row, SealedRowPlan):
            return Refusal.of(RefusalKind.COPY_PLAN, "row", "a sealed row plan", "another plan")
        present = self._region.ledger.generation(row.row)
        if present != row.generation:
            return Refusal.of(RefusalKind.FENCE, "generation", row.generation, present)
        epoch = self._region.epoch
        if epoch != row.epoch:
            # A reset came after the job was issued: what it carries is revoked.
            return Refusal.of(RefusalKind.EPOCH_REVOKED, "epoch", epoch, row.epoch)
        return None

    def after_store(self, row: RowPlan) -> Refusal | None:
        """Tag the finished slice and leave the record, unless the row was given away."""
        if (late := self.fence(row)) is not None or not isinstance(row, SealedRowPlan):
            return late
        view = self._region.row(row.row)
        self._sealer.seal_slice(view, row.key, row.epoch, row.generation)
        with self._lock:
            self._counts.tagged += 1
            self._known[row.row] = row.generation
        return None

    def before_load(self, row: RowPlan) -> Refusal | None:
        """Steps 1 to 9 on the row and step 10 on this worker's slice."""
        if (late := self.fence(row)) is not None or not isinstance(row, SealedRowPlan):
            return late
        start = time.perf_counter()
        view = self._region.row(row.row)
        opener = self._station.opener()
        header = opener.open_header(view, row.key, row.epoch, (slot for slot, _ in row.blocks))
        if isinstance(header, Refusal):
            return header
        skip = self._once and self._known.get(row.row) == row.generation
        if not skip and (bad := opener.open_slice(view, header, self._slot)) is not None:
            return bad
        self._note_opened(row, 0 if skip else self._slice_bytes, time.perf_counter() - start)
        return None

    def take_counts(self) -> ProofCounts:
        """What was proven since the last call."""
        with self._lock:
            counts, self._counts = self._counts, ProofCounts()
        return counts

    def _note_opened(self, row: SealedRowPlan, verified: int, seconds: float) -> None:
        with self._lock:
            self._counts.opened += 1
            self._counts.bytes_verified += verified
            self._counts.seconds.append(seconds)
            self._known[row.row] = row.generation

# SPDX-License-Identifier: Apache-2.0
"""What scheduler and workers tell each other about transfers of sealed rows.

vLLM's `CPULoadStoreSpec` carries row numbers only, and its worker derives from a flat list
of block ids which block belongs to which place of a row; with several blocks per chunk and
a hole in the middle (sliding windows) that derivation is wrong. Here every row says which
key and which allocation it is, and which device block goes with which slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvsafe.seal.refusal import Refusal

SlotBlocks = tuple[tuple[int, int], ...]
"""(slot in the chunk, device block id), ascending by slot."""


class SealedRowsSpec(CPULoadStoreSpec):
    """Rows of one transfer, each with its key, generation, epoch and, once known, blocks.

    Attributes:
        keys: offload key of each row, in row order.
        generations: generation of each row when the transfer was prepared.
        epoch: epoch in which the transfer was prepared.
        blocks: per row the slots and device blocks; None until the scheduler half has
            derived them, and a worker refuses a spec in that state.
        withheld: why this transfer must fail without a copy, if it must.
        blamed: keys that a withheld load takes out of the primary tier.
    """

    block_ids: npt.NDArray[np.int32]

    def __init__(
        self, rows: Sequence[int], keys: Sequence[bytes], generations: Sequence[int], epoch: int
    ) -> None:
        super().__init__(list(rows))
        self.keys = list(keys)
        self.generations = list(generations)
        self.epoch = epoch
        self.blocks: list[SlotBlocks] | None = None
        self.withheld: Refusal | None = None
        self.blamed: list[bytes] = []

    def keep_only(self, indices: Sequence[int]) -> None:
        """Drop all rows but those at these positions."""
        self.block_ids = self.block_ids[list(indices)]
        self.keys = [self.keys[index] for index in indices]
        self.generations = [self.generations[index] for index in indices]
        if self.blocks is not None:
            self.blocks = [self.blocks[index] for index in indices]


@dataclass(frozen=True, slots=True)
class ChunkFailure:
    """One chunk of one job that a worker could not prove or copy."""

    job: int
    load: bool
    key: bytes
    refusal: Refusal


@dataclass
class ProofCounts:
    """What a worker has proven since its last report (chunks, bytes, seconds)."""

    opened: int = 0
    tagged: int = 0
    bytes_verified: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, other: "ProofCounts") -> None:
        """Add another count to this one."""
        self.opened += other.opened
        self.tagged += other.tagged
        self.bytes_verified += other.bytes_verified
        self.seconds.extend(other.seconds)


@dataclass
class KVSafeWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's completion report plus what failed and what was proven."""

    failures: list[ChunkFailure] = field(default_factory=list)
    counts: ProofCounts = field(default_factory=ProofCounts)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge the reports of two workers of one step."""
        merged = super().aggregate(other)
        counts = ProofCounts()
        counts.add(self.counts)
        failures = list(self.failures)
        if isinstance(other, KVSafeWorkerMetadata):
            counts.add(other.counts)
            failures.extend(other.failures)
        return KVSafeWorkerMetadata(
            completed_jobs=merged.completed_jobs,
            transfer_stats=merged.transfer_stats,
            failures=failures,
            counts=counts,
        )

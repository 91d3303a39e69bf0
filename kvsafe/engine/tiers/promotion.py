# SPDX-License-Identifier: Apache-2.0
"""A promotion under way: which chunk is in which row, and what has become of each."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob


@dataclass(slots=True)
class Promotion:
    """One load of a tier, from its submission until every row that it brought was judged.

    Attributes:
        keys: the row of each key.
        result: what the tier reported, once it has.
        order: the keys as they were submitted.
        right: keys whose bytes were opened in place (`in_place`), written by the tier's threads.
        opened: those of them that are in their rows, written by the tier's threads.
        waiting: proofs that have not ended.
        proven: keys whose rows were opened.
    """

    keys: dict[OffloadKey, int]
    result: JobResult | None = None
    order: tuple[OffloadKey, ...] = field(init=False)
    right: set[OffloadKey] = field(default_factory=set)
    opened: set[OffloadKey] = field(default_factory=set)
    waiting: int = 0
    proven: list[OffloadKey] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = tuple(self.keys)

    def job(self, given: TransferJob, name: Callable[[OffloadKey], OffloadKey]) -> TransferJob:
        """The load as the tier gets it: names for keys, each once, for the row that is proven."""
        rows = np.fromiter(self.keys.values(), np.int32, len(self.keys))
        return replace(given, keys=list(map(name, self.order)), chunk_ids=rows)

    def outcome(self) -> JobResult:
        """What the manager is told: only what was proven has arrived."""
        if self.result is None or not self.keys:
            return self.result or JobResult(job_id=-1, success=False)
        complete = len(self.proven) == len(self.keys)
        return replace(
            self.result,
            success=complete,
            successful_keys=None if complete else tuple(self.proven) or None,
        )

# SPDX-License-Identifier: Apache-2.0
"""How a disk store behaves."""

from dataclasses import dataclass
from typing import Literal

from kvsafe.tiers.chunkfile import Sync
from kvsafe.tiers.quarantine import Policy


@dataclass(frozen=True, slots=True)
class StoreSetting:
    """How a store behaves. Sizes in bytes, times in seconds.

    Attributes:
        flaw_number: refusal number of what is not even a regular file of one row.
        lock_wait_s: longest wait for the shared ledger.
        batch_s: longest time in one call for many files; what is left then goes by itself.
    """

    root: str
    row_bytes: int
    capacity_bytes: int
    reserve_bytes: int = 0
    ttl_s: float | None = None
    sync: Sync = "none"
    direct_io: Literal["auto", "on", "off"] = "auto"
    quarantine: Policy = "aside"
    flaw_number: int = 0
    lock_wait_s: float = 5.0
    batch_s: float = 2.5

# SPDX-License-Identifier: Apache-2.0
"""What lies behind the rows: stores that take whole rows and bring them back by name.

Pure: no engine, no torch, no keys. Names are opaque bytes, rows are opaque bytes, and a row
that comes back is opened by whoever asked for it, or by a `judge` that it hands in.
"""

from kvsafe.tiers.calls import Os
from kvsafe.tiers.folders import QUARANTINE, StoreRefused
from kvsafe.tiers.lookups import LookupDesk
from kvsafe.tiers.naming import SUFFIX
from kvsafe.tiers.order import Order
from kvsafe.tiers.outcome import Answer, Flaw, Outcome, Verdict
from kvsafe.tiers.pool import LOAD, LOOK, STORE, Pool, Ticket
from kvsafe.tiers.setting import StoreSetting
from kvsafe.tiers.store import ChunkStore

__all__ = [
    "LOAD",
    "LOOK",
    "QUARANTINE",
    "STORE",
    "SUFFIX",
    "Answer",
    "ChunkStore",
    "Flaw",
    "LookupDesk",
    "Order",
    "Os",
    "Outcome",
    "Pool",
    "StoreRefused",
    "StoreSetting",
    "Ticket",
    "Verdict",
]

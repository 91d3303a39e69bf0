# SPDX-License-Identifier: Apache-2.0
"""Host rows: the shared region, its ledger of row generations, and who is alive on it."""

from kvsafe.host.lease import GateError, sweep_dead_regions
from kvsafe.host.ledger import Ledger
from kvsafe.host.region import HostRegion, RegionError, RegionShape

__all__ = [
    "GateError",
    "HostRegion",
    "Ledger",
    "RegionError",
    "RegionShape",
    "sweep_dead_regions",
]

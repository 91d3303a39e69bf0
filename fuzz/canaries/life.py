# SPDX-License-Identifier: Apache-2.0
"""Seeded faults in the lifecycle's table, in the ledger of rows, and in the region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.canaries import Canary
from fuzz.canaries.tools import fed, gone, instead
from fuzz.patching import Patch
from fuzz.target import Target
from kvsafe.host import ledger, region
from kvsafe.lifecycle.mutants import MUTANTS
from kvsafe.seal import opening, sealing

_MACHINE = (
    ("a refcount slip", "unpinning forgets the counter", 200),
    ("a pin that stays", "a failed cascade keeps its pin", 400),
    ("an abort unpins at once", "an abort unpins its load at once (F19)", 400),
    ("pending is a hit", "a pending chunk is a hit", 200),
    ("ready before sealed", "ready when written, not when sealed", 200),
    ("pinned rows are evicted", "a store evicts pinned chunks", 2000),
    ("a row is freed twice", "a failed write frees its row twice", 400),
    ("a late store lands", "a late store lands (no generations)", 600),
    ("a reset keeps what it revoked", "a reset keeps idle chunks", 200),
    ("withdrawn is offered", "a refused chunk is not withdrawn", 400),
    ("a proof accepts any bytes", "a proof accepts any bytes", 400),
)


def _rule(name: str) -> Callable[[Patch, Target], None]:
    """The table with this fault of `kvsafe.lifecycle.mutants` in it."""
    [mutant] = [one for one in MUTANTS if one.name == name]

    def fault(patch: Patch, target: Target) -> None:
        walk: Any = target
        patch.set(walk, "_moves", walk._moves)
        walk.use(mutant.rules())

    return fault


_check_record = sealing._check_record

CANARIES = (
    *(Canary(name, "machine", f"kvsafe.lifecycle.mutants: {fault}", within, _rule(fault))
      for name, fault, within in _MACHINE),
    Canary("a generation is used again", "stations", "two allocations have one number", 60,
           instead(ledger.Ledger, "allocate",
                   lambda self, row: self._memory.__setitem__(row, 1 + self._memory[row] % 2)
                   or int(self._memory[row]))),
    Canary("records of any allocation count", "stations", "what nobody wrote is sealed", 400,
           instead(sealing, "_check_record",
                   lambda record, place, generation: _check_record(
                       record._replace(generation=generation), place, generation))),
    Canary("promotions do not ask for the epoch", "stations", "revoked chunks come back", 400,
           gone(opening, "_check_epoch")),
    Canary("promotions do not ask for the key", "stations", "an exchanged object is served", 600,
           gone(opening, "_check_key")),
    Canary("damage in a tier is served", "stations", "the payload of a promotion is not proven",
           1500, gone(opening.Opener, "open_slice")),
    Canary("any region is ours", "stations", "a region of another shape is joined", 1500,
           gone(region, "_check_front")),
    Canary("a row is the one before it", "stations", "rows overlap by one", 400,
           fed(region.HostRegion, "row", lambda self, index: (self, max(0, index - 1)))),
)  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""The ledger: which allocation of a row is the present one.

Each row has a generation, a number that no other allocation has: not of this row, not of
another, not in an earlier launch. A job carries the generation that it was issued for; the
worker compares before it copies and the sealer compares the writers' records, so a transfer
that comes late can neither write into nor complete a row that means something else by now,
and a record that a tier has brought into the row never passes for one of a new store. The
ledger lies beside the rows, not in them: tiers move whole rows and would overwrite it (see
`spec/decisions/`).
"""

import os
import struct

_ENTRY = struct.Struct("<Q")
ENTRY_BYTES = _ENTRY.size


def ledger_bytes(num_rows: int) -> int:
    """Bytes that the ledger of `num_rows` rows needs."""
    return ENTRY_BYTES * num_rows


class Ledger:
    """Generations of all rows, in shared memory (uint64 each, little-endian).

    Only the scheduler side calls `allocate`; every process may read. Numbers go up from a
    random start: counted from 1 for each row, those of another row or of an earlier launch,
    still to be read in promoted headers, would come again.
    """

    def __init__(self, memory: memoryview, num_rows: int) -> None:
        if len(memory) < ledger_bytes(num_rows):
            raise ValueError(f"a ledger of {num_rows} rows does not fit {len(memory)} bytes")
        self._memory = memory[: ledger_bytes(num_rows)].cast("Q")
        self._last = int.from_bytes(os.urandom(7), "little")

    def __len__(self) -> int:
        return len(self._memory)

    def generation(self, row: int) -> int:
        """The present generation of a row; 0 means that it was never allocated."""
        return int(self._memory[row])

    def allocate(self, row: int) -> int:
        """Begin a new allocation of a row; everything issued for it before is now late."""
        self._last += 1
        self._memory[row] = self._last
        return self._last

    def release(self) -> None:
        """Let go of the shared memory."""
        self._memory.release()

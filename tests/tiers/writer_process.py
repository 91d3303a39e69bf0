# SPDX-License-Identifier: Apache-2.0
"""A process that works on a store until its standard input ends or it is killed.

    python -m tests.tiers.writer_process ROOT CAPACITY SEED NAMES ROUNDS

It does ROUNDS at the least.

Prints "ready" when it begins, then one line of counts when it ends. Wrong bytes end it with
code 3.
"""

from __future__ import annotations

import json
import random
import select
import sys
from collections import Counter

from kvsafe.tiers import ChunkStore, StoreSetting
from tests.tiers.stores import ROW, name_of, row_of


class Refused:
    """The judge's verdict on wrong bytes."""

    number = 1001

    def __str__(self) -> str:
        return "wrong bytes"


def _wanted() -> bool:
    """Whether standard input is still open."""
    return not select.select([sys.stdin], [], [], 0)[0]


def main(arguments: list[str]) -> int:
    """Store, load, refuse and look at random."""
    root, capacity, seed, names, rounds = arguments[0], *map(int, arguments[1:])
    store = ChunkStore(StoreSetting(root, ROW, capacity))
    store.keeper.wait_counted()
    print("ready", flush=True)
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    buffer = memoryview(bytearray(ROW))
    done = 0
    while done < rounds or _wanted():
        done += 1
        number = rng.randrange(names)
        dice = rng.random()
        if dice < 0.5:
            outcome = store.put(name_of(number), memoryview(bytearray(row_of(number))))
            counts[f"put {outcome.answer.value}"] += 1
        elif dice < 0.9:
            outcome = store.get(name_of(number), buffer)
            counts[f"get {outcome.answer.value}"] += 1
            if outcome.good and bytes(buffer) != row_of(number):
                return 3
        elif dice < 0.95:
            # A refusal without a reason: the file goes, and is stored anew by somebody.
            outcome = store.get(name_of(number), buffer, lambda row: Refused())
            counts["refused"] += outcome.quarantined
        else:
            counts["looked"] += sum(store.look([name_of(number)]))
    store.close()
    print(json.dumps(counts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""What a writer does in a campaign: every path of the store once, and it says so.

`tell` gets one line before and after each step: `begin N` (the store of N begins), `kept N`
(it was reported as stored), `gone N` (it may be gone from now on).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fuzz.campaigns.aftermath import opened
from fuzz.campaigns.rows import ROW, judge_of, name_of, row_of
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.tiers import ChunkStore, Os

NUMBERS = 10
ROOMY = 64 * ROW
TIGHT = 6 * ROW

Tell = Callable[[str], None]


def work(root: Path, sync: str, capacity: int, calls: Os, tell: Tell) -> None:
    """Store, store again, load, refuse, quarantine, evict, count, mark, close."""
    store = opened(root, capacity, calls, sync=sync)
    for number in range(NUMBERS):
        put(store, number, tell)
    put(store, 1, tell)
    _load(store, 2)
    _refuse(store, 3, tell)
    put(store, 3, tell)
    _spoil(store, 4, tell)
    put(store, 4, tell)
    store.look([name_of(number) for number in range(NUMBERS)])
    store.touch([name_of(5)])
    store.keeper.recount()
    tell("gone 6")
    store.discard(name_of(6))
    put(store, NUMBERS, tell)
    store.close()


def put(store: ChunkStore, number: int, tell: Tell) -> None:
    """Store one chunk, saying so before and after."""
    tell(f"begin {number}")
    if store.put(name_of(number), memoryview(bytearray(row_of(number)))).good:
        tell(f"kept {number}")


def _load(store: ChunkStore, number: int) -> None:
    buffer = memoryview(bytearray(ROW))
    store.get(name_of(number), buffer, judge_of(number))


def _refuse(store: ChunkStore, number: int, tell: Tell) -> None:
    """A judge that refuses: the file goes to quarantine."""
    tell(f"gone {number}")
    refusal = Refusal.of(RefusalKind.PAYLOAD_TAG, "payload", "a", "b")
    store.get(name_of(number), memoryview(bytearray(ROW)), lambda row: refusal)


def _spoil(store: ChunkStore, number: int, tell: Tell) -> None:
    """A file that cannot be a chunk: the next store moves it away."""
    tell(f"gone {number}")
    bucket, file = store.folders.place(name_of(number))
    path = Path(store.setting.root) / "objects" / bucket / file
    if path.exists():
        path.chmod(0o644)

# SPDX-License-Identifier: Apache-2.0
"""Stores, rows and folders for the tests of the disk store."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsafe.tiers import ChunkStore, Os, StoreSetting

ROW = 8192
MIB = 1 << 20
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder in memory, where there is one."""


def name_of(number: int) -> bytes:
    """An object name as long as the engine's, spread over the buckets."""
    return random.Random(number).randbytes(32) + bytes(4)


def row_of(number: int, length: int = ROW) -> bytes:
    """A row that tells its number: no two are alike."""
    return random.Random(-number - 1).randbytes(length)


def setting(root: Path, **changes: Any) -> StoreSetting:
    """A setting with small rows and much room."""
    chosen: dict[str, Any] = {"row_bytes": ROW, "capacity_bytes": 64 * MIB, **changes}
    return StoreSetting(str(root), **chosen)


@contextlib.contextmanager
def store_at(root: Path, calls: Os | None = None, **changes: Any) -> Iterator[ChunkStore]:
    """An open store whose first count is over."""
    store = ChunkStore(setting(root, **changes), calls)
    try:
        assert store.keeper.wait_counted()
        yield store
    finally:
        store.close()


def put(store: ChunkStore, number: int) -> Any:
    """Store row `number` under name `number`."""
    length = store.setting.row_bytes
    return store.put(name_of(number), memoryview(bytearray(row_of(number, length))))


def get(store: ChunkStore, number: int, judge: Any = None) -> tuple[Any, bytes]:
    """Outcome and bytes of name `number`."""
    buffer = bytearray(store.setting.row_bytes)
    outcome = store.get(name_of(number), memoryview(buffer), judge)
    return outcome, bytes(buffer)


def holds(store: ChunkStore, number: int) -> bool:
    """Whether the right bytes come back. Wrong bytes are a failure at once."""
    outcome, data = get(store, number)
    if outcome.good:
        assert data == row_of(number, store.setting.row_bytes)
    return bool(outcome.good)


def path_of(store: ChunkStore, number: int) -> Path:
    """Where chunk `number` lies."""
    bucket, file = store.folders.place(name_of(number))
    return Path(store.setting.root) / "objects" / bucket / file


def quarantined(root: Path) -> list[Path]:
    """What lies in quarantine."""
    return sorted((root / "kvsafe-quarantine").iterdir())


def temporaries(root: Path) -> list[Path]:
    """Files that are being written, or were left."""
    return [path for path in (root / "objects").rglob(".*") if path.is_file()]


def used(root: Path) -> int:
    """Bytes in files below the root, the ledger and the leases left out."""
    return sum(_sizes(root).values())


def _sizes(root: Path) -> dict[int, int]:
    found = {}
    for part in ("objects", "kvsafe-quarantine"):
        for folder, _, files in os.walk(root / part):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    info = os.lstat(os.path.join(folder, file))
                    found[info.st_ino] = info.st_size
    return found

# SPDX-License-Identifier: Apache-2.0
"""What a store looks like after something went wrong: opened anew, and judged in full.

`reopen` is the same for every campaign: whatever happened before, a store that is opened
over the folder serves nothing wrong, shows nothing that it cannot bring, keeps its account
at or above what is there, clears what the dead have left, and stores again.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.campaigns.rows import ROW, is_content_of, judge_of, name_of, row_of
from kvsafe.tiers import Answer, ChunkStore, Os, StoreRefused, StoreSetting
from kvsafe.tiers.batch import Batch

HEAL = 1_000_000
"""The number of a chunk that no workload stores: the reopened store stores it."""

_LEDGER = struct.Struct("<8s16sQQQQQ")


@dataclass
class Findings:
    """What one or many looks have found. Lists hold one sentence per fault."""

    looks: int = 0
    chunks: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    most_leftovers: int = 0
    wrong: list[str] = field(default_factory=list)
    phantom: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    account: list[str] = field(default_factory=list)
    leftover: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Every fault as one sentence."""
        lists = ("wrong", "phantom", "lost", "account", "leftover", "other")
        return [f"{name}: {text}" for name in lists for text in getattr(self, name)]

    def report(self) -> dict[str, object]:
        """Counts for a line or a document."""
        return {
            "looks": self.looks,
            "chunks opened": self.chunks,
            "refused": sum(self.refused.values()),
            "most leftovers": self.most_leftovers,
            "wrong": len(self.wrong),
            "phantom": len(self.phantom),
            "lost": len(self.lost),
            "account": len(self.account),
            "leftover": len(self.leftover),
            "other": len(self.other),
        }


@dataclass(frozen=True)
class Known:
    """What the campaign knows of the folder.

    Attributes:
        begun: numbers whose store was begun at any time.
        kept: numbers that must be there and open.
        whole: whether every file at a chunk's name must open.
        capacity: bytes that the folder may hold.
    """

    begun: Collection[int]
    kept: Collection[int] = ()
    whole: bool = True
    capacity: int = 1 << 30
    label: str = ""


def setting(root: Path, capacity: int, **changes: object) -> StoreSetting:
    """A setting for rows of the campaigns."""
    chosen: dict[str, object] = {"lock_wait_s": 2.0, "flaw_number": 1202, **changes}
    return StoreSetting(str(root), ROW, capacity, **chosen)  # type: ignore[arg-type]


def opened(
    root: Path,
    capacity: int,
    calls: Os | None = None,
    batch: Batch | None = None,
    **changes: object,
) -> ChunkStore:
    """A store whose first count is over. Raises `TimeoutError` if it does not end."""
    store = ChunkStore(setting(root, capacity, **changes), calls, batch)
    if not store.keeper.wait_counted(1, 60.0):
        store.close()
        raise TimeoutError("the first count did not end")
    return store


def used(root: Path, *, blocks: bool = False) -> int:
    """Bytes in chunk files, temporaries and quarantine (each file once, however often named).

    With `blocks` also what the file system spends on them: notes in quarantine take a block.
    """
    sizes = {}
    for part in ("objects", "kvsafe-quarantine"):
        for folder, _, files in os.walk(root / part):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    info = os.lstat(os.path.join(folder, file))
                    spent = info.st_blocks * 512 if blocks else 0
                    sizes[info.st_ino] = max(-(-info.st_size // 4096) * 4096, spent)
    return sum(sizes.values())


def temporaries(root: Path) -> list[Path]:
    """Files that are being written, or were left."""
    objects = root / "objects"
    return [path for path in objects.rglob(".*") if path.is_file()] if objects.exists() else []


def charged_on_disk(root: Path) -> int | None:
    """What the ledger file says is charged; None while no count has made it known."""
    try:
        data = (root / "ledger").read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != _LEDGER.size + 4:
        return None
    record, crc = data[: _LEDGER.size], int.from_bytes(data[_LEDGER.size :], "little")
    _, _, known, charged, *_ = _LEDGER.unpack(record)
    return int(charged) if known and crc == zlib.crc32(record) else None


def before_reopening(root: Path, known: Known, found: Findings, dead_writers: int) -> None:
    """Look at the folder as the dead have left it."""
    charged, present = charged_on_disk(root), used(root)
    if charged is not None and charged < present:
        found.account.append(f"{known.label}: charged {charged}, there {present}")
    if present > known.capacity:
        found.account.append(f"{known.label}: {present} bytes of {known.capacity}")
    left = len(temporaries(root))
    found.most_leftovers = max(found.most_leftovers, left)
    if left > dead_writers:
        found.leftover.append(f"{known.label}: {left} temporaries of {dead_writers} writers")


def reopen(root: Path, known: Known, found: Findings) -> None:
    """Open the store anew and judge everything in it."""
    found.looks += 1
    try:
        store = opened(root, known.capacity)
    except (StoreRefused, TimeoutError) as exc:
        found.other.append(f"{known.label}: cannot be opened anew: {exc}")
        return
    with contextlib.closing(store):
        _judge_files(root, known, found)
        for number in known.begun:
            _judge_one(store, number, known, found)
        _judge_account(root, store, known, found)
        _heal(store, known, found)


def _judge_files(root: Path, known: Known, found: Findings) -> None:
    wanted = {name_of(number).hex() + ".chunk" for number in known.begun}
    for path in (root / "objects").rglob("*"):
        if path.is_file() and not path.name.startswith(".") and path.name not in wanted:
            found.phantom.append(f"{known.label}: {path.name} was never stored")
    if left := temporaries(root):
        found.leftover.append(f"{known.label}: {len(left)} temporaries after a count")
    if len(list((root / "leases").iterdir())) != 1:
        found.leftover.append(f"{known.label}: leases of the dead after a count")


def _judge_one(store: ChunkStore, number: int, known: Known, found: Findings) -> None:
    seen = store.look([name_of(number)])[0]
    buffer = memoryview(bytearray(ROW))
    outcome = store.get(name_of(number), buffer, judge_of(number))
    label = f"{known.label}: chunk {number}"
    if outcome.good:
        found.chunks += 1
        if not is_content_of(number, buffer):
            found.wrong.append(f"{label}: accepted, and not what was stored")
        return
    if outcome.answer is Answer.REFUSED:
        found.refused[outcome.why.split(":")[0]] += 1
        if known.whole:
            found.phantom.append(f"{label}: refused, {outcome.why}")
    elif seen:
        found.phantom.append(f"{label}: seen, but {outcome.answer.value}")
    if number in known.kept:
        found.lost.append(f"{label}: {outcome.answer.value} {outcome.why}")


def _judge_account(root: Path, store: ChunkStore, known: Known, found: Findings) -> None:
    store.keeper.recount()
    store.room.return_unspent()
    present, charged = used(root), store.charged
    if not present <= charged <= known.capacity:
        found.account.append(f"{known.label}: after a count: charged {charged}, there {present}")
    if (over := charged - used(root, blocks=True)) > 0:
        found.account.append(f"{known.label}: {over} bytes stay charged for nothing")


def _heal(store: ChunkStore, known: Known, found: Findings) -> None:
    outcome = store.put(name_of(HEAL), memoryview(bytearray(row_of(HEAL))))
    buffer = memoryview(bytearray(ROW))
    back = store.get(name_of(HEAL), buffer, judge_of(HEAL))
    if not (outcome.good and back.good and is_content_of(HEAL, buffer)):
        found.other.append(f"{known.label}: does not store again: {outcome} {back}")

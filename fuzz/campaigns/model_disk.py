# SPDX-License-Identifier: Apache-2.0
"""A disk that remembers what was synced, and every folder that a power loss may leave.

The model stands at the `Os` seam: each call runs for real and is noted. What it promises is
what POSIX promises and no more:

- `fdatasync`, `fsync` of a file: its bytes and its length are stable. Its name is not.
- `fsync` of a folder: the names in that folder are stable, as they are now.
- Anything else may or may not have reached the disk: each page of an unsynced file is
  there, zero, absent (a shorter file) or torn at a sector; each unsynced change of a name
  has happened or not. One rename is one change, in both folders.

A disk in order (`ordered`) loses a tail of the changes of names only, and any sync makes
all earlier ones stable, as journaling file systems have it; without it any subset may be lost.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from kvsafe.tiers import Os

P = ParamSpec("P")
R = TypeVar("R")
PAGE = 4096
SECTOR = 512


@dataclass(eq=False)
class Blob:
    """A file: its bytes now, what is stable, and which pages are not."""

    now: bytearray = field(default_factory=bytearray)
    stable: bytes = b""
    dirty: set[int] = field(default_factory=set)

    def write(self, data: bytes, offset: int) -> None:
        """Bytes that were taken by a write."""
        end = offset + len(data)
        if len(self.now) < end:
            self.now.extend(bytes(end - len(self.now)))
        self.now[offset:end] = data
        self.dirty.update(range(offset // PAGE, -(-end // PAGE)))

    def sync(self) -> None:
        """Everything is stable."""
        self.stable, self.dirty = bytes(self.now), set()


@dataclass(eq=False)
class Folder:
    """A folder: its names now, and the stable ones."""

    now: dict[str, Blob | Folder] = field(default_factory=dict)
    stable: dict[str, Blob | Folder] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Change:
    """One change of names: (folder, name, what stands there now or None), all or nothing."""

    parts: tuple[tuple[Folder, str, Blob | Folder | None], ...]


class ModelOs(Os):
    """Real calls, noted one at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.RLock()
        self.above = Folder()
        self.changes: list[Change] = []
        self._log: list[Change] = []
        self._floor = 0
        self._open: dict[int, Blob | Folder] = {}
        self.on_call: Callable[[str], None] = lambda what: None

    def call(self, what: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            result = function(*args, **kwargs)
            note = getattr(self, f"_note_{what}", None)
            if note is not None:
                note(args, kwargs, result)
            if note is not None:
                self.on_call(what)
            return result

    def _change(self, *parts: tuple[Folder, str, Blob | Folder | None]) -> None:
        for folder, name, node in parts:
            if node is None:
                folder.now.pop(name, None)
            else:
                folder.now[name] = node
        self.changes.append(Change(parts))
        self._log.append(Change(parts))

    def settle(self) -> None:
        """Everything is stable, as after a long time."""
        with self._lock:
            self._floor, self.changes = len(self._log), []
            _settle(self.above)

    def rest(self) -> None:
        """No look any more: waits for one that runs, in whichever thread."""
        with self._lock:
            self.on_call = lambda what: None

    def _folder(self, fd: int) -> Folder:
        node = self._open[fd]
        if not isinstance(node, Folder):
            raise TypeError("a file is used as a folder")
        return node

    # ---- what the calls do, in the order of `kvsafe/tiers/calls.py`

    def _note_open(self, args: Any, kwargs: Any, fd: int) -> None:
        name, flags = args[0], args[1]
        folder = self._folder(kwargs["dir_fd"])
        if name in (".", ".."):
            self._open[fd] = folder if name == "." else self.above
            return
        if name not in folder.now and flags & os.O_CREAT:
            self._change((folder, name, Blob()))
        self._open[fd] = folder.now[name]

    def _note_open_root(self, args: Any, kwargs: Any, fd: int) -> None:
        self._open[fd] = self.above.now.setdefault("root", Folder())

    def _note_make_root(self, args: Any, kwargs: Any, result: None) -> None:
        self._change((self.above, "root", Folder()))

    def _note_close(self, args: Any, kwargs: Any, result: None) -> None:
        self._open.pop(args[0], None)

    def _note_write(self, args: Any, kwargs: Any, taken: int) -> None:
        node = self._open[args[0]]
        if isinstance(node, Blob):
            node.write(bytes(args[1][:taken]), args[2])

    def _note_fdatasync(self, args: Any, kwargs: Any, result: None) -> None:
        node = self._open[args[0]]
        self._floor = len(self._log)
        if isinstance(node, Blob):
            node.sync()

    def _note_fsync(self, args: Any, kwargs: Any, result: None) -> None:
        node = self._open[args[0]]
        self._floor = len(self._log)
        if isinstance(node, Blob):
            node.sync()
            return
        node.stable = dict(node.now)
        self.changes = [
            Change(left)
            for change in self.changes
            if (left := tuple(part for part in change.parts if part[0] is not node))
        ]

    def _note_publish(self, args: Any, kwargs: Any, result: None) -> None:
        source, name, target, new_name = args
        here, there = self._folder(source), self._folder(target)
        self._change((there, new_name, here.now[name]), (here, name, None))

    def _note_rename(self, args: Any, kwargs: Any, result: None) -> None:
        here, there = self._folder(kwargs["src_dir_fd"]), self._folder(kwargs["dst_dir_fd"])
        self._change((there, args[1], here.now[args[0]]), (here, args[0], None))

    def _note_unlink(self, args: Any, kwargs: Any, result: None) -> None:
        self._change((self._folder(kwargs["dir_fd"]), args[0], None))

    def _note_mkdir(self, args: Any, kwargs: Any, result: None) -> None:
        self._change((self._folder(kwargs["dir_fd"]), args[0], Folder()))

    # ---- what a power loss leaves

    def lose(self, rng: random.Random, ordered: bool, data: str, target: Path) -> None:
        """Write one folder that a power loss now may leave to `target/root`.

        `data` says what becomes of unsynced pages: `kept`, `lost` (absent), `zeroed`, `torn`
        or `mixed`.
        """
        with self._lock:
            if ordered:
                names = _replayed(self._log[: rng.randint(self._floor, len(self._log))], {})
            else:
                share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
                survivors = [change for change in self.changes if rng.random() < share]
                names = _replayed(survivors, _stable_names(self.above))
            lay_down(self.above, target, names, rng, data)


Names = dict[int, dict[str, Blob | Folder]]
"""What stands in each folder, by the folder's identity."""


def _replayed(changes: Iterable[Change], names: Names) -> Names:
    for change in changes:
        for folder, name, node in change.parts:
            inside = names.setdefault(id(folder), {})
            if node is None:
                inside.pop(name, None)
            else:
                inside[name] = node
    return names


def _stable_names(folder: Folder) -> Names:
    """The stable names of every folder that can be reached now or on the disk."""
    names: Names = {}
    todo: list[Folder] = [folder]
    while todo:
        one = todo.pop()
        if id(one) in names:
            continue
        names[id(one)] = dict(one.stable)
        inside = (*one.now.values(), *one.stable.values())
        todo += [node for node in inside if isinstance(node, Folder)]
    return names


def _settle(folder: Folder) -> None:
    folder.stable = dict(folder.now)
    for node in folder.now.values():
        if isinstance(node, Folder):
            _settle(node)
        else:
            node.sync()


def lay_down(folder: Folder, target: Path, names: Names, rng: random.Random, data: str) -> None:
    """Make a folder and everything in it for real, as the names and pages survived."""
    target.mkdir(mode=0o700)
    for name, node in names.get(id(folder), {}).items():
        if isinstance(node, Folder):
            lay_down(node, target / name, names, rng, data)
        else:
            path = target / name
            path.write_bytes(after_loss(node, rng, data))
            path.chmod(0o600)


def after_loss(blob: Blob, rng: random.Random, data: str) -> bytes:
    """What a file may hold after a power loss."""
    if not blob.dirty:
        return bytes(blob.now)
    kind = rng.choice(("kept", "lost", "zeroed", "torn")) if data == "mixed" else data
    if kind == "kept":
        return bytes(blob.now)
    if kind == "lost":
        return (
            blob.stable if rng.random() < 0.5 else bytes(blob.now[: rng.randint(0, len(blob.now))])
        )
    old = blob.stable.ljust(len(blob.now), b"\0")
    image = bytearray(blob.now)
    for page in blob.dirty:
        begin, end = page * PAGE, min((page + 1) * PAGE, len(image))
        if kind == "torn":
            begin += SECTOR * rng.randint(0, PAGE // SECTOR)
        elif rng.random() < 0.3:
            continue
        image[begin:end] = old[begin:end]
    return bytes(image)

# SPDX-License-Identifier: Apache-2.0
"""Moving refused files into the quarantine of their tier, named as the tier would name them.

A file that was exchanged since it was read is another file, and stays. What speaks of the
reader and not of the bytes (version, suite, key id: step 2) stays as well: with the wrong
key file in hand every chunk looks like that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from typing import Protocol

from kvsafe.cli import UsageError
from kvsafe.cli.inspect.advice import OF_THE_READER
from kvsafe.cli.inspect.reading import Examined
from kvsafe.cli.inspect.tree import Entry, Tree, in_vllm_folder
from kvsafe.cli.purge.hand import StoreHand
from kvsafe.seal.refusal import Refusal
from kvsafe.tiers import QUARANTINE
from kvsafe.tiers.calls import OPEN_FLAGS, rename_new
from kvsafe.tiers.outcome import FileId

__all__ = ["MOVED", "Aside", "PlainAside", "StoreAside", "open_aside"]

MOVED = "moved aside"
_ELSEWHERE = "left: not where the tier would look for a chunk"
_NEWER = "left: it could not be moved, or is another file by now"


class Aside(Protocol):
    """The quarantine of one tier."""

    def move(self, entry: Entry, found: Examined) -> str:
        """Move one refused file; returns `MOVED`, or why it was left."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


def open_aside(tree: Tree) -> Aside:
    """The quarantine that belongs to this folder. Raises `UsageError` if it cannot be used."""
    return StoreAside(tree) if tree.kvsafe_fs else PlainAside(tree)


def _refusal(found: Examined) -> Refusal | str:
    """The refusal to move for, or why not to."""
    refusal = None if found.verdict is None else found.verdict.refusal
    if refusal is None or found.file is None:
        return "left: not refused"
    if refusal.kind in OF_THE_READER:
        return "left: it may be whole for a reader with another key or version"
    return refusal


class StoreAside:
    """The quarantine of a `kvsafe-fs` store."""

    def __init__(self, tree: Tree) -> None:
        self._hand = StoreHand(os.path.realpath(tree.path))

    def move(self, entry: Entry, found: Examined) -> str:
        """As the store itself does it: number first in the name, the reason beside it."""
        refusal, seen = _refusal(found), found.file
        if isinstance(refusal, str) or seen is None or found.info is None:
            return str(refusal)
        if len(entry.parts) != 3 or not self._hand.is_place(*entry.parts[1:]):
            return _ELSEWHERE
        went = self._hand.move_aside(entry.parts[2], refusal, seen, found.info.st_size)
        return MOVED if went else _NEWER

    def close(self) -> None:
        """Give the lease back."""
        self._hand.__exit__(None, None, None)


class PlainAside:
    """The quarantine beside the files of vLLM's fs tier."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._fd = _own_folder(tree.root)

    def move(self, entry: Entry, found: Examined) -> str:
        """As the engine does it: `NUMBER-NAME`, with a random end where that is taken."""
        refusal, seen = _refusal(found), found.file
        if isinstance(refusal, str) or seen is None:
            return str(refusal)
        if not in_vllm_folder(entry.parts):
            return _ELSEWHERE
        try:
            return self._move(entry, f"{refusal.number}-{entry.parts[-1]}", seen)
        except OSError as exc:
            return f"left: {exc.strerror}"

    def _move(self, entry: Entry, name: str, seen: FileId) -> str:
        if _stands(self._fd, name):
            name = f"{name}.{secrets.token_hex(8)}"
        file = entry.parts[-1]
        with self._tree.folder(entry.parts[:-1]) as folder:
            os.rename(file, name, src_dir_fd=folder, dst_dir_fd=self._fd)
            info = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            if FileId.of(info) == seen:
                return MOVED
            # A newer one that the engine has stored meanwhile; if there is one again, that stays.
            with contextlib.suppress(FileExistsError):
                rename_new(self._fd, name, folder, file)
        return _NEWER

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._fd)


def _stands(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _own_folder(root: int) -> int:
    """Open the quarantine, made (0700) where it is missing; only one of this user will do."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(QUARANTINE, 0o700, dir_fd=root)
        fd = os.open(QUARANTINE, os.O_RDONLY | os.O_DIRECTORY | OPEN_FLAGS, dir_fd=root)
    except OSError as exc:
        raise UsageError(f"{QUARANTINE}: {exc.strerror}; is this the tier's root_dir?") from None
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        os.close(fd)
        raise UsageError(f"{QUARANTINE} is not a folder of this user alone (0700)")
    return fd

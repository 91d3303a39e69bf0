# SPDX-License-Identifier: Apache-2.0
"""Removing files: those that were looked at, and only if they are still the same."""

from __future__ import annotations

import os
import stat
from typing import Protocol

from kvsafe.cli.inspect.reading import Examined
from kvsafe.cli.inspect.tree import Entry, Role, Tree, in_vllm_folder
from kvsafe.cli.purge.hand import StoreHand
from kvsafe.tiers.outcome import GONE, FileId

__all__ = ["PlainRemover", "Remover", "StoreRemover", "open_remover"]


class Remover(Protocol):
    """Removes files of one tier."""

    def owns(self, entry: Entry) -> bool:
        """Whether this is a place of the tier's own; nothing else is ever removed."""
        ...

    def remove(self, entry: Entry, found: Examined) -> bool:
        """Remove one file; False if it is gone or another by now. Raises `OSError`."""
        ...

    def close(self) -> str:
        """Settle the account; returns what has to be said about it."""
        ...


def open_remover(tree: Tree, *, really: bool) -> Remover:
    """The remover for this folder; without `really` it is not asked to remove anything."""
    if tree.kvsafe_fs:
        return StoreRemover(tree, really=really)
    return PlainRemover(tree)


class StoreRemover:
    """For a `kvsafe-fs` store: its account is right again when it is closed."""

    def __init__(self, tree: Tree, *, really: bool) -> None:
        self._hand = StoreHand(os.path.realpath(tree.path)) if really else None

    def owns(self, entry: Entry) -> bool:
        """Files of the quarantine, and `objects/abc/NAME.chunk`."""
        if stat.S_ISDIR(entry.info.st_mode):
            return False
        if entry.role is Role.QUARANTINED:
            return len(entry.parts) == 2
        return len(entry.parts) == 3 and entry.parts[0] == "objects"

    def remove(self, entry: Entry, found: Examined) -> bool:
        """Unlink the file that was seen."""
        if self._hand is None or found.file is None:
            return False
        bucket = "" if entry.role is Role.QUARANTINED else entry.parts[1]
        return self._hand.remove(bucket, entry.parts[-1], found.file)

    def close(self) -> str:
        """Let the store count itself, then leave it."""
        if self._hand is None:
            return ""
        with self._hand as hand:
            if hand.recount() and (charged := hand.charged) is not None:
                return f"{charged:,} bytes are charged to the store now"
        return "the store could not be counted now: its account says too much until it is"


class PlainRemover:
    """For the files of vLLM's fs tier, which keeps no account."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def owns(self, entry: Entry) -> bool:
        """Files of the quarantine, and those where vLLM's fs tier keeps its objects."""
        if stat.S_ISDIR(entry.info.st_mode):
            return False
        if entry.role is Role.QUARANTINED:
            return len(entry.parts) == 2
        return in_vllm_folder(entry.parts)

    def remove(self, entry: Entry, found: Examined) -> bool:
        """Unlink the file that was seen."""
        name = entry.parts[-1]
        try:
            with self._tree.folder(entry.parts[:-1]) as folder:
                info = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if found.file is None or FileId.of(info) != found.file:
                    return False
                os.unlink(name, dir_fd=folder)
        except OSError as exc:
            if exc.errno in GONE:
                return False
            raise
        return True

    def close(self) -> str:
        """There is no account."""
        return ""

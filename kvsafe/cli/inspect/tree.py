# SPDX-License-Identifier: Apache-2.0
"""The files of a tier's folder, one after the other, without following a link.

Two kinds of folder are known: a `kvsafe-fs` store (`spec/fs-tier.md`), and any other, such
as vLLM's fs tier, where every `.bin` and `.chunk` file is taken for a chunk. Memory does
not grow with the number of files.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvsafe.cli import UsageError
from kvsafe.tiers import QUARANTINE, SUFFIX

__all__ = ["Entry", "Role", "Tree", "in_vllm_folder", "need_chunks", "need_root", "shown"]

MAX_DEPTH = 12
_STORE_DEPTH = 2
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_SUFFIXES = (SUFFIX, ".bin")
_VLLM_FOLDERS = re.compile(r"[^/]+_r\d+/[0-9a-f]{3}/[0-9a-f]{2}_g\d+")


class Role(enum.Enum):
    """What an entry of a tier's folder is."""

    CHUNK = "chunk"
    QUARANTINED = "quarantined"
    TEMPORARY = "temporary"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in the tree that is no folder on the way: its path below the root."""

    parts: tuple[str, ...]
    role: Role
    info: os.stat_result

    @property
    def text(self) -> str:
        """The path for people, unprintable characters replaced."""
        return shown("/".join(self.parts))


class Tree:
    """One folder, held open.

    Attributes:
        kvsafe_fs: whether it is the root of a `kvsafe-fs` store.
        owner: user number of such a store; None for any other folder.
        inside: the root of the `kvsafe-fs` store in which this folder lies; "" if in none.
        troubles: folders that could not be listed, in words.
    """

    def __init__(self, path: str) -> None:
        """Raises `UsageError` if the folder cannot be opened."""
        self.path = os.path.abspath(path)
        try:
            # The root itself may be named through a link; nothing below it is.
            self.root = os.open(self.path, _FOLDER & ~os.O_NOFOLLOW)
        except OSError as exc:
            raise UsageError(f"{shown(path)}: {exc.strerror}; name a tier's root_dir") from None
        self.kvsafe_fs = self._has("objects") and (self._has("leases") or self._has("ledger"))
        self.owner = os.fstat(self.root).st_uid if self.kvsafe_fs else None
        self.inside = "" if self.kvsafe_fs else _store_around(os.path.realpath(self.path))
        self._in_quarantine = os.path.basename(self.path) == QUARANTINE
        self.troubles: Counter[str] = Counter()

    def _has(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            os.stat(name, dir_fd=self.root, follow_symlinks=False)
            return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.root)

    @contextlib.contextmanager
    def folder(self, parts: Sequence[str]) -> Iterator[int]:
        """A folder below the root, opened step by step; no step may be a link."""
        fd = os.dup(self.root)
        try:
            for part in parts:
                deeper = os.open(part, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = deeper
            yield fd
        finally:
            os.close(fd)

    def entries(self) -> Iterator[Entry]:
        """Everything that is no folder on the way, files of a folder before its folders.

        Each folder is listed while its files are handed out, so what is added or removed
        meanwhile may be seen or not. Folders that cannot be listed go to `troubles`.
        """
        # Quarantine last: files move into it meanwhile.
        yield from self._walk((), later=(QUARANTINE,))
        if not self._in_quarantine and self._has(QUARANTINE):
            yield from self._walk((QUARANTINE,))

    def _walk(self, parts: tuple[str, ...], later: tuple[str, ...] = ()) -> Iterator[Entry]:
        folders: list[str] = []
        try:
            with self.folder(parts) as fd, os.scandir(fd) as listing:
                for item in listing:
                    if (info := _stat(item)) is None or item.name in later:
                        continue
                    below = (*parts, item.name)
                    role = self._role(below, info)
                    if role is None:
                        folders.append(item.name)
                    else:
                        yield Entry(below, role, info)
        except FileNotFoundError:
            return
        except OSError as exc:
            self.troubles[f"folder {shown('/'.join(parts)) or '.'}: {exc.strerror}"] += 1
            return
        for name in sorted(folders):
            if len(parts) >= MAX_DEPTH:
                self.troubles[f"folder {shown('/'.join(parts))}: deeper than {MAX_DEPTH}"] += 1
                return
            yield from self._walk((*parts, name))

    def _role(self, parts: tuple[str, ...], info: os.stat_result) -> Role | None:
        """What this is; None for a folder to look into."""
        name, folder = parts[-1], stat.S_ISDIR(info.st_mode)
        if self._in_quarantine or (len(parts) > 1 and parts[0] == QUARANTINE):
            return Role.QUARANTINED
        if folder and not name.endswith(_SUFFIXES):
            return None
        if self.kvsafe_fs and parts[0] != "objects":
            return Role.OTHER
        if not folder and (name.startswith(".") or name.endswith(".tmp")):
            return Role.TEMPORARY
        return Role.CHUNK if name.endswith(_SUFFIXES) else Role.OTHER


def need_root(tree: Tree) -> None:
    """Raise `UsageError` for a part of a store: owner, mode and links would not count."""
    if tree.inside:
        raise UsageError(
            f"{shown(tree.path)} is a part of the kvsafe-fs store {shown(tree.inside)}: name that"
        )


def need_chunks(tree: Tree, files: int) -> None:
    """Raise `UsageError` where there was nothing to look at: a wrong path must not look fine."""
    if not files and not tree.kvsafe_fs and not tree.troubles:
        raise UsageError(f"{shown(tree.path)} holds no chunk file: name a tier's root_dir")


def _store_around(path: str) -> str:
    """The nearest folder above that is a store's root."""
    for _ in range(_STORE_DEPTH):
        path = os.path.dirname(path)
        if all(os.path.lexists(os.path.join(path, name)) for name in ("objects", "leases")):
            return path
    return ""


def _stat(item: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return item.stat(follow_symlinks=False)
    except OSError:
        return None


def in_vllm_folder(parts: Sequence[str]) -> bool:
    """Whether a file lies where vLLM's fs tier keeps objects: `MODEL_rN/hhh/hh_gN/NAME`."""
    return _VLLM_FOLDERS.fullmatch("/".join(parts[:-1])) is not None


def shown(text: str) -> str:
    """Text of a foreign file or document for a terminal: unprintable characters replaced."""
    return "".join(char if char.isprintable() else "?" for char in text)

# SPDX-License-Identifier: Apache-2.0
"""Objects of vLLM's fs tier as kvsafe looks at them: before a load and after a refusal.

vLLM's tier takes whatever stands at a path: it follows links, would wait on a FIFO, reads
the front of a longer file. Its lookup thread is replaced by one that takes only regular
files of exactly one row; anything else is refused there, before a load can touch it. Its
temporary files get names that no other process can have.
"""

import errno
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.fs import io as fs_io
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvsafe.engine.journal import logger
from kvsafe.seal.refusal import Refusal, RefusalKind

QUARANTINE_FOLDER = "kvsafe-quarantine"
QUARANTINE_LIMIT = 1024
"""Most objects that are moved aside. Then refused ones stay in place: nothing is deleted."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

NOT_THE_OBJECTS_FAULT = (RefusalKind.EPOCH_UNKNOWN, RefusalKind.COPY_FAULT, RefusalKind.FENCE)
"""Refusals that say nothing against the object: it stays where it is."""

NoteObject = Callable[[OffloadKey, Refusal, bool], None]


class ObjectStore(Protocol):
    """What kvsafe can do with the objects of a tier that is not its own."""

    on_refusal: NoteObject | None

    def exists(self, name: OffloadKey) -> bool:
        """Whether an object of this name is there."""
        ...

    def quarantine(self, name: OffloadKey, refusal: Refusal) -> bool:
        """Take a refused object out of the way. True if it was."""
        ...


class FsObjects:
    """The files of one vLLM fs tier.

    `policy` is what happens to a refused file: `aside` moves it into a folder beside the
    tier's own (0700) with the refusal number in its name, `remove` deletes it, `keep` does
    nothing.
    """

    def __init__(self, tier: FileSystemTierManager, root: Path, policy: str) -> None:
        self._mapper = tier.file_mapper
        self._row_bytes = int(tier.block_size_bytes)
        self._aside = root / QUARANTINE_FOLDER
        self._policy = policy
        self._told_full = False
        self.on_refusal: NoteObject | None = None

    def path(self, name: OffloadKey) -> str:
        """Where the tier keeps this object."""
        return str(self._mapper.get_file_name(name))

    def exists(self, name: OffloadKey) -> bool:
        """Whether anything stands at the object's path."""
        return os.path.lexists(self.path(name))

    def judge(self, name: OffloadKey) -> bool:
        """Whether the object can be a row: a regular file of exactly one row."""
        try:
            info = os.lstat(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as exc:
            # Unreachable is not damage: a miss for now, the file stays.
            logger.debug("kvsafe: cannot look at an object: %s", exc.strerror)
            return False
        refusal = self._refusal(info)
        if refusal is None:
            return True
        quarantined = self.quarantine(name, refusal)
        if self.on_refusal is not None:
            self.on_refusal(name, refusal, quarantined)
        return False

    def quarantine(self, name: OffloadKey, refusal: Refusal) -> bool:
        """Move or remove the object, as the operator chose. Failure keeps it where it is."""
        if self._policy == "keep" or refusal.kind in NOT_THE_OBJECTS_FAULT:
            return False
        path = self.path(name)
        try:
            # A revoked chunk is whole but worthless for ever; keeping it aside proves nothing.
            if self._policy == "remove" or refusal.kind is RefusalKind.EPOCH_REVOKED:
                _remove(path)
            elif not self._move_aside(path, refusal):
                return False
        except OSError as exc:
            logger.warning("kvsafe: a refused object stays in place: %s", exc.strerror)
            return False
        return True

    def _move_aside(self, path: str, refusal: Refusal) -> bool:
        """False if there is no place for one more: it stays, and is refused whenever it is met."""
        fd = self._make_aside()
        try:
            if len(os.listdir(fd)) >= QUARANTINE_LIMIT:
                self._tell_full()
                return False
            name = f"{refusal.number}-{Path(path).name}"
            if _stands(name, fd):
                # A folder that holds something cannot be replaced: it would block for ever.
                name = f"{name}.{secrets.token_hex(8)}"
            os.rename(path, name, dst_dir_fd=fd)
            self._told_full = False
            return True
        finally:
            os.close(fd)

    def _tell_full(self) -> None:
        if not self._told_full:
            self._told_full = True
            logger.warning(
                "kvsafe: %s holds %d refused objects: further ones stay in place, look at them "
                "and empty it",
                self._aside,
                QUARANTINE_LIMIT,
            )

    def _make_aside(self) -> int:
        """Open a folder of our own that nobody else can look into; a link is not taken for it.

        The descriptor is what was checked, whatever happens to the path meanwhile.
        """
        self._aside.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._aside, _FOLDER_FLAGS)
        try:
            info = os.fstat(fd)
            if info.st_uid != os.geteuid():
                raise NotADirectoryError(errno.ENOTDIR, f"{QUARANTINE_FOLDER} is not our folder")
            if stat.S_IMODE(info.st_mode) != 0o700:
                os.fchmod(fd, 0o700)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _refusal(self, info: os.stat_result) -> Refusal | None:
        if not stat.S_ISREG(info.st_mode):
            kind = stat.filemode(info.st_mode)[0]
            return Refusal.of(RefusalKind.TIER_OBJECT, "file type", "-", kind)
        if info.st_size != self._row_bytes:
            return Refusal.of(RefusalKind.TIER_OBJECT, "file bytes", self._row_bytes, info.st_size)
        return None


class CheckedFsLookup(AsyncLookupManager):
    """The lookup thread of a vLLM fs tier, asking `FsObjects` instead of mere presence."""

    def __init__(self, objects: FsObjects, tier_type: str) -> None:
        self._objects = objects
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """One answer per key; runs in the lookup thread."""
        return [self._objects.judge(key) for key in keys]


def name_files_afresh(tier: FileSystemTierManager) -> None:
    """Give the temporary files of each store job a name of their own (finding H).

    vLLM draws one suffix per thread from random numbers that are seeded alike in every engine,
    and keeps it in a thread-local that its Python and its C path both read. It is set anew
    before each job, in the thread that runs the job.
    """
    pool: Any = tier._pool
    enqueue, mine = pool.enqueue_store, fs_io._thread_local

    def enqueue_store(job_id: int, n_tasks: int, tasks: Iterable[Callable[[], None]]) -> None:
        enqueue(job_id, n_tasks, [partial(_with_new_suffix, mine, task) for task in tasks])

    pool.enqueue_store = enqueue_store


def _with_new_suffix(mine: threading.local, task: Callable[[], None]) -> None:
    mine.tmp_suffix = f"_{secrets.token_hex(16)}.tmp"
    task()


def adopt_objects(tier: SecondaryTierManager, root: str, policy: str) -> ObjectStore | None:
    """Put kvsafe's look at objects into a tier that is known; None for any other tier.

    A tier of ours brings its own in the attribute `objects`.
    """
    own: ObjectStore | None = getattr(tier, "objects", None)
    if own is not None:
        return own
    if not isinstance(tier, FileSystemTierManager):
        return None
    objects = FsObjects(tier, Path(root), policy)
    tier._lookup_manager.shutdown()
    tier._lookup_manager = CheckedFsLookup(objects, tier.tier_type)
    name_files_afresh(tier)
    return objects


def _stands(name: str, folder: int) -> bool:
    """Whether anything of this name, a link to nothing too, is in the open folder."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except IsADirectoryError:
        # Never delete a tree on the word of a name: an empty folder goes, others stay.
        os.rmdir(path)

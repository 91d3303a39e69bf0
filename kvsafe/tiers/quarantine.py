# SPDX-License-Identifier: Apache-2.0
"""Taking a refused file out of the way, and only that one.

Between the read that refused it and the move another process may have moved it already and
stored the chunk anew. The move is by name, so what was moved is looked at afterwards, and a
file that is not the refused one is put back. One that was changed meanwhile is the refused
one: nothing of ours writes to a published file.
"""

import os
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Literal

from kvsafe.tiers.folders import Folders
from kvsafe.tiers.ledger import whole_pages
from kvsafe.tiers.outcome import FileId
from kvsafe.tiers.room import Room

Policy = Literal["aside", "remove", "keep"]

_READ_LIMIT = 1 << 14
_NOTE = "user.kvsafe.refusal"
_NOTE_BYTES = 400


class Quarantine:
    """The quarantine of one store. Thread-safe.

    `aside` keeps the file in a folder of its own, refusal number first in its name; `remove`
    deletes it; `keep` leaves it in place, where it costs a miss each time.
    """

    def __init__(self, folders: Folders, room: Room, policy: Policy, counts: Counter[str]) -> None:
        self._calls = folders.calls
        self._folders = folders
        self._room = room
        self._policy = policy
        self._counts = counts
        self._lock = threading.Lock()
        self._read: OrderedDict[bytes, FileId] = OrderedDict()

    def note_read(self, files: Mapping[bytes, FileId]) -> None:
        """Remember which file was read under each name."""
        with self._lock:
            for name, file in files.items():
                self._read[name] = file
                self._read.move_to_end(name)
            while len(self._read) > _READ_LIMIT:
                self._read.popitem(last=False)

    def move_read(self, name: bytes, number: int, text: str) -> bool:
        """Move the file that was last read under this name. True if it went."""
        with self._lock:
            seen = self._read.get(name)
        return self.move(name, number, text, seen)

    def move(self, name: bytes, number: int, text: str, seen: FileId | None) -> bool:
        """Move whatever stands at the name if it is `seen` (None: whatever it is)."""
        if self._policy == "keep":
            return False
        bucket, file = self._folders.place(name)
        aside = f"{number}-{file}.{secrets.token_hex(4)}"
        try:
            with self._folders.bucket(bucket) as folder:
                self._calls.rename(folder, file, self._folders.aside, aside)
                info = self._calls.stat(self._folders.aside, aside)
                if seen is not None and info.st_ino != seen.inode:
                    self._put_back(folder, file, aside)
                    return False
            self._room.gone(bucket, file)
            if self._policy == "remove":
                return self._room.remove("", aside)
        except OSError:
            # Gone already, or it cannot be moved now: it is refused again when it is read.
            self._counts["not moved"] += 1
            return False
        self._note(aside, text)
        return True

    def _put_back(self, folder: int, file: str, aside: str) -> None:
        """Put a file that was not meant back, as if it were new.

        A count that runs now may see it in neither place, so it is paid for once more.
        """
        charge = whole_pages(self._folders.row_bytes)
        if not self._room.take(charge):
            self._room.remove("", aside)
            return
        try:
            self._calls.publish(self._folders.aside, aside, folder, file)
        except FileExistsError:
            self._room.give_back(charge)
            self._room.remove("", aside)
        except OSError:
            self._room.spent(charge)  # it may have happened all the same
            raise
        else:
            self._room.spent(charge)

    def _note(self, aside: str, text: str) -> None:
        """The reason goes with the file, where the file system keeps such notes."""
        try:
            fd = self._calls.open(self._folders.aside, aside, os.O_RDONLY)
        except OSError:
            return
        try:
            self._calls.setxattr(fd, _NOTE, text.encode()[:_NOTE_BYTES])
        except OSError:
            self._counts["no note"] += 1
        finally:
            self._calls.release(fd)

# SPDX-License-Identifier: Apache-2.0
"""Storing one row with room that was taken: whatever happens, the account stays right."""

from collections import Counter
from collections.abc import Callable

from kvsafe.tiers.chunkfile import Writer
from kvsafe.tiers.folders import Folders
from kvsafe.tiers.leases import Lease
from kvsafe.tiers.ledger import whole_pages
from kvsafe.tiers.outcome import DONE, PRESENT, Answer, Outcome, outcome_of
from kvsafe.tiers.room import Room


class Storing:
    """Writes, publishes, and undoes what failed. Thread-safe."""

    def __init__(
        self, folders: Folders, lease: Lease, room: Room, writer: Writer, counts: Counter[str]
    ) -> None:
        self._calls = folders.calls
        self._folders = folders
        self._lease = lease
        self._room = room
        self._writer = writer
        self._counts = counts
        self._charge = whole_pages(folders.row_bytes)

    def store(
        self, folder: int, bucket: str, file: str, row: memoryview, wanted: Callable[[], bool]
    ) -> Outcome:
        """Write and publish with room that was taken. `folder` is the bucket, open."""
        outcome = self._write_in(folder, file, row, wanted)
        if outcome.answer is Answer.DONE:
            self._room.offer_one(bucket, file)
        elif outcome.answer is Answer.PRESENT:
            return self.present(bucket)
        elif outcome.answer is Answer.MISSING:
            self._folders.forget_bucket(bucket)  # removed behind our back; the next one is new
        return outcome

    def present(self, bucket: str) -> Outcome:
        """Somebody has stored it; it is reported, so its name has to survive as ours does."""
        if self._writer.settles:
            try:
                with self._folders.bucket(bucket) as folder:
                    self._writer.settle(folder)
            except OSError as exc:
                return Outcome(Answer.UNREACHABLE, f"sync: {exc.errno}")
        return PRESENT

    def _write_in(
        self, folder: int, file: str, row: memoryview, wanted: Callable[[], bool]
    ) -> Outcome:
        temporary = self._lease.temporary()
        written = False
        try:
            self._writer.write(folder, temporary, row)
            written = True
            if not wanted():
                return self._undo(folder, temporary, Outcome(Answer.LATE), written)
            self._writer.publish(folder, temporary, file)
        except FileExistsError:
            return self._undo(folder, temporary, PRESENT, written)
        except OSError as exc:
            return self._undo(folder, temporary, outcome_of(exc), written)
        self._room.spent(self._charge)
        try:
            self._writer.settle(folder)
        except OSError as exc:
            # It is there and whole, but may not survive a power loss.
            return Outcome(Answer.UNREACHABLE, f"sync: {exc.errno}")
        return DONE

    def _undo(self, folder: int, temporary: str, outcome: Outcome, written: bool) -> Outcome:
        try:
            self._calls.unlink(folder, temporary)
        except FileNotFoundError:
            if written:
                # A rename that reported an error and happened all the same.
                self._room.spent(self._charge)
                return outcome
        except OSError:
            # Its bytes stay reserved; whoever sweeps after our end removes it.
            self._counts["leftover"] += 1
            return outcome
        self._room.give_back(self._charge)
        return outcome

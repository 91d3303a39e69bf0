# SPDX-License-Identifier: Apache-2.0
"""Storing one row with room that was taken: whatever happens, the account stays right."""

from collections import Counter
from collections.abc import Callable, Iterable

from kvsafe.tiers.chunkfile import Writer
from kvsafe.tiers.folders import Folders
from kvsafe.tiers.leases import Lease
from kvsafe.tiers.ledger import whole_pages
from kvsafe.tiers.order import Order
from kvsafe.tiers.outcome import DONE, LATE, PRESENT, Answer, Outcome, outcome_of
from kvsafe.tiers.room import Room

_NO_ROOM = "capacity or reserve"


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

    @property
    def settles(self) -> bool:
        """Whether a name is made to survive before it is reported."""
        return self._writer.settles

    def begin(self) -> Outcome | None:
        """Take the room of one row, waiting for it. None if there is some; raises `OSError`."""
        return None if self._room.take(self._charge) else Outcome(Answer.NO_ROOM, _NO_ROOM)

    def begin_now(self, rows: int, within_s: float) -> int:
        """Take the room of rows as far as there is some; of how many. See `Room.take_now`."""
        return self._room.take_now(self._charge, rows, within_s)

    def begin_granted(self, rows: int, within_s: float) -> bool:
        """Take the room of all these rows, if nothing has to go for it. See `Room.take_granted`."""
        return self._room.take_granted(self._charge * rows, within_s)

    def temporaries(self, count: int) -> tuple[str, int]:
        """New names to write under. See `Lease.temporaries`."""
        return self._lease.temporaries(count)

    def store(self, folder: int, bucket: str, file: str, row: memoryview, order: Order) -> Outcome:
        """Write and publish with room that was taken. `folder` is the bucket, open."""
        temporary = self._lease.temporary()
        written = False
        try:
            self._writer.write(folder, temporary, row)
            written = True
            if not order.wanted:
                return self.undo(folder, temporary, LATE, written)
            self._writer.publish(folder, temporary, file)
        except OSError as exc:
            return self._failed(folder, bucket, temporary, exc, written)
        self.spent(1, [(bucket, file)])
        return self.settled(folder) or DONE

    def _failed(
        self, folder: int, bucket: str, temporary: str, error: OSError, written: bool
    ) -> Outcome:
        """What an error of writing or publishing comes to; what was written is removed.

        `written`: the whole file was there, so only a rename can have taken it away.
        """
        if written and isinstance(error, FileExistsError):
            self.undo(folder, temporary, PRESENT, written)
            return self.present(bucket)
        outcome = self.undo(folder, temporary, outcome_of(error), written)
        if outcome.answer is Answer.MISSING:
            self._folders.forget_bucket(bucket)  # removed behind our back; the next one is new
        return outcome

    def spent(self, count: int, files: Iterable[tuple[str, str]]) -> None:
        """Files have their names: their room is spent, and they may be evicted one day.

        Bucket and name of each, if they are asked for.
        """
        self._room.spent(self._charge * count)
        self._room.offer_new(files)

    def not_needed(self, rows: int) -> None:
        """Give the room of rows back of which nothing is on the disk."""
        self._room.give_back(self._charge * rows)

    def settled(self, folder: int) -> Outcome | None:
        """Make the names in an open bucket survive, if that is set. None if they do.

        Otherwise they are there and whole, but may not survive a power loss.
        """
        return self.settled_bucket(folder) or self.settled_buckets()

    def settled_bucket(self, folder: int) -> Outcome | None:
        """The first half of `settled`; for several buckets the other half is done once."""
        return self._synced(lambda: self._writer.settle(folder))

    def settled_buckets(self) -> Outcome | None:
        """The other half: the names of the buckets."""
        return self._synced(self._writer.settle_buckets)

    def _synced(self, sync: Callable[[], None]) -> Outcome | None:
        try:
            sync()
        except OSError as exc:
            return Outcome(Answer.UNREACHABLE, f"sync: {exc.errno}")
        return None

    def present(self, bucket: str) -> Outcome:
        """Somebody has stored it; it is reported, so its name has to survive as ours does."""
        if not self.settles:
            return PRESENT
        try:
            with self._folders.bucket(bucket) as folder:
                return self.settled(folder) or PRESENT
        except OSError as exc:
            return Outcome(Answer.UNREACHABLE, f"sync: {exc.errno}")

    def undo(self, folder: int, temporary: str, outcome: Outcome, written: bool) -> Outcome:
        """Remove what was written and give its room back; the outcome as it is given."""
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

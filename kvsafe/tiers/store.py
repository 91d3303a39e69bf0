# SPDX-License-Identifier: Apache-2.0
"""The disk store of chunks: rows in, rows out, by object name, in one folder.

Several processes can use one folder. Every method may be called from any thread, answers
with a value, and may be stuck in a system call for as long as the kernel likes: deadlines
are the caller's (`pool.py`). See `spec/fs-tier.md` for the rules.
"""

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvsafe.tiers.batch import Batch, same_length
from kvsafe.tiers.buffers import copy
from kvsafe.tiers.calls import Os, QuickOs
from kvsafe.tiers.chunkfile import DIRECT_ALIGN, Reader, Truncated, Writer
from kvsafe.tiers.course import PlainCourse
from kvsafe.tiers.folders import Folders, StoreRefused
from kvsafe.tiers.keeper import Keeper, mark_used
from kvsafe.tiers.leases import Lease
from kvsafe.tiers.ledger import Ledger, Limits, whole_pages
from kvsafe.tiers.order import Order
from kvsafe.tiers.outcome import DONE, Answer, FileId, Flaw, Outcome, Verdict, outcome_of
from kvsafe.tiers.quarantine import Quarantine
from kvsafe.tiers.room import Room
from kvsafe.tiers.setting import StoreSetting
from kvsafe.tiers.storing import Storing

Judge = Callable[[memoryview], Verdict | None]
OnFlaw = Callable[[bytes, Flaw, bool], None]


class ChunkStore:
    """One process on one store folder."""

    def __init__(
        self, setting: StoreSetting, calls: Os | None = None, batch: Batch | None = None
    ) -> None:
        """Open it. `calls` and `batch` are for tests: both are the ordinary ones if left out.

        Raises `StoreRefused`. With `calls` of somebody's own, every call goes through them.
        """
        if setting.row_bytes < 1 or setting.capacity_bytes < whole_pages(setting.row_bytes):
            raise StoreRefused(
                f"capacity_bytes {setting.capacity_bytes} holds no row of {setting.row_bytes}"
            )
        self.setting = setting
        batch = batch or (Batch.load() if calls is None else None)
        self.calls = calls = calls or QuickOs()
        self.folders = folders = Folders(
            calls, setting.root, setting.row_bytes, setting.flaw_number
        )
        with contextlib.ExitStack() as held:
            held.callback(folders.close)
            try:
                self._assemble(setting, folders, held, batch)
            except OSError as exc:
                raise StoreRefused(f"{setting.root} cannot be used: {exc}") from exc
            self.keeper.start()
            self._held = held.pop_all()

    def _assemble(
        self,
        setting: StoreSetting,
        folders: Folders,
        held: contextlib.ExitStack,
        batch: Batch | None,
    ) -> None:
        """Put the parts together; `held` lets go of what was opened."""
        calls = folders.calls
        self.direct = self._direct(setting, folders)
        ledger = Ledger(calls, folders, setting.lock_wait_s)
        held.callback(ledger.close)
        self.lease = Lease(calls, folders)
        held.callback(self.lease.close, clean=True)
        self.keeper = Keeper(calls, folders, ledger, self.lease, setting.ttl_s)
        limits = Limits(setting.capacity_bytes, setting.reserve_bytes)
        self.room = Room(calls, folders, ledger, self.lease, limits, self.keeper.recount)
        self.keeper.room = self.room
        self.room.on_low = self.keeper.ask_ahead
        writer = Writer(calls, folders, setting.sync, self.direct)
        self._reader = Reader(calls, folders, self.direct)
        self.counts: Counter[str] = Counter()
        self._course = self._plain_course(setting, folders, batch)
        self._storing = Storing(folders, self.lease, self.room, writer, self.counts)
        self._quarantine = Quarantine(folders, self.room, setting.quarantine, self.counts)
        self.on_flaw: OnFlaw | None = None

    def _plain_course(
        self, setting: StoreSetting, folders: Folders, batch: Batch | None
    ) -> PlainCourse | None:
        if batch is None or not folders.atomic:
            return None
        return PlainCourse(
            batch, folders, self.direct, setting.sync, setting.ttl_s, setting.batch_s
        )

    @property
    def in_batches(self) -> bool:
        """Whether many files go in one call: `batch.c` was built, and this file system lets it."""
        return self._course is not None

    @staticmethod
    def _direct(setting: StoreSetting, folders: Folders) -> bool:
        fits = setting.row_bytes % DIRECT_ALIGN == 0
        if setting.direct_io == "on" and not (folders.direct and fits):
            raise StoreRefused("direct_io is on, but this file system or row length has none")
        return setting.direct_io != "off" and folders.direct and fits

    def put(
        self,
        name: bytes,
        row: memoryview,
        order: Order | None = None,
    ) -> Outcome:
        """Store a row of exactly `row_bytes` under its name; never replaces a good file.

        `order` is asked before the file is published: after a deadline the row may belong
        to another chunk.
        """
        order = order or Order()
        if len(row) != self.setting.row_bytes:
            raise ValueError(f"a row of {len(row)} bytes, not {self.setting.row_bytes}")
        bucket, file = self.folders.place(name)
        try:
            with self.folders.bucket(bucket, make=True) as folder:
                if self._stands(name, folder, bucket, file):
                    return self._counted(self._storing.present(bucket))
                short = self._storing.begin()
                if short is not None:
                    return self._counted(short)
                return self._counted(self._storing.store(folder, bucket, file, row, order))
        except OSError as exc:
            return self._counted(outcome_of(exc))

    def standing(self, name: bytes) -> Outcome | None:
        """What `put` would answer without writing; None if it would have to write."""
        if not self.look([name])[0]:
            return None
        return self._counted(self._storing.present(self.folders.place(name)[0]))

    def put_all(
        self,
        names: list[bytes],
        rows: Sequence[memoryview],
        order: Order | None = None,
    ) -> list[Outcome]:
        """`put` of several rows, together as far as all goes well. Outcomes in order.

        Once the order is withdrawn the rest is left, and the list is shorter.
        """
        order = order or Order()
        answers: list[Outcome | None] = [None] * same_length(names, rows)
        if self._course is not None:
            answers = self._course.store(names, rows, self._storing, order)
        return self._complete(answers, order, lambda at: self.put(names[at], rows[at], order))

    def _stands(self, name: bytes, folder: int, bucket: str, file: str) -> bool:
        """Whether a file that can be this chunk is there; one that cannot is moved away.

        "No" where it cannot be told does no harm: publishing never replaces.
        """
        if not self.calls.there(folder, file):
            return False
        try:
            info = _still_there(self.calls.stat(folder, file))
        except FileNotFoundError:
            return False
        flaw = self.folders.flaw(info)
        if flaw is None:
            return not self.keeper.outlived(info) or not self._expire(bucket, file)
        self._found_flaw(name, flaw, FileId.of(info))
        return False

    def _stat(self, bucket: str, file: str) -> os.stat_result:
        with self.folders.bucket(bucket) as folder:
            return _still_there(self.calls.stat(folder, file))

    def get(self, name: bytes, into: memoryview, judge: Judge | None = None) -> Outcome:
        """Read a whole row into `into` (exactly `row_bytes`), and let `judge` open it there.

        On any other outcome than DONE the buffer may hold anything.
        """
        if len(into) != self.setting.row_bytes:
            raise ValueError(f"a buffer of {len(into)} bytes, not {self.setting.row_bytes}")
        bucket, file = self.folders.place(name)
        seen: list[FileId] = []
        try:
            flaw = self._reader.read(
                bucket, file, into, lambda fd, info: self._admit(name, fd, info, seen)
            )
        except Truncated:
            flaw = self.folders.flaw_of("file bytes", len(into), "fewer while reading")
        except OSError as exc:
            return self._counted(self._read_error(name, bucket, file, exc))
        if flaw is not None:
            return self._counted(self._unfit(name, bucket, file, flaw, seen))
        verdict = judge(into) if judge is not None else None
        if verdict is not None:
            moved = self.quarantine(name, verdict.number, str(verdict))
            return self._counted(Outcome(Answer.REFUSED, str(verdict), verdict, moved))
        return self._counted(DONE)

    def get_all(
        self, names: list[bytes], into: list[memoryview], order: Order | None = None
    ) -> list[Outcome]:
        """`get` of several rows, together as far as all goes well. As `put_all` otherwise."""
        order = order or Order()
        answers: list[Outcome | None] = [None] * same_length(names, into)
        if self._course is not None:
            seen = self._course.read(names, into)
            read = {name: file for name, file in zip(names, seen, strict=True) if file is not None}
            self._quarantine.note_read(read)
            answers = [None if file is None else DONE for file in seen]
        return self._complete(answers, order, lambda at: self.get(names[at], into[at]))

    def _complete(
        self, answers: list[Outcome | None], order: Order, alone: Callable[[int], Outcome]
    ) -> list[Outcome]:
        """Count what was answered; what was not goes by itself, for as long as it is wanted."""
        if answers.count(DONE) == len(answers):  # as nearly always
            self.counts[Answer.DONE.value] += len(answers)
            return [DONE] * len(answers)
        outcomes = []
        for at, answer in enumerate(answers):
            if answer is not None:
                outcomes.append(self._counted(answer))
            elif order.more():
                outcomes.append(alone(at))
            else:
                break
        return outcomes

    def copy(self, targets: list[memoryview], sources: list[memoryview]) -> None:
        """Copy buffers of one length, each to each."""
        if self._course is not None:
            self._course.copy(targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):
            copy(target, source)

    def _admit(self, name: bytes, fd: int, info: os.stat_result, seen: list[FileId]) -> Flaw | None:
        seen.append(FileId.of(_still_there(info)))
        flaw = self.folders.flaw(info)
        if flaw is not None:
            return flaw
        if self.keeper.outlived(info):
            return Flaw("age", "", "outlived")
        self._quarantine.note_read({name: seen[0]})
        try:
            mark_used(self.calls, fd, info)
        except OSError:
            self.counts["not marked"] += 1
        return None

    def _read_error(self, name: bytes, bucket: str, file: str, error: OSError) -> Outcome:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            # A link, a socket, a device: no file of ours.
            flaw = self.folders.flaw_of("file type", "-", errno.errorcode[error.errno])
            return self._unfit(name, bucket, file, flaw, [])
        outcome = outcome_of(error)
        # Too little memory or space to read is not "no room" for anything.
        return (
            outcome
            if outcome.answer is Answer.MISSING
            else Outcome(Answer.UNREACHABLE, outcome.why)
        )

    def _unfit(
        self, name: bytes, bucket: str, file: str, flaw: Flaw, seen: list[FileId]
    ) -> Outcome:
        if flaw.field == "age":
            self._expire(bucket, file)
            return Outcome(Answer.MISSING, "outlived")
        moved = self._found_flaw(name, flaw, seen[0] if seen else None)
        return Outcome(Answer.REFUSED, str(flaw), flaw, moved)

    def _expire(self, bucket: str, file: str) -> bool:
        try:
            return self.room.remove(bucket, file)
        except OSError:
            return False

    def _found_flaw(self, name: bytes, flaw: Flaw, seen: FileId | None) -> bool:
        moved = self._quarantine.move(name, flaw.number, str(flaw), seen)
        self.counts["flaw"] += 1
        if self.on_flaw is not None:
            self.on_flaw(name, flaw, moved)
        return moved

    def look(self, names: Iterable[bytes]) -> list[bool]:
        """Per name, whether a file that can be this chunk is there now."""
        asked = list(names)
        answers: list[bool] = []
        while len(answers) < len(asked):
            answers += self.look_for(asked[len(answers) :], float("inf"))
        return answers

    def look_for(self, names: list[bytes], within_s: float) -> list[bool]:
        """As `look`, for as many of the names as that takes; at least for one."""
        plain: list[bool | None] = [None] * len(names)
        if self._course is not None:
            plain = self._course.look(names, within_s)
        until = self.calls.clock() + within_s
        answers: list[bool] = []
        for name, answer in zip(names, plain, strict=False):
            if answer is None and answers and self.calls.clock() > until:
                break
            # Prefixes are asked for: what follows a hit is likely one, and so with misses.
            likely = not answers or answers[-1]
            answers.append(self._look(name, likely=likely) if answer is None else answer)
        return answers

    def _look(self, name: bytes, *, likely: bool) -> bool:
        bucket, file = self.folders.place(name)
        try:
            with self.folders.bucket(bucket) as folder:
                if not likely and not self.calls.there(folder, file):
                    return False
                info = _still_there(self.calls.stat(folder, file))
        except FileNotFoundError:
            return False
        except OSError as exc:
            if outcome_of(exc).answer is not Answer.MISSING:
                self.counts["look failed"] += 1
            return False
        flaw = self.folders.flaw(info)
        if flaw is not None:
            self._found_flaw(name, flaw, FileId.of(info))
            return False
        return not self.keeper.outlived(info)

    @property
    def charged(self) -> int:
        """Bytes charged to the folder now, all writers together (0 if it cannot be told)."""
        try:
            return self.room.account().charged
        except OSError:
            return 0

    def exists(self, name: bytes) -> bool:
        """Whether anything stands at the name."""
        bucket, file = self.folders.place(name)
        try:
            self._stat(bucket, file)
        except OSError:
            return False
        return True

    def touch(self, names: Iterable[bytes]) -> None:
        """Note names as used just now."""
        self.keeper.touch(self.folders.place(name) for name in names)

    def quarantine(self, name: bytes, number: int, text: str) -> bool:
        """Take the file that was last read under this name out of the way, as set.

        A file that another process has put there since is left alone. True if it went.
        """
        return self._quarantine.move_read(name, number, text)

    def discard(self, name: bytes) -> bool:
        """Remove a chunk that is whole but worthless, such as one of a revoked epoch."""
        bucket, file = self.folders.place(name)
        return self._expire(bucket, file)

    def _counted(self, outcome: Outcome) -> Outcome:
        """Count what came of an operation; what is late is counted by whoever gave it up."""
        if outcome.answer is not Answer.LATE:
            self.counts[outcome.answer.value] += 1
        return outcome

    def close(self, timeout_s: float = 5.0, *, stuck: bool = False) -> None:
        """Stop housekeeping and give room back. Nothing may be in flight.

        Where a call is stuck (`stuck`: one of the caller's threads) the descriptors stay open,
        so that none of their numbers becomes that of another file. Never raises; where room could
        not be given back, the lease stays for whoever counts.
        """
        if not self.keeper.stop(timeout_s) or stuck:
            return
        clean = False
        try:
            self.room.return_unspent()
            clean = self.room.held == 0
        except OSError:
            self.counts["close failed"] += 1
        self.lease.close(clean=clean)
        self._held.close()


def _still_there(info: os.stat_result) -> os.stat_result:
    """Raises `FileNotFoundError` if the file was removed between being found and looked at."""
    if info.st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, "removed after it was opened")
    return info

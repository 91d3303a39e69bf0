# SPDX-License-Identifier: Apache-2.0
"""Many files in one call: nothing comes of it that would not have come of them one by one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvsafe.native import SUFFIXES
from kvsafe.tiers import Answer, ChunkStore, batch, course, folders, making
from kvsafe.tiers.batch import Batch, Making, Rule, nothing_made
from kvsafe.tiers.buffers import Rows
from kvsafe.tiers.calls import QuickOs
from kvsafe.tiers.ledger import Ledger, LedgerBusy
from kvsafe.tiers.making import Files
from kvsafe.tiers.naming import Names
from kvsafe.tiers.order import Order
from kvsafe.tiers.room import Room
from tests.tiers.faults import FaultyOs
from tests.tiers.stores import (
    MEMORY,
    ROW,
    holds,
    name_of,
    path_of,
    put,
    quarantined,
    row_of,
    store_at,
    temporaries,
)
from tests.tiers.test_damage import as_dangling, as_fifo, as_link, as_socket

LIBRARY = Batch.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="batch.c was not built: no C compiler")

GOOD, ODD, LAST = 1, 2, 3
"""Three names of one batch; what is odd lies in the middle."""


def _nothing(path: Path) -> None:
    path.unlink()


def _longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def _shorter(path: Path) -> None:
    os.truncate(path, ROW - 1)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


def _readable(path: Path) -> None:
    path.chmod(0o644)


def _second_name(path: Path) -> None:
    os.link(path, path.parent.parent.parent / "second")


def _somebody_elses(path: Path) -> None:
    os.chown(path, 12345, -1)


def _old(path: Path) -> None:
    info = path.stat()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns - 10**12))


def _no_bucket(path: Path) -> None:
    path.unlink()
    path.parent.rename(path.parent.with_name("moved"))


def _as_it_was(path: Path) -> None:
    """The positive control."""


ODDITIES: tuple[Callable[[Path], None], ...] = (
    _as_it_was,
    _nothing,
    _longer,
    _shorter,
    _empty,
    as_link,
    as_dangling,
    as_fifo,
    _folder,
    as_socket,
    _readable,
    _second_name,
    _somebody_elses,
    _old,
    _no_bucket,
)
TTL_S = 500.0


@pytest.fixture(params=ODDITIES, ids=lambda odd: odd.__name__.strip("_"))
def odd(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """What has become of the second of three files."""
    chosen: Callable[[Path], None] = request.param
    if chosen is _somebody_elses and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    return chosen


@contextmanager
def _both(root: Path) -> Iterator[tuple[ChunkStore, ChunkStore]]:
    """A store that takes many files in one call, and one that takes them one by one."""
    with (
        store_at(root / "many", ttl_s=TTL_S) as many,
        store_at(root / "single", QuickOs(), ttl_s=TTL_S) as single,
    ):
        assert many.in_batches
        assert not single.in_batches
        yield many, single


def _spoil(store: ChunkStore, odd: Callable[[Path], None]) -> None:
    for number in (GOOD, ODD, LAST):
        assert put(store, number).answer is Answer.DONE
    odd(path_of(store, ODD))


def _names() -> list[bytes]:
    return [name_of(number) for number in (GOOD, ODD, LAST)]


def _rows() -> list[memoryview]:
    return [memoryview(bytearray(row_of(number))) for number in (GOOD, ODD, LAST)]


def test_looking(tmp_path: Path, odd: Callable[[Path], None]) -> None:
    with _both(tmp_path) as both:
        seen = []
        for store in both:
            _spoil(store, odd)
            seen.append((store.look(_names()), len(quarantined(Path(store.setting.root)))))
        assert seen[0] == seen[1]
        assert seen[0][0] == [True, odd in (_as_it_was,), True]


def test_loading(tmp_path: Path, odd: Callable[[Path], None]) -> None:
    with _both(tmp_path) as both:
        seen = []
        for store in both:
            _spoil(store, odd)
            into = [memoryview(bytearray(ROW)) for _ in range(3)]
            outcomes = store.get_all(_names(), into)
            for number, outcome, row in zip((GOOD, ODD, LAST), outcomes, into, strict=True):
                assert not outcome.good or row == row_of(number)
            aside = [path.name.split(".")[0] for path in quarantined(Path(store.setting.root))]
            seen.append((outcomes, aside))
        assert seen[0] == seen[1]
        answers = [outcome.answer for outcome in seen[0][0]]
        assert answers[::2] == [Answer.DONE, Answer.DONE]
        assert (answers[1] is Answer.DONE) == (odd is _as_it_was)


def test_storing(tmp_path: Path, odd: Callable[[Path], None]) -> None:
    with _both(tmp_path) as both:
        seen = []
        for store in both:
            _spoil(store, odd)
            path_of(store, LAST).unlink()
            outcomes = store.put_all(_names(), _rows())
            good = [holds(store, number) for number in (GOOD, ODD, LAST)]
            assert temporaries(Path(store.setting.root)) == []
            seen.append((outcomes, good, len(quarantined(Path(store.setting.root)))))
        assert seen[0] == seen[1]
        answers = [outcome.answer for outcome in seen[0][0]]
        assert answers[0] is Answer.PRESENT and answers[2] is Answer.DONE
        assert seen[0][1] == [True, True, True]


def test_a_store_that_is_no_longer_wanted_publishes_nothing(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        held = store.room.held
        order = _Asked()
        order.withdraw()
        outcomes = store.put_all(_names(), _rows(), order)
        assert [outcome.answer for outcome in outcomes] == [Answer.LATE] * 3
        assert store.look(_names()) == [False] * 3
        assert temporaries(tmp_path / "s") == []
        assert store.room.held >= held and store.room._in_flight == 0
        assert [o.answer for o in store.put_all(_names(), _rows())] == [Answer.DONE] * 3


class _Asked(Order):
    """Counts how often it is asked whether there is more to be done, and says yes so often."""

    def __init__(self, yes: int = 1000) -> None:
        super().__init__()
        self.times = 0
        self._yes = yes

    def more(self) -> bool:
        self.times += 1
        return self.times <= self._yes


def test_what_is_not_begun_in_time_goes_by_itself(tmp_path: Path) -> None:
    with store_at(tmp_path / "s", batch_s=-1.0) as store:
        more = _Asked()
        assert [o.answer for o in store.put_all(_names(), _rows(), more)] == [Answer.DONE] * 3
        assert more.times == 3  # the one that is always begun, and two by themselves
        into = [memoryview(bytearray(ROW)) for _ in range(3)]
        more = _Asked()
        assert [o.answer for o in store.get_all(_names(), into, more)] == [Answer.DONE] * 3
        assert more.times == 2
        assert [bytes(row) for row in into] == [row_of(number) for number in (GOOD, ODD, LAST)]
        assert temporaries(tmp_path / "s") == [] and store.room._in_flight == 0


@pytest.mark.parametrize("yes", range(8))
def test_work_that_was_given_up_ends_where_it_is(tmp_path: Path, yes: int) -> None:
    with store_at(tmp_path / "s", batch_s=-1.0) as store:
        outcomes = store.put_all(_names(), _rows(), _Asked(yes))
        assert len(outcomes) == min(3, yes)
        assert temporaries(tmp_path / "s") == [] and store.room._in_flight == 0
        there = sum(store.look(_names()))
        assert there == len(outcomes)
        into = [memoryview(bytearray(ROW)) for _ in range(3)]
        seen = store.get_all(_names()[:there], into[:there], _Asked(yes))
        assert len(seen) == min(there, yes + 1)


def test_each_sync_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    with store_at(tmp_path / "s", sync="full") as store:
        more = _Asked()
        assert [o.answer for o in store.put_all(_names(), _rows(), more)] == [Answer.DONE] * 3
        assert more.times == 1 + 3 + 1  # to store, three buckets, their names
        more = _Asked()
        again = store.put_all(_names(), _rows(), more)
        assert [o.answer for o in again] == [Answer.PRESENT] * 3 and more.times == 5


def test_nobody_waits_for_room_with_room_in_his_hands(tmp_path: Path) -> None:
    """Four times eight rows at once where sixteen fit: all are stored, and others evicted."""
    with store_at(tmp_path / "s", capacity_bytes=16 * ROW) as store, ThreadPoolExecutor(4) as pool:
        parts = [range(first, first + 8) for first in range(0, 160, 8)]
        jobs = [
            pool.submit(
                store.put_all,
                [name_of(number) for number in part],
                [memoryview(bytearray(row_of(number))) for number in part],
            )
            for part in parts
        ]
        answers = Counter(outcome.answer for job in jobs for outcome in job.result(60))
        assert answers[Answer.DONE] > 150
        assert set(answers) <= {Answer.DONE, Answer.NO_ROOM}
        assert store.room._in_flight == 0 and store.charged <= 16 * ROW


def test_whoever_has_no_room_waits_for_who_is_asking(tmp_path: Path) -> None:
    """Else whole batches go one by one, since sixteen threads run out of a grant together."""
    with store_at(tmp_path / "s") as store, ThreadPoolExecutor(2) as pool:
        room, asking, go = store.room, threading.Event(), threading.Event()
        ask = Room._ask

        def slow(self: Room, *args: Any) -> bool:
            asking.set()
            assert go.wait(60)
            return ask(self, *args)

        with patch.object(Room, "_ask", slow):
            first = pool.submit(room.take_now, ROW, 3, 60.0)
            assert asking.wait(60)
            second = pool.submit(room.take_now, ROW, 3, 60.0)
            go.set()
            assert (first.result(60), second.result(60)) == (3, 3)
        room.give_back(6 * ROW)


def test_whoever_has_some_room_waits_for_nobody(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        room = store.room
        assert room.take_now(ROW, 1, 60.0) == 1
        room._unspent = 2 * ROW
        with room._asking:
            assert room.take_now(ROW, 3, 60.0) == 2
            assert room.take_now(ROW, 3, 0.01) == 0
        assert room.take_now(ROW, 3, 60.0) == 3
        room.give_back(6 * ROW)


def test_a_fault_while_asking_gives_back_what_is_in_hand(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        assert store.room.take_now(ROW, 1, 0.0) == 1
        store.room._unspent = 2 * ROW
        with patch.object(Room, "_ask", side_effect=MemoryError), pytest.raises(MemoryError):
            store.room.take_now(ROW, 3, 0.0)
        assert (store.room._in_flight, store.room._unspent) == (ROW, 2 * ROW)
        store.room.give_back(ROW)


def test_no_row_goes_by_itself_because_others_take_room(tmp_path: Path) -> None:
    names = [name_of(number) for number in range(1024)]
    rows = [memoryview(bytearray(row_of(number))) for number in range(16)]
    with store_at(tmp_path / "s", capacity_bytes=1 << 30) as store, ThreadPoolExecutor(8) as pool:
        store.room.grant_bytes = 32 * ROW
        with (
            patch.object(course, "_SOON_S", 60.0),
            patch.object(store, "put", side_effect=store.put) as alone,
        ):
            jobs = [
                pool.submit(store.put_all, names[at : at + 16], rows) for at in range(0, 1024, 16)
            ]
            assert all(outcome.good for job in jobs for outcome in job.result(60))
        # A batch whose grant ends in its middle gives up the rest while another asks.
        assert alone.call_count < 512


def test_an_account_that_cannot_be_had_costs_its_rows_and_no_more(tmp_path: Path) -> None:
    """The ledger is busy: as one by one, what is there is present, the rest is not stored."""
    with _both(tmp_path) as both:
        seen = []
        for store in both:
            put(store, GOOD)
            store.room.return_unspent()
            with patch.object(Ledger, "grant", side_effect=LedgerBusy(11, "busy")):
                seen.append(store.put_all(_names(), _rows()))
            assert store.room._in_flight == 0 and temporaries(Path(store.setting.root)) == []
            assert all(outcome.good for outcome in store.put_all(_names(), _rows()))
        assert seen[0] == seen[1]
        answers = [outcome.answer for outcome in seen[0]]
        assert answers == [Answer.PRESENT, Answer.UNREACHABLE, Answer.UNREACHABLE]


@pytest.mark.parametrize("call", ["store", "look"])
def test_a_fault_of_our_own_leaves_nothing_behind(tmp_path: Path, call: str) -> None:
    with store_at(tmp_path / "s") as store:
        # Where the last grant was refused it is looked first for what is there.
        store.room._more = call == "store"
        with patch.object(Batch, call, side_effect=MemoryError), pytest.raises(MemoryError):
            store.put_all(_names(), _rows())
        assert store.room._in_flight == 0 and temporaries(tmp_path / "s") == []
        assert all(handle.users == 0 for handle in store.folders._buckets.values())
        short = [*_rows()[:2], memoryview(bytearray(ROW - 1))]
        with pytest.raises(ValueError, match="bytes"):
            store.put_all(_names(), short)
        assert store.look(_names()) == [False] * 3 and store.room._in_flight == 0
        assert [o.answer for o in store.put_all(_names(), _rows())] == [Answer.DONE] * 3


def test_batches_open_no_more_folders_than_are_allowed(tmp_path: Path) -> None:
    with patch.object(folders, "handle_limit", lambda most: 32), store_at(tmp_path / "s") as store:
        names = [name_of(number) for number in range(200)]
        row = memoryview(bytearray(row_of(0)))
        assert all(outcome.good for outcome in store.put_all(names, [row] * 200))
        before = len(os.listdir("/proc/self/fd"))
        handles = store.folders.take_all([store.folders.place(name)[0] for name in names], False)
        assert len(os.listdir("/proc/self/fd")) <= before + 32 // 8 + 1
        assert None in handles and any(handles)
        store.folders.drop_all(handles)
        assert store.folders._lingering == 0
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        assert store.look(names) == [True] * 200


@pytest.mark.parametrize("when", [-(10**10), 12 * 10**9, -2 * 10**10])
def test_times_that_no_clock_tells(tmp_path: Path, when: int) -> None:
    base = Path(tempfile.mkdtemp(dir=MEMORY)) if MEMORY else tmp_path
    try:
        with _both(base) as both:
            seen = []
            for store in both:
                put(store, GOOD)
                with suppress(OSError):  # not every file system holds such times
                    os.utime(path_of(store, GOOD), ns=(when * 10**9, when * 10**9))
                into = [memoryview(bytearray(ROW))]
                found = store.look([name_of(GOOD)])
                seen.append((found, store.get_all([name_of(GOOD)], into)[0].answer))
            assert seen[0] == seen[1]
    finally:
        if MEMORY:
            shutil.rmtree(base)


def test_every_row_is_paid_for_and_none_beyond_the_capacity(tmp_path: Path) -> None:
    with store_at(tmp_path / "s", capacity_bytes=5 * ROW) as store:
        numbers = range(40)
        names = [name_of(number) for number in numbers]
        rows = [memoryview(bytearray(row_of(number))) for number in numbers]
        for first in range(0, 40, 8):
            part = slice(first, first + 8)
            answers = {outcome.answer for outcome in store.put_all(names[part], rows[part])}
            assert answers <= {Answer.DONE, Answer.NO_ROOM}
            there = [number for number in numbers if holds(store, number)]
            assert len(there) * ROW <= store.charged <= 5 * ROW
            assert len(there) + store.room.held // ROW >= 4


def test_a_name_twice_in_one_batch_is_one_file(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        rows = [memoryview(bytearray(row_of(GOOD))) for _ in range(3)]
        outcomes = store.put_all([name_of(GOOD)] * 3, rows)
        answers = [outcome.answer for outcome in outcomes]
        assert answers == [Answer.DONE, Answer.PRESENT, Answer.PRESENT]
        assert temporaries(tmp_path / "s") == [] and holds(store, GOOD)
        assert store.room._in_flight == 0


def test_use_is_noted_and_the_time_of_writing_kept(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        put(store, GOOD)
        path = path_of(store, GOOD)
        os.utime(path, ns=(10**9, 2 * 10**9))
        assert store.get_all([name_of(GOOD)], [memoryview(bytearray(ROW))])[0].good
        info = path.stat()
        assert info.st_mtime_ns == 2 * 10**9
        assert store.calls.now() - info.st_atime < 60


def test_a_file_that_was_read_in_a_batch_can_be_quarantined(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        put(store, GOOD)
        put(store, ODD)
        into = [memoryview(bytearray(ROW)) for _ in range(2)]
        assert all(o.good for o in store.get_all([name_of(GOOD), name_of(ODD)], into))
        # A file that another process has put there since is left alone.
        path_of(store, ODD).rename(tmp_path / "kept")
        put(store, ODD)
        assert store.quarantine(name_of(GOOD), 1001, "refused")
        assert not store.quarantine(name_of(ODD), 1001, "refused")
        assert not holds(store, GOOD) and holds(store, ODD)


def test_faults_that_are_put_into_calls_meet_the_long_way(tmp_path: Path) -> None:
    """Whoever sits in the seam of calls sees every one of them."""
    calls = FaultyOs()
    with store_at(tmp_path / "s", calls) as store:
        assert not store.in_batches
        assert [o.answer for o in store.put_all(_names(), _rows())] == [Answer.DONE] * 3
        assert calls.made["write"] >= 3


def test_without_a_shared_object_files_go_one_by_one(tmp_path: Path) -> None:
    with patch.object(batch, "_beside", lambda: tmp_path):
        assert Batch.load() is None
        (tmp_path / f"_batch{SUFFIXES[0]}").write_bytes(b"not a library")
        assert Batch.load() is None
        with store_at(tmp_path / "s") as store:
            assert not store.in_batches
            assert [o.answer for o in store.put_all(_names(), _rows())] == [Answer.DONE] * 3
            assert all(holds(store, number) for number in (GOOD, ODD, LAST))


def test_our_own_misuse_raises(tmp_path: Path) -> None:
    assert LIBRARY is not None
    rule, flag = Rule.of(ROW, 0.0, 0.0, None, 0.0), Order().withdrawn
    row, short = memoryview(bytearray(ROW)), memoryview(bytearray(ROW - 1))
    one, two = Names.of([b"a"]), Names.of([b"a", b"b"])
    assert one is not None and two is not None
    how = Making(".x", 1, direct=False, sync=False)
    came, both = nothing_made(1), nothing_made(2)
    rows = Rows(memoryview(bytearray(2 * ROW)), ROW, [1, 0])
    for wrong in (
        lambda: LIBRARY.read([0], one, [short], False, rule),
        lambda: LIBRARY.read([0], two, [row], False, rule),
        lambda: LIBRARY.read([0], one, [row, row], False, rule),
        lambda: LIBRARY.store([0], one, [short], how, rule, flag, came),
        lambda: LIBRARY.store([0, 0], one, [row, row], how, rule, flag, came),
        lambda: LIBRARY.store(
            [0, 0], two, Rows(rows.memory, ROW - 1, [0, 1]), how, rule, flag, both
        ),
        lambda: LIBRARY.store([0], one, rows, how, rule, flag, came),
        lambda: LIBRARY.store([0], one, [row], how, rule, flag, both),
        lambda: LIBRARY.look([], one, rule),
        lambda: LIBRARY.look([0, 0], Names("61", 2, ["0", "0"]), rule),
        lambda: LIBRARY.copy([row], [short]),
        lambda: LIBRARY.copy([row], []),
    ):
        with pytest.raises(ValueError, match=r"bytes, not|entries for one batch|digits for"):
            wrong()
    for rows_that_are_not_there in ([2], [-1], [0, 5]):
        with pytest.raises(IndexError, match="rows"):
            Rows(rows.memory, ROW, rows_that_are_not_there)
    with pytest.raises(TypeError):
        LIBRARY.copy([row], [memoryview(bytes(ROW))])


def test_what_is_there_takes_no_room(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        assert all(outcome.good for outcome in store.put_all(_names(), _rows()))
        room, held = store.room, store.room.held
        assert room._unspent >= 3 * ROW  # taken for all, and given back
        again = store.put_all(_names(), _rows())
        assert [outcome.answer for outcome in again] == [Answer.PRESENT] * 3
        assert (room.held, room._in_flight) == (held, 0)
        room.return_unspent()
        room._more = False  # the last grant was refused: nothing is asked for, and nothing goes
        with patch.object(Room, "_ask", side_effect=AssertionError):
            again = store.put_all(_names(), _rows())
        assert [outcome.answer for outcome in again] == [Answer.PRESENT] * 3


def test_nothing_is_evicted_for_what_is_there(tmp_path: Path) -> None:
    numbers = range(8)
    names = [name_of(number) for number in numbers]
    rows = [memoryview(bytearray(row_of(number))) for number in numbers]
    with store_at(tmp_path / "s", capacity_bytes=8 * ROW) as store:
        assert [o.answer for o in store.put_all(names, rows)] == [Answer.DONE] * 8
        assert [o.answer for o in store.put_all(names, rows)] == [Answer.PRESENT] * 8
        assert not store.room.evicted
        # The positive control: for one that is not there one has to go.
        assert put(store, 9).answer is Answer.DONE
        assert store.room.evicted["chunk"] == 1


def test_names_of_several_lengths_go_one_by_one(tmp_path: Path) -> None:
    names, rows = [name_of(GOOD), b"short", name_of(LAST)], _rows()
    with store_at(tmp_path / "s") as store:
        with patch.object(store, "put", side_effect=store.put) as alone:
            assert [o.answer for o in store.put_all(names, rows)] == [Answer.DONE] * 3
        assert alone.call_count == 3
        assert store.look([*names, b"gone"]) == [True, True, True, False]
        into = [memoryview(bytearray(ROW)) for _ in names]
        assert all(outcome.good for outcome in store.get_all(names, into))
        assert into == rows
        for length in (0, 121):
            with pytest.raises(ValueError, match="object name"):
                store.put_all([bytes(length)], rows[:1])
        assert store.put_all([], []) == [] and store.look([]) == []


def test_names_of_the_longest_kind(tmp_path: Path) -> None:
    names = [bytes([number]) * 120 for number in (GOOD, ODD, LAST)]
    with store_at(tmp_path / "s") as store:
        with patch.object(store, "put", side_effect=AssertionError):
            assert [o.answer for o in store.put_all(names, _rows())] == [Answer.DONE] * 3
        into = [memoryview(bytearray(ROW)) for _ in names]
        with patch.object(store, "get", side_effect=AssertionError):
            assert all(outcome.good for outcome in store.get_all(names, into))
        assert into == _rows()


def test_rows_of_one_memory_are_stored_each_under_its_name(tmp_path: Path) -> None:
    memory = memoryview(bytearray(b"".join(row_of(number) for number in range(6))))
    rows = Rows(memory, ROW, [GOOD, ODD, LAST][::-1])
    with store_at(tmp_path / "s") as store:
        assert [o.answer for o in store.put_all(_names()[::-1], rows)] == [Answer.DONE] * 3
        assert all(holds(store, number) for number in (GOOD, ODD, LAST))
    memory.release()  # nothing holds on to it


def test_temporary_names_are_given_once(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store, ThreadPoolExecutor(4) as pool:
        counts = [1, 3, 2, 5] * 50
        parts = pool.map(store.lease.temporaries, counts)
        names = [
            f"{before}{first + at:x}"
            for (before, first), count in zip(parts, counts, strict=True)
            for at in range(count)
        ]
        names += [store.lease.temporary() for _ in range(10)]
        assert len(set(names)) == sum(counts) + 10


def test_a_withdrawn_order_is_heard_within_the_call(tmp_path: Path) -> None:
    """It is withdrawn when the batch has begun: what C reads is the order's own memory."""
    with store_at(tmp_path / "s") as store:
        put(store, 9)  # so that there is room in hand
        order, made = Order(), Batch.store

        def withdrawn(self: Batch, *args: Any) -> None:
            order.withdraw()
            made(self, *args)

        with patch.object(Batch, "store", withdrawn):
            assert store.put_all(_names(), _rows(), order) == []
        assert store.look(_names()) == [False] * 3
        assert temporaries(tmp_path / "s") == [] and store.room._in_flight == 0


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not true() and time.monotonic() < end:
        time.sleep(0.001)
    assert true()


def test_the_next_grant_is_got_before_one_is_used_up(tmp_path: Path) -> None:
    with store_at(tmp_path / "s", capacity_bytes=2048 * ROW) as store:
        room = store.room
        grant = room.grant_bytes
        assert grant == 32 * ROW and room._unspent == 0  # whoever stores nothing holds nothing
        names = [name_of(number) for number in range(16)]
        row = memoryview(bytearray(ROW))
        assert all(outcome.good for outcome in store.put_all(names[:15], [row] * 15))
        assert room._unspent == 17 * ROW
        assert store.put_all(names[15:], [row])[0].good
        _until(lambda: room._unspent == 48 * ROW)  # by the keeper


def test_what_has_to_go_goes_in_the_background(tmp_path: Path) -> None:
    capacity = 1024
    with store_at(tmp_path / "s", capacity_bytes=capacity * ROW) as store:
        room, grant = store.room, store.room.grant_bytes // ROW
        assert grant == 16
        numbers = iter(range(10**6))
        row = memoryview(bytearray(ROW))

        def store_some(count: int) -> None:
            names = [name_of(next(numbers)) for _ in range(count)]
            assert all(outcome.good for outcome in store.put_all(names, [row] * count))

        for _ in range(capacity // 8):
            store_some(8)
        with patch.object(room, "take_now", side_effect=AssertionError):
            for _ in range(20):
                _until(lambda: room._unspent >= 8 * ROW)
                store_some(8)
        assert 140 <= room.evicted["chunk"] <= 160 + 3 * grant
        assert store.charged <= capacity * ROW


def test_a_small_store_keeps_what_fits(tmp_path: Path) -> None:
    """Nothing goes ahead of time where a grant is a few rows."""
    with store_at(tmp_path / "s", capacity_bytes=320 * ROW) as store:
        room = store.room
        assert room.grant_bytes == 5 * ROW
        row = memoryview(bytearray(ROW))
        for number in range(320):
            assert store.put_all([name_of(number)], [row])[0].good
        time.sleep(0.05)
        assert not room.evicted and room.held == 0


def test_a_grant_that_is_refused_is_not_asked_for_again_and_again(tmp_path: Path) -> None:
    with store_at(tmp_path / "s", capacity_bytes=640 * ROW) as store:
        room = store.room
        assert room.take_granted(4 * ROW, 0.0)
        with patch.object(Ledger, "grant", return_value=False) as grant:
            while room.take_granted(ROW, 0.0):
                pass
            room.spent(0)
            # By who had none left, for many rows and for one, and by the keeper.
            _until(lambda: not room._ahead)
            assert room._unspent == 0 and 1 <= grant.call_count <= 3
            asked = grant.call_count
            assert not any(room.take_granted(ROW, 0.0) for _ in range(50))
            assert grant.call_count == asked
        # The slow way asks anew: others may have gone. Then grants come ahead again.
        assert room.take_now(ROW, 1, 0.0) == 1 and room.take_granted(ROW, 0.0)
        room.give_back(room._in_flight)


def test_nobody_waits_long_for_a_grant(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        room = store.room
        with room._asking:
            assert not room.take_granted(ROW, 0.01)
        assert room.take_granted(ROW, 0.0)
        with room._asking:  # asking ahead does not wait for whoever asks
            room._unspent = ROW
            assert room.take_granted(ROW, 60.0)
        with patch.object(Ledger, "grant", side_effect=LedgerBusy(11, "busy")):
            room._unspent = 2 * ROW
            assert room.take_granted(ROW, 0.0)  # what was granted can be had all the same
            assert room.take_granted(ROW, 0.0) and not room.take_granted(ROW, 0.0)
        room.give_back(room._in_flight)


def test_a_batch_none_of_whose_folders_can_be_had_goes_one_by_one(tmp_path: Path) -> None:
    with _both(tmp_path) as both:
        seen = []
        for store in both:
            root = Path(store.setting.root)
            for name in _names()[:2]:
                # A plain file where the folder should be.
                (root / "objects" / store.folders.place(name)[0]).write_bytes(b"")
            stored = store.put_all(_names()[:2], _rows()[:2])
            into = [memoryview(bytearray(ROW)) for _ in range(2)]
            loaded = store.get_all(_names()[:2], into)
            seen.append((stored, loaded, dict(store.counts)))
            assert store.room._in_flight == 0
        assert seen[0] == seen[1]
        assert not any(outcome.good for outcomes in seen[0][:2] for outcome in outcomes)


def test_a_batch_whose_folders_are_too_many_goes_one_by_one(tmp_path: Path) -> None:
    def none(self: folders.Folders, keys: list[str], make: bool) -> list[None]:
        return [None] * len(keys)

    with store_at(tmp_path / "s") as store, patch.object(folders.Folders, "take_all", none):
        assert [o.answer for o in store.put_all(_names(), _rows())] == [Answer.DONE] * 3
        into = [memoryview(bytearray(ROW)) for _ in range(3)]
        assert all(outcome.good for outcome in store.get_all(_names(), into))


def test_nothing_goes_ahead_of_time_for_what_is_there(tmp_path: Path) -> None:
    with store_at(tmp_path / "s", capacity_bytes=640 * ROW) as store:
        room, row = store.room, memoryview(bytearray(ROW))
        assert room.grant_bytes == 10 * ROW
        for first in range(0, 600, 10):
            numbers = range(first, first + 10)
            assert all(o.good for o in store.put_all([name_of(n) for n in numbers], [row] * 10))
        number = 600
        while room.account().charged < 640 * ROW:
            assert put(store, number).good
            number += 1
        _until(lambda: not room._is_low and not store.keeper._low)
        time.sleep(0.05)  # the keeper may be at it yet
        gone = room.evicted["chunk"]
        room._unspent, room._ahead = 3 * ROW, True  # low, with nothing to be granted
        names = [name_of(one) for one in (number - 1, number - 2)]
        for _ in range(20):
            outcomes = store.put_all(names, [row, row])
            assert [outcome.answer for outcome in outcomes] == [Answer.PRESENT] * 2
        store.keeper.tick()
        assert room.evicted["chunk"] == gone and room._ahead
        # The positive control: a new one has the next grant made.
        assert put(store, number).answer is Answer.DONE
        _until(lambda: room.evicted["chunk"] > gone)


def test_who_holds_the_ledger_holds_up_nobody_with_room_in_hand(tmp_path: Path) -> None:
    with store_at(tmp_path / "s", lock_wait_s=60.0) as store:
        room = store.room
        assert put(store, GOOD).good
        room._unspent = 8 * ROW
        other = os.open(tmp_path / "s" / "ledger", os.O_RDWR)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            start = time.monotonic()
            assert not room.take_granted(16 * ROW, 0.01)
            assert room.take_now(ROW, 16, 0.01) == 8
            assert not room.take_granted(16 * ROW, 60.0)  # not asked for again
            assert time.monotonic() - start < 30.0
        finally:
            os.close(other)
        room.give_back(8 * ROW)
        assert room.take_now(ROW, 16, 60.0) == 16
        room.give_back(16 * ROW)


def test_a_fault_before_the_call_costs_no_room(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        assert put(store, GOOD).good
        held = store.room.held
        for _ in range(3):
            with pytest.raises(TypeError):  # C is given no memory that may not be written
                store.put_all(_names(), [memoryview(bytes(ROW))] * 3)
        assert (store.room.held, store.room._in_flight) == (held, 0)
        with patch.object(making.Made, "answer", side_effect=MemoryError), suppress(MemoryError):
            store.put_all(_names(), _rows())  # and one after it: what is stored is spent
        assert store.room._in_flight == 0
        assert store.look(_names()) == [True] * 3


@pytest.mark.parametrize("call", ["begin_granted", "begin_now"])
def test_room_that_was_taken_is_not_lost_to_a_fault(tmp_path: Path, call: str) -> None:
    with store_at(tmp_path / "s") as store:
        store.room._more = call == "begin_granted"
        some, calls = Files.some, Counter[str]()

        def failing(self: Files, places: Sequence[int]) -> Files:
            calls["some"] += 1
            if calls["some"] == 2:  # the first is for those that are not there
                raise MemoryError
            return some(self, places)

        unmade = patch.object(making, "nothing_made", side_effect=MemoryError)
        fault = unmade if call == "begin_granted" else patch.object(Files, "some", failing)
        with fault, pytest.raises(MemoryError):
            store.put_all(_names(), _rows())
        assert store.room._in_flight == 0


def test_rows_and_names_have_to_be_as_many(tmp_path: Path) -> None:
    with _both(tmp_path) as both:
        for store in both:
            for call in (store.put_all, store.get_all):
                for rows in (_rows()[:2], [*_rows(), *_rows()]):
                    with pytest.raises(ValueError, match="entries"):
                        call(_names(), rows)
            assert store.look(_names()) == [False] * 3


def test_housekeeping_outlives_a_fault_of_our_own(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        with patch.object(Room, "ask_ahead", side_effect=MemoryError):
            store.keeper.ask_ahead()
            _until(lambda: store.keeper.errors["_ask_ahead: MemoryError"] > 0)
        counts = store.keeper.counts
        store.keeper.want_count()
        assert store.keeper.wait_counted(counts + 1)


def test_who_stores_no_more_gives_back_what_was_granted(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        assert put(store, GOOD).good
        room, used = store.room, ROW
        assert room.held > 0 and store.charged > used
        for _ in range(11):
            store.keeper.tick()
        assert room.held > 0
        assert put(store, ODD).good  # a store begins the minute anew
        for _ in range(11):
            store.keeper.tick()
        store.keeper.tick()
        assert (room.held, store.charged) == (0, 2 * ROW)
        assert put(store, LAST).good and room.held > 0


def test_a_grant_that_may_not_have_been_given_back_is_not_used(tmp_path: Path) -> None:
    with store_at(tmp_path / "s") as store:
        assert put(store, GOOD).good
        charged = store.charged
        with patch.object(Ledger, "settle", side_effect=LedgerBusy(11, "busy")):
            for _ in range(12):
                store.keeper.tick()
        assert store.room.held == 0 and store.charged == charged
        assert put(store, ODD).good and store.charged > charged

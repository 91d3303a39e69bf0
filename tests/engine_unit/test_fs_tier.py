# SPDX-License-Identifier: Apache-2.0
"""`kvsafe-fs` through vLLM's `SecondaryTierManager` interface, with real files and no engine."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvsafe.engine.config import parse_config
from kvsafe.engine.config.problems import ConfigError
from kvsafe.engine.fs import tier
from kvsafe.engine.fs.objects import CHARGED, OPERATIONS, STUCK, FsTierObjects
from kvsafe.engine.fs.tier import KVSafeFsTier, _teams
from kvsafe.engine.plugin import register
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.tiers import LOAD, STORE, Os
from tests.tiers.faults import FaultyOs, Stall, failing, stalled
from tests.tiers.stores import ROW, name_of, path_of, quarantined, row_of

ROWS = 16
DEADLINE_S = 5.0


def spec(quarantine: str = "aside", *, events: bool = False) -> Any:
    """As much of `KVSafeSpec` as the tier looks at."""
    return SimpleNamespace(
        station=SimpleNamespace(config=SimpleNamespace(quarantine=quarantine)),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
    )


class World:
    """A tier over 16 rows, driven as the manager drives it."""

    def __init__(
        self, root: Path, calls: Os | None = None, *, events: bool = False, **options: Any
    ) -> None:
        self.memory = bytearray(ROWS * ROW)
        self.rows = memoryview(self.memory).cast("B", (ROWS, ROW))
        chosen: dict[str, Any] = {
            "root_dir": str(root),
            "capacity_bytes": "1MiB",
            "threads": 2,
            "deadline_s": DEADLINE_S,
            **options,
        }
        self.tier = KVSafeFsTier(spec(events=events), self.rows, "kvsafe-fs", calls=calls, **chosen)
        assert self.tier.store.keeper.wait_counted()
        self._jobs = 0

    def row(self, number: int) -> bytes:
        return bytes(self.memory[number * ROW : (number + 1) * ROW])

    def fill(self, *numbers: int) -> None:
        """Row i holds the bytes of the i-th number."""
        for place, number in enumerate(numbers):
            self.memory[place * ROW : (place + 1) * ROW] = row_of(number)

    def submit(self, *numbers: int, load: bool, first: int = 0) -> int:
        self._jobs += 1
        job = TransferJob(
            job_id=self._jobs,
            keys=[OffloadKey(name_of(number)) for number in numbers],
            chunk_ids=np.arange(first, first + len(numbers), dtype=np.int32),
            is_promotion=load,
            req_context=ReqContext(req_id="r"),
        )
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self._jobs

    def finish(self, job: int) -> JobResult:
        for _ in range(4000):
            for result in self.tier.get_finished_jobs():
                assert result.job_id == job
                return result
            time.sleep(0.003)
        pytest.fail("the job did not end")

    def store(self, *numbers: int) -> JobResult:
        self.fill(*numbers)
        return self.finish(self.submit(*numbers, load=False))

    def load(self, *numbers: int) -> JobResult:
        for place in range(len(numbers)):
            self.memory[place * ROW : (place + 1) * ROW] = bytes(ROW)
        return self.finish(self.submit(*numbers, load=True))

    def ask(self, number: int, request: str = "r") -> LookupResult:
        """Ask as a scheduler does, step after step, until it is no RETRY."""
        for _ in range(4000):
            key, context = OffloadKey(name_of(number)), ReqContext(req_id=request)
            result = self.tier.lookup(key, context)
            if result is not LookupResult.RETRY:
                return result
            self.tier.on_schedule_end(MagicMock())
            time.sleep(0.003)
        pytest.fail("the lookup was not answered")


@pytest.fixture
def calls() -> FaultyOs:
    made = FaultyOs()
    made.only_threads = ("kvsafe-fs",)
    return made


@pytest.fixture
def world(tmp_path: Path, calls: FaultyOs) -> Iterator[World]:
    made = World(tmp_path / "s", calls)
    made.tier.store.keeper._stop = True  # no housekeeping of its own from here on
    yield made
    calls.calm()
    made.tier.shutdown()


def test_rows_go_out_and_come_back(world: World) -> None:
    assert world.ask(1, "cold") is LookupResult.MISS
    assert world.store(1, 2, 3).success
    assert world.ask(1) is LookupResult.HIT
    assert world.ask(4) is LookupResult.MISS
    result = world.load(3, 1)
    assert result.success
    assert result.transfer_bytes == 2 * ROW
    assert (world.row(0), world.row(1)) == (row_of(3), row_of(1))
    assert not world.tier.has_pending_work()


def test_a_stored_chunk_is_a_hit_for_those_who_had_missed_it(world: World) -> None:
    assert world.ask(1) is LookupResult.MISS
    world.store(1)
    assert world.ask(1) is LookupResult.HIT


def test_each_row_of_a_job_stands_for_itself(world: World) -> None:
    """Finding K: one bad name must not take the rest of its batch with it."""
    world.store(1, 2, 3)
    path_of(world.tier.store, 2).unlink()
    result = world.load(1, 2, 3)
    assert not result.success
    assert result.successful_keys == (name_of(1), name_of(3))
    assert (world.row(0), world.row(2)) == (row_of(1), row_of(3))
    assert world.ask(2) is LookupResult.MISS
    assert world.store(1, 2, 3).success
    assert world.load(2).success
    # A torn file under the name is no success: it is replaced.
    path_of(world.tier.store, 3).write_bytes(b"torn")
    assert world.store(3).success
    assert world.load(3).success


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_transient_error_is_a_miss_and_the_next_request_hits(
    world: World, calls: FaultyOs, code: int
) -> None:
    """F11."""
    world.store(1)
    assert world.ask(1, "first") is LookupResult.HIT
    calls.plan("read" if code == errno.EIO else "open", failing(code), 1, 1)
    assert not world.load(1).success
    assert world.ask(1, "first") is LookupResult.MISS
    world.tier.on_request_finished(ReqContext(req_id="first"))
    assert world.ask(1, "second") is LookupResult.HIT
    assert world.load(1).success


def test_a_read_that_never_returns(world: World, calls: FaultyOs) -> None:
    """F14: late is a miss, the pool goes on, and what comes late lands in no row."""
    world.store(1, 2)
    stall = Stall()
    calls.plan("read", stalled(stall, before=False), 1, 1)
    job = world.submit(1, load=True)
    assert stall.entered.wait(10)
    assert world.tier.has_pending_work()
    calls.clock_skew_s += DEADLINE_S + 1
    result = world.finish(job)
    assert not result.success
    assert not world.tier.has_pending_work()
    # The row belongs to another chunk now.
    world.memory[:ROW] = b"\7" * ROW
    assert world.finish(world.submit(2, load=True, first=1)).success
    assert world.row(1) == row_of(2)
    assert _stat(world, STUCK) == 1
    stall.let_go.set()
    while world.tier._pool.counts.stuck:
        time.sleep(0.003)
    assert world.row(0) == b"\7" * ROW
    assert list(world.tier.get_finished_jobs()) == []


def test_a_write_that_never_returns_publishes_nothing_of_the_next_chunk(
    world: World, calls: FaultyOs
) -> None:
    """F12: the row is given away while the kernel may still read from it."""
    stall = Stall()
    calls.plan("write", stalled(stall), 1, 1)
    world.fill(1)
    job = world.submit(1, load=False)
    assert stall.entered.wait(10)
    calls.clock_skew_s += DEADLINE_S + 1
    assert not world.finish(job).success
    world.fill(2)
    stall.let_go.set()
    while world.tier._pool.counts.stuck:
        time.sleep(0.003)
    assert world.ask(1) is LookupResult.MISS
    assert world.store(1).success
    assert world.load(1).success
    assert world.row(0) == row_of(1)


def test_a_lookup_that_never_returns_is_a_miss(world: World, calls: FaultyOs) -> None:
    world.store(1)
    stall = Stall()
    calls.plan("stat", stalled(stall), 1, 1)
    key, context = OffloadKey(name_of(1)), ReqContext(req_id="a")
    assert world.tier.lookup(key, context) is LookupResult.RETRY
    world.tier.on_schedule_end(MagicMock())
    assert stall.entered.wait(10)
    calls.clock_skew_s += DEADLINE_S + 1
    assert world.ask(1, "a") is LookupResult.MISS
    assert world.ask(1, "b") is LookupResult.MISS
    world.tier.on_request_finished(context)
    world.tier.on_request_finished(ReqContext(req_id="b"))
    assert world.ask(1, "c") is LookupResult.HIT
    stall.let_go.set()


@pytest.fixture
def in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks are there; a lookup answers for each name by itself."""
    monkeypatch.setattr(tier, "_LOOK_S", -1.0)
    world.store(1, 2, 3)


@pytest.mark.usefixtures("in_parts")
def test_what_a_lookup_has_found_out_does_not_wait_for_the_rest(
    world: World, calls: FaultyOs
) -> None:
    stall = Stall()
    calls.plan("stat", stalled(stall), 3, 1)
    context = ReqContext(req_id="a")
    for number in (1, 2, 3):
        assert world.tier.lookup(OffloadKey(name_of(number)), context) is LookupResult.RETRY
    world.tier.on_schedule_end(MagicMock())
    assert stall.entered.wait(10)
    assert world.ask(1, "a") is LookupResult.HIT
    assert world.ask(2, "b") is LookupResult.HIT
    assert world.tier.lookup(OffloadKey(name_of(3)), context) is LookupResult.RETRY
    calls.clock_skew_s += DEADLINE_S + 1
    assert world.ask(3, "a") is LookupResult.MISS
    assert world.ask(2, "a") is LookupResult.HIT
    stall.let_go.set()


@pytest.mark.usefixtures("in_parts")
def test_a_lookup_in_parts_has_one_deadline(world: World, calls: FaultyOs) -> None:
    def slow(function: Any, args: Any, kwargs: Any) -> Any:
        calls.clock_skew_s += DEADLINE_S * 0.6
        time.sleep(0.2)  # so that the pool looks at its deadlines meanwhile
        return function(*args, **kwargs)

    calls.plan("stat", slow, 1, 3)
    for number in (1, 2, 3):
        world.tier.lookup(OffloadKey(name_of(number)), ReqContext(req_id="a"))
    found = [world.ask(number, "a") for number in (1, 2, 3)]
    assert found == [LookupResult.HIT, LookupResult.MISS, LookupResult.MISS]


def test_drain_ends_even_when_a_call_does_not(world: World, calls: FaultyOs) -> None:
    world.store(1)
    stall = Stall()
    calls.plan("read", stalled(stall), 1, 1)
    job = world.submit(1, load=True)
    assert stall.entered.wait(10)
    calls.clock_skew_s += DEADLINE_S + 1
    world.tier.drain_jobs()
    [result] = world.tier.get_finished_jobs()
    assert (result.job_id, result.success) == (job, False)
    stall.let_go.set()


def test_refused_objects_are_told_and_moved(world: World, tmp_path: Path) -> None:
    told: list[tuple[bytes, int, bool]] = []
    objects = world.tier.objects
    objects.on_refusal = lambda name, refusal, moved: told.append(
        (bytes(name), refusal.number, moved)
    )
    world.store(1, 2, 3)
    path_of(world.tier.store, 1).chmod(0o666)
    assert world.ask(1) is LookupResult.MISS
    assert told == [(name_of(1), 1202, True)]
    assert world.load(2, 3).success
    tag = Refusal.of(RefusalKind.PAYLOAD_TAG, "payload", "a", "b")
    assert objects.quarantine(OffloadKey(name_of(2)), tag)
    assert not objects.exists(OffloadKey(name_of(2)))
    unknown = Refusal.of(RefusalKind.EPOCH_UNKNOWN, "epoch", 1, 2)
    assert not objects.quarantine(OffloadKey(name_of(3)), unknown)
    assert objects.exists(OffloadKey(name_of(3)))
    revoked = Refusal.of(RefusalKind.EPOCH_REVOKED, "epoch", 2, 1)
    assert objects.quarantine(OffloadKey(name_of(3)), revoked)
    numbers = sorted(path.name.split("-")[0] for path in quarantined(tmp_path / "s"))
    assert numbers == ["1001", "1202"]
    assert isinstance(objects, FsTierObjects)


def test_touch_reaches_the_files(world: World, calls: FaultyOs) -> None:
    world.store(1, 2)
    before = path_of(world.tier.store, 1).stat()
    calls.skew_s = 500
    world.tier.touch([OffloadKey(name_of(1))], ReqContext(req_id="r"))
    world.tier.store.keeper._stop = False
    world.tier.store.keeper.tick()
    after = path_of(world.tier.store, 1).stat()
    assert after.st_atime > before.st_atime + 400
    assert after.st_mtime_ns == before.st_mtime_ns
    assert path_of(world.tier.store, 2).stat().st_atime < before.st_atime + 400


def _stat(world: World, name: str, *labels: str) -> float:
    stats = world.tier.get_stats()
    assert stats is not None
    values: dict[tuple[str, ...], float] = stats._values.get(name, {})
    return values.get(("kvsafe-fs", *labels), 0)


def test_statistics(world: World) -> None:
    world.store(1, 2)
    assert _stat(world, OPERATIONS, "done") == 2
    assert _stat(world, OPERATIONS, "done") == 0
    world.load(1, 5)
    stats = world.tier.get_stats()
    assert stats is not None
    counts = {labels[1]: value for labels, value in stats._values[OPERATIONS].items()}
    assert counts == {"done": 1, "missing": 1}
    assert _stat(world, CHARGED) >= 2 * ROW
    assert {OPERATIONS, CHARGED, STUCK} <= set(KVSafeFsTier.build_metric_definitions({}))


def test_events_tell_what_is_there(tmp_path: Path) -> None:
    """F28: replayed, they give the true residency at every step, evictions included."""
    world = World(tmp_path / "s", events=True, capacity_bytes=4 * ROW, locality="LOCAL")
    told: set[bytes] = set()
    try:
        for number in range(12):
            world.store(number)
            if number == 6:
                objects = world.tier.objects
                assert world.load(6).success
                tag = Refusal.of(RefusalKind.PAYLOAD_TAG, "payload", "a", "b")
                assert objects.quarantine(OffloadKey(name_of(6)), tag)
            for event in world.tier.take_events():
                assert (event.medium.name, event.locality.name) == ("STORAGE", "LOCAL")
                keys = {bytes(key) for key in event.keys}
                assert keys.isdisjoint(told) != event.removed
                told = told - keys if event.removed else told | keys
            present = [n for n in range(12) if path_of(world.tier.store, n).exists()]
            assert told == {name_of(n) for n in present}
        assert 0 < len(told) <= 4
    finally:
        world.tier.shutdown()


def test_a_chunk_that_goes_before_its_store_is_reported_is_never_told(tmp_path: Path) -> None:
    world = World(tmp_path / "s", events=True)
    try:
        world.fill(1)
        job = world.submit(1, load=False)
        for _ in range(4000):
            if path_of(world.tier.store, 1).exists():
                break
            time.sleep(0.003)
        while world.tier.store.counts["done"] == 0:
            time.sleep(0.003)
        assert world.tier.store.discard(name_of(1))
        assert world.finish(job).success
        assert list(world.tier.take_events()) == []
        world.store(1)
        [event] = world.tier.take_events()
        assert (event.removed, [bytes(key) for key in event.keys]) == (False, [name_of(1)])
    finally:
        world.tier.shutdown()


def test_a_stray_file_that_is_evicted_is_no_event(tmp_path: Path) -> None:
    world = World(tmp_path / "s", events=True)
    try:
        assert world.store(1).success
        folder = path_of(world.tier.store, 1).parent
        stray = folder / "notes.txt"
        stray.write_bytes(bytes(ROW))
        assert world.tier.store.room.remove(folder.name, stray.name)
        assert world.store(2).success
        [first, second] = world.tier.take_events()
        assert [bytes(key) for key in (*first.keys, *second.keys)] == [name_of(1), name_of(2)]
        assert not first.removed and not second.removed
    finally:
        world.tier.shutdown()


def test_without_events_none_are_kept(world: World) -> None:
    world.store(1)
    assert list(world.tier.take_events()) == []
    assert world.tier.store.room.on_gone is None


def test_registered_once_and_built_by_its_name(tmp_path: Path) -> None:
    register()
    register()
    memory = memoryview(bytearray(ROWS * ROW)).cast("B", (ROWS, ROW))
    config = {
        "type": "kvsafe-fs",
        "root_dir": str(tmp_path / "s"),
        "capacity_bytes": 1 << 20,
        "quarantine": "keep",
        "locality": "LOCAL",
    }
    tier = SecondaryTierFactory.create_secondary_tier(config, memory, spec())
    assert isinstance(tier, KVSafeFsTier)
    assert tier.store.setting.quarantine == "keep"
    tier.shutdown()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"capacity_bytes": "1 potato"}, "capacity_bytes"),
        ({"sync": "always"}, "sync"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"n_read_threads": 4}, "n_read_threads"),
        ({"direct_io": True}, "direct_io"),
        ({"ttl_s": 0}, "ttl_s"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    memory = memoryview(bytearray(ROWS * ROW)).cast("B", (ROWS, ROW))
    good: dict[str, Any] = {"root_dir": str(tmp_path / "s"), "capacity_bytes": 1 << 20}
    with pytest.raises(ConfigError, match=key):
        KVSafeFsTier(spec(), memory, "kvsafe-fs", **{**good, **change})
    KVSafeFsTier(spec(), memory, "kvsafe-fs", **good).shutdown()


def test_under_the_stock_spec_it_names_the_one_that_seals(tmp_path: Path) -> None:
    """It must not take rows that nobody has sealed."""
    memory = memoryview(bytearray(ROWS * ROW)).cast("B", (ROWS, ROW))
    with pytest.raises(ValueError, match=r"SealingFsTier.*kvsafe\.engine\.fs\.second_door"):
        KVSafeFsTier(
            SimpleNamespace(),
            memory,
            "kvsafe-fs",
            root_dir=str(tmp_path / "s"),
            capacity_bytes=1 << 20,
        )


def _parsed(**tier: Any) -> Any:
    extra = {
        "cpu_bytes_to_use": 1 << 20,
        "secondary_tiers": [{"type": "kvsafe-fs", "root_dir": "/srv/kv", **tier}],
    }
    return parse_config(extra, environ={"HOME": "/srv/home"})


def test_the_option_table() -> None:
    """A proven type: no override is needed, sizes become bytes, and vLLM gets all of it."""
    given = {
        "capacity_bytes": "100GiB",
        "reserve_bytes": 0,
        "ttl_s": 86400,
        "sync": "data",
        "threads": 4,
        "direct_io": "off",
        "deadline_s": 2,
        "quarantine": "remove",
        "locality": "LOCAL",
    }
    [tier] = _parsed(**given).secondary_tiers
    assert tier.proven
    assert tier.root_dir == "/srv/kv"
    passed_on = tier.to_vllm()
    assert passed_on["capacity_bytes"] == 100 << 30
    assert {**given, "capacity_bytes": 100 << 30}.items() <= passed_on.items()


def test_a_tier_without_capacity_or_with_a_typo_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\].capacity_bytes"):
        _parsed()
    with pytest.raises(ConfigError, match="did you mean capacity_bytes"):
        _parsed(capacity_bytes=1, capacity_byte=1)
    with pytest.raises(ConfigError, match="module_path"):
        _parsed(capacity_bytes=1, module_path="kvsafe.engine.fs.tier")


@pytest.mark.parametrize(
    ("threads", "loading"), [(1, 1), (2, 1), (3, 2), (4, 2), (15, 8), (16, 8), (32, 8), (64, 16)]
)
def test_all_threads_store_some_load_and_one_more_only_loads(threads: int, loading: int) -> None:
    teams = _teams(threads)
    assert sum(STORE in team for team in teams) == threads
    assert sum(LOAD in team for team in teams) == loading
    assert [team for team in teams if STORE not in team] == [(LOAD,)]

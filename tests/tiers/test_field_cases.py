# SPDX-License-Identifier: Apache-2.0
"""Field cases on `kvsafe-fs` behind the real manager: F10, F11, F13 to F17, F25, F26.

Each has its positive control beside it: with nothing wrong the same call hits. Tiers, files,
manager, sealing and proofs are real; the engine is played by the test.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from fuzz.campaigns import crowd
from fuzz.campaigns.model_disk import ModelOs
from kvsafe.engine.fs.tier import KVSafeFsTier
from kvsafe.engine.tiers.proving import ProvingTier
from kvsafe.host import HostRegion, RegionShape
from kvsafe.seal.refusal import RefusalKind
from kvsafe.tiers import ChunkStore, Os, StoreSetting
from kvsafe.tiers.buffers import ThreadBuffers
from tests.engine_unit.sealed_world import PAYLOAD, World, key_of, running
from tests.tiers.faults import Action, FaultyOs, Stall, failing, failing_after, stalled
from tests.tiers.stores import ROW, name_of, put, row_of, temporaries, used

HIT, MISS = LookupResult.HIT, LookupResult.MISS
A, B, C = (key_of(number) for number in range(1, 4))
DEADLINE_S = 5.0
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class FsWorld(World):
    """A scheduler side whose tier is `kvsafe-fs`, with a fault layer below it."""

    def __init__(self, folder: Path, calls: Os | None = None, **options: Any) -> None:
        self.calls = calls or FaultyOs()
        self.options: dict[str, Any] = {
            "root_dir": str(folder / "store"),
            "capacity_bytes": 64 << 20,
            "threads": 4,
            "deadline_s": DEADLINE_S,
            **{name: options.pop(name) for name in ("capacity_bytes", "sync") if name in options},
        }
        super().__init__(folder, tiers=["kvsafe-fs"], **options)
        assert self.store_on_disk.keeper.wait_counted()

    def _tier(self, index: int, kind: str) -> ProvingTier:
        rows = self.primary.get_kv_memoryview()
        spec = SimpleNamespace(station=self.station)
        inner = KVSafeFsTier(spec, rows, kind, calls=self.calls, **self.options)
        return ProvingTier(inner, index, self.desk, inner.objects)

    @property
    def store_on_disk(self) -> ChunkStore:
        """The store below the tier."""
        inner = self.tier.inner
        assert isinstance(inner, KVSafeFsTier)
        return inner.store

    @property
    def root(self) -> Path:
        """The tier's folder."""
        return Path(self.options["root_dir"])

    def file(self, key: OffloadKey) -> Path:
        """Where the chunk of a key lies."""
        bucket, file = self.store_on_disk.folders.place(bytes(self.names.name(key)))
        return self.root / "objects" / bucket / file

    def saved(self, *keys: OffloadKey) -> None:
        """Compute chunks anew, see them on the disk, and forget the rows."""
        for key in keys:
            self.computed(key)
        assert all(self.file(key).exists() for key in keys)
        self.forget_rows()

    def computed(self, key: OffloadKey) -> None:
        """A request has computed this chunk: it is stored unless the host tier has it."""
        self.flush()
        if self.primary.row_of(key) is None:
            self.store(key)
            self.flush()

    def outcome(self, key: OffloadKey) -> LookupResult:
        """What a new request is told in the end; whatever is offered is right."""
        answer = self.ask(key)
        self.prove_offers()
        return answer

    def aside(self) -> list[str]:
        """Refusal numbers of what lies in quarantine."""
        return sorted(
            path.name.split("-")[0] for path in (self.root / "kvsafe-quarantine").iterdir()
        )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FsWorld]:
    """A world whose disk holds A, B and C; its host tier is empty."""
    with running(FsWorld(tmp_path)) as made:
        assert isinstance(made, FsWorld)
        made.saved(A, B, C)
        assert isinstance(made.calls, FaultyOs)
        made.calls.only_threads = ("kvsafe-fs",)
        yield made
        made.calls.calm()


def faulty(world: FsWorld) -> FaultyOs:
    """The world's fault layer."""
    assert isinstance(world.calls, FaultyOs)
    return world.calls


def test_control_without_a_fault_everything_hits(world: FsWorld) -> None:
    assert [world.outcome(key) for key in (A, B, C)] == [HIT] * 3
    assert world.outcome(key_of(99)) is MISS
    assert world.refusals() == {}
    assert world.aside() == []


# ---- F10: other requests' KV out of a shared folder and shared buffers --------------------


def _work_together(worlds: list[FsWorld], rng: random.Random, rounds: int) -> dict[str, int]:
    """Two engines store and ask at random; rows are few, so most hits come from the disk."""
    seen = {"hit": 0, "miss": 0}
    for _ in range(rounds):
        world, number = rng.choice(worlds), rng.randrange(20)
        if rng.random() < 0.4:
            world.computed(key_of(number))
            continue
        keys = [key_of(rng.randrange(20)) for _ in range(3)]
        contexts = [world.request() for _ in keys]
        answers = [world.ask(key, context) for key, context in zip(keys, contexts, strict=True)]
        world.prove_offers()
        for context, answer in zip(contexts, answers, strict=True):
            seen["hit" if answer is HIT else "miss"] += 1
            world.manager.on_request_finished(context)
    return seen


@pytest.fixture
def two_worlds(tmp_path: Path) -> Iterator[list[FsWorld]]:
    """Two engines on one folder with one key, 4 rows each, room for 12 chunks."""
    room = 12 * (4096 + PAYLOAD)
    worlds = [FsWorld(tmp_path, capacity_bytes=room) for _ in range(2)]
    yield worlds
    for world in worlds:
        world.close()


def test_f10_every_loaded_chunk_is_the_one_that_was_asked_for(two_worlds: list[FsWorld]) -> None:
    seen = _work_together(two_worlds, random.Random(10), 120)
    assert seen["hit"] > 20
    assert all(world.refusals() == {} for world in two_worlds)


def test_f10_one_buffer_for_all_threads_is_noticed_and_not_served(world: FsWorld) -> None:
    """The fault that was reported, put in: what it mixes up is refused, by the key."""
    shared, both = memoryview(mmap.mmap(-1, 4096 + PAYLOAD)), Stall()
    calls = faulty(world)
    # The first read has filled the buffer and is held; the second fills it anew.
    calls.plan("read", stalled(both, before=False), 1, 1)
    with patch.object(ThreadBuffers, "get_all", lambda self: [shared]):
        first, second = world.request(), world.request()
        while world.lookup(A, first) in (LookupResult.RETRY, LookupResult.HIT_PENDING):
            world.step()
            if both.entered.wait(0.01):
                break
        assert world.ask(B, second) is HIT
        both.let_go.set()
        assert world.ask(A, first) is MISS
    world.prove_offers()
    assert world.refusals() == {str(RefusalKind.KEY.value): 1}


# ---- F11: a failed load goes on being a hit ------------------------------------------------


def _removed(world: FsWorld) -> Action:
    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        world.file(A).unlink()
        return function(*args, **kwargs)

    return act


def _cut(world: FsWorld) -> Action:
    def act(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        os.truncate(world.file(A), 100)
        return function(*args, **kwargs)

    return act


FAILURES: dict[str, tuple[str, Callable[[FsWorld], Action], bool]] = {
    "ENOENT after the lookup": ("open", _removed, False),
    "short after the lookup": ("read", _cut, False),
    "EIO once": ("read", lambda world: failing(errno.EIO), True),
    "EMFILE": ("open", lambda world: failing(errno.EMFILE), True),
    "ENFILE": ("open", lambda world: failing(errno.ENFILE), True),
    "ESTALE": ("fstat", lambda world: failing(errno.ESTALE), True),
    "error of close": ("close", lambda world: failing_after(errno.EIO), True),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_f11_a_failed_load_is_a_miss_and_heals(world: FsWorld, failure: str) -> None:
    call, make, stays = FAILURES[failure]
    plan = faulty(world).plan(call, make(world), 1, 1)
    # `ask` ends: the request is told to recompute, and is not told "hit" again.
    context = world.request()
    assert world.ask(A, context) is MISS
    assert plan.hits == 1
    assert world.ask(A, context) is MISS
    world.manager.on_request_finished(context)
    assert world.outcome(B) is HIT
    if not stays:
        # What was cut while it was read is met, and moved away, by the next one at the latest.
        assert world.outcome(A) is MISS
        assert not world.file(A).exists()
        world.saved(A)
    assert world.outcome(A) is HIT


# ---- F13: right length, wrong bytes; and what is no file of ours ----------------------------


def _flip(at: int) -> Callable[[FsWorld], None]:
    def damage(world: FsWorld) -> None:
        data = bytearray(world.file(A).read_bytes())
        data[at] ^= 1 << abs(at) % 8
        world.file(A).write_bytes(data)

    return damage


def _swap_files(world: FsWorld) -> None:
    one, other = world.file(A), world.file(B)
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


def _swap_ranges(world: FsWorld) -> None:
    data = bytearray(world.file(A).read_bytes())
    data[4096:4608], data[6144:6656] = data[6144:6656], data[4096:4608]
    world.file(A).write_bytes(data)


def _zero_page(world: FsWorld) -> None:
    with world.file(A).open("r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))


def _resize(change: int) -> Callable[[FsWorld], None]:
    return lambda world: os.truncate(world.file(A), max(0, 4096 + PAYLOAD + change))


def _in_its_place(make: Callable[[Path], None]) -> Callable[[FsWorld], None]:
    def damage(world: FsWorld) -> None:
        world.file(A).unlink()
        make(world.file(A))

    return damage


def _link(path: Path) -> None:
    outside = path.parents[3] / "outside"
    outside.write_bytes(bytes(4096 + PAYLOAD))
    path.symlink_to(outside)


PAYLOAD_TAG, TIER_OBJECT, KEY = (
    str(RefusalKind.PAYLOAD_TAG.value),
    str(RefusalKind.TIER_OBJECT.value),
    str(RefusalKind.KEY.value),
)
DAMAGES: dict[str, tuple[Callable[[FsWorld], None], str]] = {
    "first byte": (_flip(0), str(RefusalKind.BAD_MAGIC.value)),
    "in the header": (_flip(200), str(RefusalKind.HEADER_TAG.value)),
    "in the payload": (_flip(5000), PAYLOAD_TAG),
    "last byte": (_flip(-1), PAYLOAD_TAG),
    "two files swapped": (_swap_files, KEY),
    "two ranges swapped": (_swap_ranges, PAYLOAD_TAG),
    "a page of zeros": (_zero_page, PAYLOAD_TAG),
    "truncated": (_resize(-1), TIER_OBJECT),
    "lengthened": (_resize(1), TIER_OBJECT),
    "empty": (_resize(-(1 << 30)), TIER_OBJECT),
    "directory": (_in_its_place(Path.mkdir), TIER_OBJECT),
    "fifo": (_in_its_place(os.mkfifo), TIER_OBJECT),
    "symlink": (_in_its_place(_link), TIER_OBJECT),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_f13_wrong_bytes_are_refused_counted_quarantined_and_healed(
    world: FsWorld, damage: str
) -> None:
    make, number = DAMAGES[damage]
    make(world)
    assert world.outcome(A) is MISS
    assert world.refusals() == {number: 1}
    assert world.aside() == [number]
    assert not os.path.lexists(world.file(A))
    assert world.outcome(C) is HIT
    world.saved(A)
    assert world.outcome(A) is HIT


# ---- F14: a read that never returns -------------------------------------------------------


def test_f14_a_stuck_read_is_a_miss_and_others_are_served(world: FsWorld) -> None:
    calls, stall = faulty(world), Stall()
    calls.plan("read", stalled(stall), 1, 1)
    context = world.request()
    while not stall.entered.is_set():
        assert world.lookup(A, context) is not MISS
        world.step()
        stall.entered.wait(0.01)
    assert world.outcome(B) is HIT
    calls.clock_skew_s += DEADLINE_S + 1
    assert world.ask(A, context) is MISS
    world.manager.on_request_finished(context)
    assert world.outcome(C) is HIT
    stall.let_go.set()
    assert world.outcome(A) is HIT


# ---- F15: the disk fills up ---------------------------------------------------------------


def test_f15_three_times_the_quota(tmp_path: Path) -> None:
    row = 4096 + PAYLOAD
    with running(FsWorld(tmp_path, capacity_bytes=10 * row)) as world:
        assert isinstance(world, FsWorld)
        for number in range(30):
            world.computed(key_of(number))
            assert used(world.root) <= 10 * row
        world.forget_rows()
        hits = [number for number in range(30) if world.outcome(key_of(number)) is HIT]
        assert hits == list(range(20, 30))
    # A restart knows what is there, and goes on within the quota.
    with running(FsWorld(tmp_path, capacity_bytes=10 * row)) as world:
        assert isinstance(world, FsWorld)
        assert used(world.root) <= world.store_on_disk.charged <= 10 * row
        assert world.outcome(key_of(29)) is HIT
        world.saved(key_of(50))
        assert used(world.root) <= 10 * row
        assert world.outcome(key_of(50)) is HIT


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "write", "fdatasync", "publish", "fsync"])
def test_f15_a_full_disk_shows_nothing_partial(tmp_path: Path, call: str, code: int) -> None:
    with running(FsWorld(tmp_path, sync="full")) as world:
        assert isinstance(world, FsWorld)
        world.saved(A)
        calls = faulty(world)
        calls.only_threads = ("kvsafe-fs",)
        world.store_on_disk.keeper.stop(20)
        plan = calls.plan(call, failing(code))
        world.computed(B)
        calls.calm()
        assert plan.hits
        assert temporaries(world.root) == []
        world.forget_rows()
        assert world.outcome(A) is HIT
        # A folder's fsync comes after the publishing: then it is there and whole, else absent.
        assert world.outcome(B) is (HIT if call == "fsync" else MISS)
        world.forget_rows()
        world.saved(B)
        assert world.outcome(B) is HIT


# ---- F16: power loss after the rename -----------------------------------------------------


@pytest.mark.parametrize("data", ["lost", "zeroed", "torn", "kept"])
@pytest.mark.parametrize("sync", ["none", "data", "full"])
def test_f16_what_was_not_synced_is_refused_never_served(
    tmp_path: Path, sync: str, data: str
) -> None:
    """All names survive, unsynced pages do not: what a rename before its data leaves."""
    disk = ModelOs(tmp_path / "store")
    with running(FsWorld(tmp_path, disk, sync=sync)) as world:
        assert isinstance(world, FsWorld)
        world.saved(A)
        # The folders and the account are as old as the hills; the chunk is not.
        names = random.Random(1)
        with patch.object(names, "choice", lambda options: options[-1]):
            disk.lose(names, False, data, tmp_path / "after")
    (tmp_path / "store").rename(tmp_path / "before")
    (tmp_path / "after" / "root").rename(tmp_path / "store")
    with (
        patch("kvsafe.tiers.ledger.boot_id", return_value=bytes(16)),
        running(FsWorld(tmp_path)) as world,
    ):
        assert isinstance(world, FsWorld)
        lost = sync == "none" and data != "kept"
        assert world.outcome(A) is (MISS if lost else HIT)
        assert bool(world.refusals()) == lost
        world.forget_rows()
        world.saved(A)
        assert world.outcome(A) is HIT


# ---- F17: zeros written over another rank's data ------------------------------------------


@pytest.mark.parametrize("advice", ["taken", "refused"])
def test_f17_a_rank_that_joins_late_changes_no_byte(tmp_path: Path, advice: str) -> None:
    shape = RegionShape(4, 8192, 2)
    first = HostRegion.open("launch", shape, tmp_path)
    for row in range(4):
        first.row(row)[:] = row_of(row)
    refused = patch.object(HostRegion, "_advise", lambda self: None)
    with refused if advice == "refused" else patch.object(HostRegion, "_nothing", 0, create=True):
        second = HostRegion.open("launch", shape, tmp_path)
    try:
        assert all(bytes(first.row(row)) == row_of(row) for row in range(4))
        # They do share memory: what the second writes the first sees.
        second.row(3)[:] = row_of(9)
        assert bytes(first.row(3)) == row_of(9)
        assert bytes(second.row(0)) == row_of(0)
    finally:
        second.close()
        first.close()


# ---- F25: a kill in mid-start stops no later start -----------------------------------------


class _Killing(Os):
    """Kills its process at one call."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.made = 0

    def call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.made += 1
        if self.made == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)


def _start_and_die(root: Path, at: int) -> bool:
    """Start a store in a child that is killed at its call number `at`; whether it was."""
    child = os.fork()
    if child == 0:
        try:
            store = ChunkStore(StoreSetting(str(root), ROW, 1 << 20), _Killing(at))
            store.keeper.wait_counted()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGKILL
    assert status == 0
    return False


@pytest.mark.parametrize("first", [True, False], ids=["first start", "later start"])
def test_f25_kill_at_each_call_of_a_start(tmp_path: Path, first: bool) -> None:
    kills = 0
    for at in range(1 + first, 200, 2):
        root = tmp_path / (f"s{at}" if first else "s")
        if not first:
            with _opened(root) as store:
                put(store, 1)
        if not _start_and_die(root, at):
            break
        kills += 1
        with _opened(root) as store:
            # Control: it works, serves what was there, and keeps nobody's lease but its own.
            assert put(store, 1).good
            assert store.look([name_of(1)]) == [True]
            assert [path.name for path in (root / "leases").iterdir()] == [store.lease.name]
            assert [path.name for path in root.iterdir() if path.name.startswith("probe")] == []
    assert kills > 10


class _opened:
    """A store over a folder, counted, for a `with` block."""

    def __init__(self, root: Path) -> None:
        self._store = ChunkStore(StoreSetting(str(root), ROW, 1 << 20))
        assert self._store.keeper.wait_counted()

    def __enter__(self) -> ChunkStore:
        return self._store

    def __exit__(self, *error: object) -> None:
        self._store.close()


# ---- F26: several processes on one folder ---------------------------------------------------


def test_f26_processes_that_store_load_and_evict_at_random() -> None:
    started = time.monotonic()
    found, met = crowd.campaign(1.5, writers=3, seed=26, base=MEMORY)
    assert found.faults == []
    # Controls: there were hits, evictions' misses, and it did run for as long as it was told.
    assert met["get done"] > 0
    assert met["put done"] > 0
    assert time.monotonic() - started >= 1.5

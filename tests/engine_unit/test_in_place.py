# SPDX-License-Identifier: Apache-2.0
"""Rows of our own disk tier are opened in the thread that has read them; those of no other."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvsafe.engine.counters import BYTES_VERIFIED, OPENED
from kvsafe.engine.fs.tier import KVSafeFsTier
from kvsafe.engine.tiers.openings import Openings
from kvsafe.engine.tiers.promotion import Promotion
from kvsafe.engine.tiers.proving import ProvingTier
from kvsafe.seal.batch import native
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.engine_unit.sealed_world import World, key_of, running
from tests.engine_unit.test_fs_tier import DEADLINE_S
from tests.engine_unit.test_fs_tier import World as FsWorld
from tests.tiers.faults import WAIT_S, FaultyOs, Stall, stalled

A, B = key_of(1), key_of(2)
HIT, MISS = LookupResult.HIT, LookupResult.MISS
PAYLOAD_TAG = str(int(RefusalKind.PAYLOAD_TAG))


class OtherTier(KVSafeFsTier):
    """The same, but of another class: nobody knows what it does to rows."""


class DiskWorld(World):
    """A world whose tiers are `kvsafe-fs`, with a note of which threads open rows."""

    def __init__(self, folder: Path, kind: type[KVSafeFsTier]) -> None:
        self.kind = kind
        self.openers: list[str] = []
        self.together: list[str] = []
        super().__init__(folder, tiers=["kvsafe-fs"])

    def _tier(self, index: int, kind: str) -> ProvingTier:
        spec = SimpleNamespace(station=self.station)
        rows = self.primary.get_kv_memoryview()
        root = str(self.folder / "store")
        inner = self.kind(
            spec, rows, kind, root_dir=root, capacity_bytes="1MiB", threads=2, deadline_s=60.0
        )
        return ProvingTier(inner, index, self.desk, inner.objects)

    def path(self, key: OffloadKey) -> Path:
        """Where the chunk of this key lies."""
        bucket, file = self.tier.inner.store.folders.place(self.names.name(key))
        return Path(self.folder, "store", "objects", bucket, file)


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[DiskWorld]:
    """A world that holds A and B on disk only."""
    alone, together = Openings.open, Openings.right

    def noted(self: Any, key: bytes, row: memoryview) -> Refusal | None:
        made.openers.append(threading.current_thread().name)
        return alone(self, key, row)

    def noted_all(self: Any, keys: list[bytes], rows: list[memoryview]) -> list[bool]:
        made.together += [threading.current_thread().name] * len(keys)
        return together(self, keys, rows)

    monkeypatch.setattr(Openings, "open", noted)
    monkeypatch.setattr(Openings, "right", noted_all)
    made = DiskWorld(tmp_path, getattr(request, "param", KVSafeFsTier))
    with running(made):
        made.store(A, B)
        made.forget_rows()
        yield made


def test_a_row_is_opened_once_by_the_thread_that_read_it(world: DiskWorld) -> None:
    assert world.ask(A) is HIT
    assert [name.startswith("kvsafe-fs") for name in world.together] == [True]
    # Where rows can be opened together nobody opens one alone that is right.
    assert len(world.openers) == (0 if native() else 1)
    assert world.refusals() == {}
    world.prove_offers()


def test_without_batches_it_is_opened_alone_by_the_same_thread(
    world: DiskWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.station, "_batch", (None,))
    assert world.ask(A) is HIT
    assert [name.startswith("kvsafe-fs") for name in world.openers] == [True]
    world.prove_offers()


def test_what_is_opened_is_counted_once(world: DiskWorld) -> None:
    before = world.desk.counters.totals[OPENED], world.desk.counters.totals[BYTES_VERIFIED]
    assert world.ask(A) is HIT
    after = world.desk.counters.totals[OPENED], world.desk.counters.totals[BYTES_VERIFIED]
    payload = world.station.seal_setting.layout.payload_bytes
    assert (after[0] - before[0], after[1] - before[1]) == (1, payload)


@pytest.mark.parametrize("world", [OtherTier], indirect=True)
def test_rows_of_another_class_are_opened_when_its_job_has_ended(world: DiskWorld) -> None:
    assert world.ask(A) is HIT
    assert [name.startswith("kvsafe-fs") for name in world.openers] == [False]
    assert world.tier.inner.in_place is None
    world.prove_offers()


def test_a_changed_byte_is_refused_once_and_the_file_goes(world: DiskWorld) -> None:
    path = world.path(A)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert world.ask(A) is MISS
    assert world.refusals() == {PAYLOAD_TAG: 1}
    assert not path.exists()
    assert world.ask(B) is HIT


def test_an_opening_that_fails_is_made_again_when_the_job_has_ended(
    world: DiskWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Openings.right

    def lame(self: Any, keys: list[bytes], rows: list[memoryview]) -> list[bool]:
        noted(self, keys, rows)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Openings, "right", lame)
    assert world.ask(A) is HIT
    assert len(world.together) == 1
    assert [name.startswith("kvsafe-fs") for name in world.openers][-1:] == [False]


def test_a_row_of_a_load_that_was_given_up_is_nobodys(world: DiskWorld) -> None:
    in_place, data = world.tier.inner.in_place, memoryview(bytearray(world.tier.block_size_bytes))
    assert in_place.open(12345, [0], [0], [data]) == []
    in_place.filled(12345, [0])
    assert world.openers == []
    world.tier._promotions[12345] = Promotion({A: 0})
    assert in_place.open(12345, [0], [0], [data]) == []
    del world.tier._promotions[12345]
    assert len(world.openers) == 1


def test_bytes_that_go_to_another_row_are_not_opened_in_place(world: DiskWorld) -> None:
    """Right bytes prove a row only if it is the one that they are copied to."""
    in_place = world.tier.inner.in_place
    data = memoryview(bytearray(world.path(A).read_bytes()))
    world.tier._promotions[12345] = Promotion({A: 3})
    assert [in_place.open(12345, [0], [row], [data]) for row in (0, 3)] == [[], [0]]
    del world.tier._promotions[12345]


def test_a_key_twice_in_one_job_is_loaded_once_into_the_row_that_is_proven(
    world: DiskWorld,
) -> None:
    rows = np.array([0, 1, 2], dtype=np.int32)
    context = ReqContext(req_id="r")
    world.tier.submit_load(TransferJob(900, [A, A, B], rows, True, context))
    for _ in range(2000):
        done = list(world.tier.get_finished_jobs())
        if done:
            break
        time.sleep(0.005)
    assert [result.success for result in done] == [True]
    region, epoch = world.station.region, world.desk.epochs.epoch
    for key, row in ((A, 1), (B, 2)):
        assert region is not None
        assert not isinstance(world.station.open_row(region.row(row), key, epoch), Refusal)


def test_what_was_right_for_another_load_of_this_number_is_not_opened(world: DiskWorld) -> None:
    in_place = world.tier.inner.in_place
    data = memoryview(bytearray(world.path(A).read_bytes()))
    promotions = world.tier._promotions
    first, second = Promotion({A: 3}), Promotion({A: 3})
    promotions[12345] = first
    assert in_place.open(12345, [0], [3], [data]) == [0]
    promotions[12345] = second
    in_place.filled(12345, [0])
    assert second.opened == set()
    promotions[12345] = first
    in_place.filled(12345, [0])
    assert first.opened == {A}
    del promotions[12345]


class _Opening:
    """Accepts what it is given, and notes places."""

    def __init__(self, refused: int = -1) -> None:
        self.asked: list[int] = []
        self.told: list[int] = []
        self._refused = refused

    def open(
        self, job: int, places: list[int], rows: list[int], data: list[memoryview]
    ) -> list[int]:
        self.asked += places
        return [place for place in places if place != self._refused]

    def filled(self, job: int, places: list[int]) -> None:
        self.told += places


def test_only_what_was_right_counts_as_opened(tmp_path: Path) -> None:
    world = FsWorld(tmp_path / "store", FaultyOs())
    opening = _Opening(refused=0)
    try:
        assert world.store(1, 2).success
        world.tier.in_place = opening
        assert world.load(1, 2).success
    finally:
        world.tier.shutdown()
    assert (opening.asked, opening.told) == ([0, 1], [1])


def test_what_was_opened_for_a_job_that_was_given_up_is_not_filled(tmp_path: Path) -> None:
    calls, stall = FaultyOs(), Stall()
    world = FsWorld(tmp_path / "store", calls)
    opening = _Opening()
    try:
        assert world.store(1, 2).success
        world.tier.in_place = opening
        assert world.load(1, 2).success
        assert opening.told == [0, 1]
        calls.only_threads = ("kvsafe-fs",)
        calls.plan("read", stalled(stall), 2, 1)
        job = world.submit(1, 2, load=True)
        assert stall.entered.wait(WAIT_S)
        calls.clock_skew_s += DEADLINE_S + 1
        assert not world.finish(job).success
    finally:
        stall.let_go.set()
        world.tier.shutdown()
    assert opening.told == [0, 1]

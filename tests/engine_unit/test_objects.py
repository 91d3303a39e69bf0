# SPDX-License-Identifier: Apache-2.0
"""What kvsafe puts into vLLM's fs tier: a bounded quarantine, and names that nobody else has.

The quarantine deletes nothing when it is full. The names are those of temporary files, which
vLLM takes from seeded random numbers (finding H).
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, OffloadKey
from vllm.v1.kv_offload.tiering.fs import io as fs_io

from kvsafe.engine.journal import logger
from kvsafe.engine.tiers import objects
from kvsafe.engine.tiers.objects import QUARANTINE_FOLDER, FsObjects
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.engine_unit.sealed_world import World, key_of, running

REFUSAL = Refusal.of(RefusalKind.PAYLOAD_TAG, "payload", "a", "b")


def _tier(root: Path) -> Any:
    mapper = SimpleNamespace(get_file_name=lambda name: root / bytes(name).decode())
    return SimpleNamespace(file_mapper=mapper, block_size_bytes=4096)


def test_a_full_quarantine_leaves_objects_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "QUARANTINE_LIMIT", 2)
    known = FsObjects(_tier(tmp_path), tmp_path, "aside")
    names = [OffloadKey(f"{number}.bin".encode()) for number in range(4)]
    for name in names:
        (tmp_path / bytes(name).decode()).write_bytes(bytes(4096))
    # Not `caplog`: what other tests did to levels and handlers is no matter of this one.
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *_: lines.append(text))
    assert [known.quarantine(name, REFUSAL) for name in names] == [True, True, False, False]
    aside = tmp_path / QUARANTINE_FOLDER
    assert len(list(aside.iterdir())) == 2
    assert [known.exists(name) for name in names] == [False, False, True, True]
    assert sum("stay in place" in line for line in lines) == 1
    # Emptied, it takes the next one.
    for path in aside.iterdir():
        path.unlink()
    assert known.quarantine(names[2], REFUSAL)


# --- Finding H: names of temporary files ----------------------------------------------------------

SEED = 7
WAIT_S = 60.0
A = key_of(1)


@pytest.fixture
def kept_random() -> Any:
    """The global random numbers as they were."""
    state = random.getstate()
    yield
    random.setstate(state)


def _guard(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not on:
        monkeypatch.setattr(objects, "name_files_afresh", lambda tier: None)


def _stored(world: World) -> bool:
    """Whether what was stored in this world comes back from the tier, proven."""
    world.flush()
    world.primary.reset_cache()
    return world.ask(A) is LookupResult.HIT


@pytest.mark.usefixtures("kept_random")
@pytest.mark.parametrize("in_c", [True, False], ids=["c", "python"])
@pytest.mark.parametrize("guard", [True, False], ids=["guarded", "as vllm"])
def test_what_a_killed_engine_of_the_same_seed_left_stops_nobody(
    guard: bool, in_c: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _guard(guard, monkeypatch)
    assert fs_io._HAS_FSIO_C
    monkeypatch.setattr(fs_io, "_HAS_FSIO_C", in_c)
    with running(World(tmp_path, tiers=["fs"])) as world:
        path = world.file(A)
        path.parent.mkdir(parents=True)
        left = f"_{random.Random(SEED).randint(0, 2**63 - 1)}.tmp"
        path.with_name(path.name + left).write_bytes(b"half a chunk")
        random.seed(SEED)
        world.store(A)
        assert _stored(world) is guard


class HeldOs:
    """The module `os`, whose first `write` of a whole row waits until it may go on."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: Any) -> int:
        """As `os.write`."""
        if not self.inside.is_set():
            self.inside.set()
            self.go.wait(WAIT_S)
        return os.write(fd, data)


@pytest.mark.usefixtures("kept_random")
@pytest.mark.parametrize("guard", [True, False], ids=["guarded", "as vllm"])
def test_two_engines_of_one_seed_store_the_same_chunk_at_once(
    guard: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _guard(guard, monkeypatch)
    held = HeldOs()
    with (
        running(World(tmp_path, tiers=["fs"])) as first,
        running(World(tmp_path, tiers=["fs"])) as second,
    ):
        monkeypatch.setattr(fs_io, "_HAS_FSIO_C", False)
        monkeypatch.setattr(fs_io, "os", held)
        _seeded(lambda: first.store(A))
        assert held.inside.wait(WAIT_S)
        _seeded(lambda: second.store(A))
        assert _stored(second) is guard
        held.go.set()
        assert _stored(first) is guard


def _seeded(act: Callable[[], object]) -> None:
    random.seed(SEED)
    act()

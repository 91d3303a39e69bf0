# SPDX-License-Identifier: Apache-2.0
"""Looking for many names, a while at a time: whatever the time, each name gets its own answer."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from unittest.mock import patch

import pytest

from kvsafe.tiers import ChunkStore, course
from kvsafe.tiers.batch import Batch
from tests.tiers.stores import ROW, name_of, path_of, row_of, store_at

EVERY = range(300)
THERE = frozenset(random.Random(4).sample(EVERY, 120))
RIGHT = [number in THERE for number in EVERY]
NAMES = [name_of(number) for number in EVERY]


@pytest.fixture(params=[True, False], ids=["in batches", "one by one"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that holds 120 of 300 chunks, in folders of which others are not there."""
    if request.param and Batch.load() is None:
        pytest.skip("batch.c was not built: no C compiler")
    with store_at(tmp_path / "s") as store:
        rows = [memoryview(bytearray(row_of(number))) for number in THERE]
        stored = store.put_all([name_of(number) for number in THERE], rows)
        assert all(outcome.good for outcome in stored)
    if not request.param:
        patcher = patch.object(Batch, "load", lambda: None)
        patcher.start()
        request.addfinalizer(patcher.stop)
    return tmp_path / "s"


def _parts(store: ChunkStore, within_s: float) -> list[list[bool]]:
    """What each while brings, until every name has been answered for."""
    parts: list[list[bool]] = []
    while (done := sum(map(len, parts))) < len(NAMES):
        part = store.look_for(NAMES[done:], within_s)
        assert part, "a while without an answer never ends"
        parts.append(part)
    return parts


def _joined(parts: list[list[bool]]) -> list[bool]:
    return list(itertools.chain.from_iterable(parts))


@pytest.mark.parametrize("within_s", [-1.0, 0.0, 0.0005, 1e9, float("inf")])
def test_each_name_gets_its_own_answer_however_short_the_while(root: Path, within_s: float) -> None:
    with store_at(root) as store:
        assert _joined(_parts(store, within_s)) == RIGHT
        assert _joined(_parts(store, within_s)) == RIGHT
        assert store.look(NAMES) == RIGHT
        assert store.look([]) == []


def test_time_that_is_over_ends_a_while(root: Path) -> None:
    with store_at(root) as store:
        assert len(_parts(store, -1.0)) > 100


def test_a_while_opens_no_more_than_so_many_folders(root: Path) -> None:
    batches = Batch.load() is not None
    with store_at(root) as store, patch.object(course, "_NEW_FOLDERS", 8):
        parts = _parts(store, float("inf"))
        assert _joined(parts) == RIGHT
        assert len(parts) > 20 if batches else len(parts) == 1


def test_names_in_folders_that_are_not_there_are_not_looked_for_again(root: Path) -> None:
    batches = Batch.load() is not None
    with store_at(root) as store, patch.object(store, "_look", side_effect=store._look) as again:
        assert store.look(NAMES) == RIGHT
    # Without batches each name goes that way.
    assert again.call_count == (0 if batches else len(NAMES))


def test_a_flaw_in_the_middle_is_found_and_no_neighbours(root: Path) -> None:
    spoiled = sorted(THERE)[60]
    right = [there and number != spoiled for number, there in zip(EVERY, RIGHT, strict=True)]
    with store_at(root) as store:
        path_of(store, spoiled).write_bytes(bytes(ROW + 1))
        assert _joined(_parts(store, 0.0005)) == right
        assert store.counts["flaw"] == 1

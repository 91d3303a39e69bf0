# SPDX-License-Identifier: Apache-2.0
"""Order of conflicting tasks, and blocks that a failed load left without their bytes."""

import random

import pytest

from kvsafe.device import CopyTask, Direction, Geometry, GroupRef, RowPlan, TaskOrder

from .worlds import LOAD, STORE, plain_tensor, simple_geometry


def task(job: int, way: Direction, row: int, *blocks: int, group: int = 0) -> CopyTask:
    return CopyTask(job, way, RowPlan(row, group, tuple(enumerate(blocks))))


def test_same_row_and_same_block_wait_others_do_not() -> None:
    order = TaskOrder(simple_geometry())
    first = task(1, LOAD, 0, 1)
    assert order.add(first)
    assert not order.add(same_row := task(2, STORE, 0, 5))
    assert not order.add(same_block := task(3, STORE, 1, 1))
    assert order.add(task(4, STORE, 2, 3))
    assert order.finish(first, False) == [same_row, same_block]


def test_groups_without_a_common_tensor_do_not_conflict() -> None:
    tensors = (plain_tensor(4, 8, "a"), plain_tensor(4, 8, "b"))
    order = TaskOrder(Geometry(tensors, ((GroupRef(0, 8),), (GroupRef(1, 8),)), 1))
    assert order.add(task(1, LOAD, 0, 2, group=0))
    assert order.add(task(2, STORE, 1, 2, group=1))
    assert not order.add(task(3, STORE, 2, 2, group=1))


@pytest.mark.parametrize("seed", range(20))
def test_random_tasks_end_in_order_and_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    order = TaskOrder(simple_geometry(blocks=6))
    running: list[CopyTask] = []
    last: dict[int, int] = {}
    pending = 0
    for job in range(60):
        made = task(job, rng.choice([LOAD, STORE]), rng.randrange(3), *_blocks(rng))
        pending += 1
        if order.add(made):
            running.append(made)
        if rng.random() < 0.5:
            pending -= _end_one(rng, order, running, last)
    while running:
        pending -= _end_one(rng, order, running, last)
    assert pending == 0
    assert len(order) == 0


def _blocks(rng: random.Random) -> list[int]:
    return rng.sample(range(1, 6), rng.randint(1, 2))


def _end_one(
    rng: random.Random, order: TaskOrder, running: list[CopyTask], last: dict[int, int]
) -> int:
    if not running:
        return 0
    keys = [key for item in running for key in item.keys]
    assert len(keys) == len(set(keys)), "two conflicting tasks run at the same time"
    ended = running.pop(rng.randrange(len(running)))
    for key in ended.keys:
        assert last.get(key, -1) < ended.number, "out of submission order"
        last[key] = ended.number
    running.extend(order.finish(ended, rng.random() < 0.3))
    return 1


def run(order: TaskOrder, item: CopyTask, failed: bool = False) -> None:
    assert order.add(item)
    order.finish(item, failed)


def test_block_of_a_failed_load_is_no_source_until_reported() -> None:
    order = TaskOrder(simple_geometry())
    run(order, task(1, LOAD, 0, 3), failed=True)
    before = task(2, STORE, 1, 2, 3)
    assert order.add(before)
    assert order.unloaded_source(before) == 3
    order.reported([1])
    after = task(3, STORE, 2, 3)
    assert not order.add(after)
    assert order.unloaded_source(before) == 3, "submitted before the report"
    assert order.finish(before, True) == [after]
    assert order.unloaded_source(after) is None, "submitted after the report"
    order.finish(after, False)
    assert not order._bad


def test_a_later_good_load_heals_the_block() -> None:
    order = TaskOrder(simple_geometry())
    run(order, task(1, LOAD, 0, 3), failed=True)
    run(order, task(2, LOAD, 1, 3))
    store = task(3, STORE, 2, 3)
    assert order.add(store)
    assert order.unloaded_source(store) is None
    order.reported([1, 2])
    assert not order._bad


def test_a_good_load_leaves_a_good_source_and_other_blocks_are_free() -> None:
    order = TaskOrder(simple_geometry())
    run(order, task(1, LOAD, 0, 3), failed=True)
    other = task(2, STORE, 1, 2)
    assert order.add(other)
    assert order.unloaded_source(other) is None
    run(order, task(3, LOAD, 2, 4))
    good = task(4, STORE, 3, 4)
    assert order.add(good)
    assert order.unloaded_source(good) is None


def test_report_before_anybody_waits_forgets_the_block() -> None:
    order = TaskOrder(simple_geometry())
    run(order, task(1, LOAD, 0, 3), failed=True)
    order.reported([1])
    assert not order._bad
    assert not order._bad_of


def test_failed_store_spoils_nothing() -> None:
    order = TaskOrder(simple_geometry())
    run(order, task(1, STORE, 0, 3), failed=True)
    store = task(2, STORE, 1, 3)
    assert order.add(store)
    assert order.unloaded_source(store) is None

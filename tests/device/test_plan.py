# SPDX-License-Identifier: Apache-2.0
"""Every kind of wrong plan is refused by name before a byte moves; its sound twin passes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsafe.device import (
    CopyPlan,
    DeviceTensor,
    Geometry,
    GroupRef,
    PlanError,
    RowPlan,
    RowWindow,
    check_plan,
)

from .worlds import LOAD, STORE, plain_tensor, plans, window_for, worlds


def shared_geometry() -> Geometry:
    """Groups 0, 1 and 3 use tensor 0, groups 2 and 3 tensor 1.  8 blocks, 3 slots."""
    tensors = (plain_tensor(8, 16, "a", "b"), plain_tensor(8, 16, "c"))
    both = (GroupRef(0, 16), GroupRef(1, 16))
    groups = ((GroupRef(0, 16),), (GroupRef(0, 12),), (GroupRef(1, 16),), both)
    return Geometry(tensors, groups, 3)


def row(number: int = 0, group: int = 0, *blocks: Any) -> RowPlan:
    return RowPlan(number, group, blocks or ((0, 1), (1, 2)))


GOOD = {
    "one row": (row(),),
    "some slots": (row(0, 0, (0, 5), (2, 1)),),
    "last of all": (row(3, 2, (2, 7)),),
    "two groups": (row(0, 0, (0, 1)), row(1, 1, (0, 2))),
    "same block, other tensors": (row(0, 0, (0, 1)), row(1, 2, (0, 1))),
}


@pytest.mark.parametrize("way", [LOAD, STORE])
@pytest.mark.parametrize("name", GOOD)
def test_sound_plans_pass(name: str, way: Any) -> None:
    geometry = shared_geometry()
    check_plan(CopyPlan(1, way, GOOD[name]), geometry, window_for(geometry))


BAD: dict[str, tuple[Any, str]] = {
    "no rows": ((), "rows"),
    "row below": ((row(-1),), "row"),
    "row above": ((row(4),), "row"),
    "row not int": ((row(1.0),), "row"),  # type: ignore[arg-type]
    "row bool": ((row(True),), "row"),
    "group below": ((row(0, -1),), "group"),
    "group above": ((row(0, 4),), "group"),
    "empty": ((RowPlan(0, 0, ()),), "blocks"),
    "no tuple": ((RowPlan(0, 0, None),), "blocks"),  # type: ignore[arg-type]
    "no pair": ((row(0, 0, (0, 1, 2)),), "blocks"),
    "no pairs": ((row(0, 0, 7),), "blocks"),
    "slot below": ((row(0, 0, (-1, 1)),), "slot"),
    "slot above": ((row(0, 0, (0, 1), (3, 2)),), "slot"),
    "slot twice": ((row(0, 0, (1, 1), (1, 2)),), "slot"),
    "slot order": ((row(0, 0, (1, 1), (0, 2)),), "slot"),
    "block below": ((row(0, 0, (0, -1)),), "block"),
    "block above": ((row(0, 0, (0, 8)),), "block"),
    "block not int": ((row(0, 0, (0, "1")),), "block"),
    "null block": ((row(0, 0, (0, 1), (1, 0)),), "block"),
    "block twice in a row": ((row(0, 0, (0, 1), (1, 1)),), "block"),
    "second row": ((row(), row(9, 0, (0, 3))), "row"),
}


@pytest.mark.parametrize("way", [LOAD, STORE])
@pytest.mark.parametrize("name", BAD)
def test_bad_plans_are_named(name: str, way: Any) -> None:
    geometry = shared_geometry()
    rows, field = BAD[name]
    with pytest.raises(PlanError) as caught:
        check_plan(CopyPlan(1, way, rows), geometry, window_for(geometry))
    assert caught.value.field == field
    assert caught.value.fault.expected is not None


def test_direction_must_be_one() -> None:
    geometry = shared_geometry()
    with pytest.raises(PlanError, match="direction"):
        check_plan(CopyPlan(1, "store", (row(),)), geometry, window_for(geometry))  # type: ignore[arg-type]


DOUBLE_LOADS = {
    "same group": (row(0, 0, (0, 1)), row(1, 0, (0, 1))),
    "other group, shared tensor": (row(0, 0, (0, 1)), row(1, 1, (1, 1))),
    "other group, one of two tensors shared": (row(0, 2, (0, 1)), row(1, 3, (0, 1))),
}


@pytest.mark.parametrize("name", DOUBLE_LOADS)
def test_no_block_is_loaded_twice(name: str) -> None:
    geometry = shared_geometry()
    window = window_for(geometry)
    rows = DOUBLE_LOADS[name]
    with pytest.raises(PlanError) as caught:
        check_plan(CopyPlan(1, LOAD, rows), geometry, window)
    assert caught.value.field == "destination"
    check_plan(CopyPlan(1, STORE, rows), geometry, window)  # as sources they do no harm


def test_no_row_is_stored_twice() -> None:
    geometry = shared_geometry()
    window = window_for(geometry)
    rows = (row(2, 0, (0, 1)), row(2, 0, (0, 2)))
    with pytest.raises(PlanError) as caught:
        check_plan(CopyPlan(1, STORE, rows), geometry, window)
    assert (caught.value.field, caught.value.fault.found) == ("destination", 2)
    check_plan(CopyPlan(1, LOAD, rows), geometry, window)


def test_slice_bytes_must_agree() -> None:
    geometry = shared_geometry()
    window = replace(window_for(geometry), slice_bytes=geometry.slice_bytes - 1)
    with pytest.raises(PlanError, match="slice_bytes"):
        check_plan(CopyPlan(1, LOAD, (row(),)), geometry, window)


def test_host_range_is_checked_against_the_region() -> None:
    geometry = shared_geometry()
    window = window_for(geometry, rows=4)
    short = replace(window, base=window.base[: window.slice_start(3) + window.slice_bytes - 1])
    check_plan(CopyPlan(1, STORE, (row(2),)), geometry, short)
    with pytest.raises(PlanError, match="host range"):
        check_plan(CopyPlan(1, STORE, (row(3),)), geometry, short)


def test_device_range_is_checked_against_the_storage() -> None:
    view = torch.zeros((8, 16), dtype=torch.int8)
    view.untyped_storage().resize_(7 * 16 - 1)
    geometry = Geometry((DeviceTensor(view, 16, ("a",)),), ((GroupRef(0, 16),),), 3)
    window: RowWindow = window_for(geometry)
    check_plan(CopyPlan(1, LOAD, (row(0, 0, (0, 5)),)), geometry, window)
    with pytest.raises(PlanError, match="device range"):
        check_plan(CopyPlan(1, LOAD, (row(0, 0, (0, 6)),)), geometry, window)


@given(st.data())
def test_random_plans_pass_and_one_wrong_id_fails(data: st.DataObject) -> None:
    geometry, window = data.draw(worlds())
    way = data.draw(st.sampled_from([LOAD, STORE]))
    plan = data.draw(plans(geometry, window.num_rows, way))
    check_plan(plan, geometry, window)
    place = data.draw(st.integers(0, len(plan.rows) - 1))
    victim = plan.rows[place]
    wrong = data.draw(st.sampled_from([-1, 0, geometry.num_blocks, 2**70]))
    blocks = (*victim.blocks[:-1], (victim.blocks[-1][0], wrong))
    rows = list(plan.rows)
    rows[place] = replace(victim, blocks=blocks)
    with pytest.raises(PlanError, match="block"):
        check_plan(replace(plan, rows=tuple(rows)), geometry, window)

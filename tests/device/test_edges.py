# SPDX-License-Identifier: Apache-2.0
"""The last value that is allowed and the first that is not, for every bound of the checks."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from kvsafe.device import (
    CopyPlan,
    DeviceTensor,
    Geometry,
    GeometryError,
    GroupRef,
    HostPool,
    PlanError,
    RowPlan,
    RowWindow,
    check_plan,
    copier,
    cpu,
    document,
    pinning,
    slicemap,
)
from kvsafe.device import plan as plan_module

from .worlds import LOAD, STORE, plain_tensor, simple_geometry, window_for


def tight(geometry: Geometry) -> RowWindow:
    """Rows that are nothing but slices, in a region that is nothing but rows."""
    size = geometry.slice_bytes
    return RowWindow(torch.zeros(3 * size, dtype=torch.int8), 0, 3, size, 0, size)


def test_a_window_without_any_room_to_spare_is_sound() -> None:
    geometry = simple_geometry()
    window = tight(geometry)
    window.check(geometry)
    assert [window.slice_start(row) for row in range(3)] == [0, 64, 128]
    replace(window, num_rows=1).check(geometry)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_rows", 0), ("num_rows", 4), ("rows_offset", -1), ("rows_offset", 1)),
        *(("slice_offset", -1), ("slice_offset", 1), ("slice_bytes", 63), ("slice_bytes", 65)),
    ],
)
def test_one_more_or_less_is_not(field: str, value: int) -> None:
    geometry = simple_geometry()
    window = replace(tight(geometry), **{field: value})
    with pytest.raises(GeometryError) as caught:
        window.check(geometry)
    assert all(str(part) for part in caught.value.problems)


def test_the_smallest_geometry_is_sound() -> None:
    tensor = DeviceTensor(torch.zeros((1, 1), dtype=torch.int8), 1, ("a",))
    geometry = Geometry((tensor,), ((GroupRef(0, 1),),), 1)
    geometry.check()
    assert (geometry.num_blocks, geometry.slice_bytes, tensor.extent) == (1, 1, 1)
    for span in (0, -1):
        with pytest.raises(GeometryError, match="blocks_per_chunk"):
            Geometry((tensor,), ((GroupRef(0, 1),),), span).check()


def test_a_plan_may_use_the_first_and_the_last_of_everything() -> None:
    geometry = simple_geometry(blocks=8, span=3)
    window = tight(geometry)
    for way in (LOAD, STORE):
        for number in (0, 2):
            check_plan(CopyPlan(1, way, (RowPlan(number, 0, ((0, 1), (2, 7))),)), geometry, window)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (RowPlan(3, 0, ((0, 1),)), "row"),
        (RowPlan(0, 1, ((0, 1),)), "group"),
        (RowPlan(0, 0, ((3, 1),)), "slot"),
        (RowPlan(0, 0, ((0, 8),)), "block"),
        (RowPlan(0, 0, ((0, 0),)), "block"),
    ],
)
def test_a_plan_may_use_nothing_beyond(row: RowPlan, field: str) -> None:
    geometry = simple_geometry(blocks=8, span=3)
    for way in (LOAD, STORE):
        with pytest.raises(PlanError) as caught:
            check_plan(CopyPlan(1, way, (row,)), geometry, tight(geometry))
        assert caught.value.field == field


def test_the_host_range_is_exact_at_both_ends() -> None:
    geometry = simple_geometry()
    window = tight(geometry)
    plan = CopyPlan(1, STORE, (RowPlan(0, 0, ((0, 1),)), RowPlan(2, 0, ((0, 2),))))
    check_plan(plan, geometry, window)
    short = replace(window, base=window.base[:-1])
    early = replace(window, rows_offset=-1)
    for wrong in (short, early):
        with pytest.raises(PlanError, match="host range"):
            check_plan(plan, geometry, wrong)
    # The row in the middle is inside in each case.
    middle = CopyPlan(1, STORE, (RowPlan(1, 0, ((0, 1),)),))
    for fine in (window, short, early):
        check_plan(middle, geometry, fine)


def test_the_reach_of_a_group_ends_with_its_storage() -> None:
    """Only used bytes have to lie inside: the padding of the last block may be cut off."""
    view = torch.zeros((4, 16), dtype=torch.int8)
    geometry = Geometry((DeviceTensor(view, 16, ("a",)),), ((GroupRef(0, 12),),), 2)
    for size, reach in ((64, 3), (60, 3), (59, 2), (44, 2), (43, 1)):
        view.untyped_storage().resize_(size)
        assert replace(geometry).group_reach == (reach,), size
    offset = torch.zeros(100, dtype=torch.int8).as_strided((4, 16), (24, 1), 10)
    tensor = DeviceTensor(offset, 16, ("a",))
    assert Geometry((tensor,), ((GroupRef(0, 16),),), 1).group_reach == (3,)
    offset.untyped_storage().resize_(97)
    assert Geometry((tensor,), ((GroupRef(0, 16),),), 1).group_reach == (2,)


def test_masks_and_classes_of_groups() -> None:
    tensors = tuple(plain_tensor(4, 8, f"l{i}") for i in range(4))
    groups = tuple(tuple(GroupRef(t, 8) for t in use) for use in ((0, 0), (1, 3), (2,), (3, 2)))
    geometry = Geometry(tensors, groups, 1)
    assert geometry.group_masks == (1, 10, 4, 12)
    first, *joined = geometry.group_classes
    assert len(set(joined)) == 1 and first not in joined


def test_a_pool_has_one_thread_at_least() -> None:
    for count in (0, -1):
        with pytest.raises(ValueError, match="at least one"):
            HostPool(count, "test")
    before = set(threading.enumerate())
    pool = HostPool(2, "test")
    started = sorted(set(threading.enumerate()) - before, key=lambda thread: thread.name)
    assert [thread.name for thread in started] == ["test-0", "test-1"]
    # A copy that never returns must not keep the process from ending.
    assert all(thread.daemon for thread in started)
    assert pool.close(20) is True
    assert not any(thread.is_alive() for thread in started)


def test_published_numbers_stay_what_they_are() -> None:
    assert plan_module.NULL_BLOCK == 0
    assert copier.SHUTDOWN_TIMEOUT_S == 30.0
    assert cpu.PIECE_BYTES == 256 * 1024
    assert document.MAX_DIFFERENCES == 16
    assert pinning.PIECE_BYTES == 64 * 1024**3
    assert slicemap._CACHE_LIMIT == 1024


def test_one_row_and_one_block_copy_one_page_each() -> None:
    """A window's checks run before an engine is made, and its numbers are the plan's."""
    geometry = simple_geometry()
    window = window_for(geometry)
    window.check(geometry)
    assert window.slice_start(1) - window.slice_start(0) == window.row_stride
    assert window.slice_start(0) == window.rows_offset + window.slice_offset

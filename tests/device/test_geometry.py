# SPDX-License-Identifier: Apache-2.0
"""Tensors that can be used are accepted, every other kind is refused and named."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvsafe.device import DeviceTensor, Geometry, GeometryError, GroupRef
from kvsafe.device.alias import StridedBytes, first_overlap

from .worlds import packed_tensors, plain_tensor, simple_geometry, window_for


def one(tensor: DeviceTensor) -> Geometry:
    return Geometry((tensor,), ((GroupRef(0, max(tensor.page_bytes, 1)),),), 1)


def view_tensor(view: torch.Tensor, page: int) -> Geometry:
    return one(DeviceTensor(view, page, ("layer",)))


def short_storage() -> Geometry:
    view = torch.zeros((4, 8), dtype=torch.int8)
    view.untyped_storage().resize_(31)
    return view_tensor(view, 8)


def strided(blocks: int, page: int, stride: int) -> torch.Tensor:
    return torch.zeros(blocks * max(stride, page), dtype=torch.int8).as_strided(
        (blocks, page), (stride, 1)
    )


def refs(*pairs: tuple[int, int]) -> Geometry:
    return Geometry((plain_tensor(4, 8, "layer"),), (tuple(GroupRef(*p) for p in pairs),), 1)


SOUND: dict[str, Callable[[], Geometry]] = {
    "plain": lambda: view_tensor(torch.zeros((4, 8), dtype=torch.int8), 8),
    "strided": lambda: view_tensor(strided(4, 8, 11), 8),
    "one block": lambda: view_tensor(strided(1, 8, 1), 8),
    "page of one byte": lambda: view_tensor(torch.zeros((4, 1), dtype=torch.int8), 1),
    "padded ref": lambda: refs((0, 5)),
    "two refs to one tensor": lambda: refs((0, 8), (0, 8)),
    "packed": lambda: Geometry(packed_tensors(5, [3, 4]), ((GroupRef(0, 3), GroupRef(1, 4)),), 2),
}

UNSOUND: dict[str, tuple[Callable[[], Geometry], str]] = {
    "dtype": (lambda: view_tensor(torch.zeros((4, 8), dtype=torch.uint8), 8), "dtype"),
    "ndim": (lambda: view_tensor(torch.zeros(32, dtype=torch.int8), 8), "2 dimensions"),
    "stride of bytes": (
        lambda: view_tensor(torch.zeros((8, 4), dtype=torch.int8).t(), 8),
        r"stride\(1\)",
    ),
    "stride of blocks": (lambda: view_tensor(strided(4, 8, 7), 8), r"stride\(0\) 7"),
    "page bytes": (lambda: view_tensor(torch.zeros((4, 8), dtype=torch.int8), 9), "the view has 8"),
    "storage": (short_storage, "reaches byte 32 of a storage of 31"),
    "zero blocks": (lambda: view_tensor(torch.zeros((0, 8), dtype=torch.int8), 8), "zero size"),
    "zero page": (lambda: view_tensor(torch.zeros((4, 0), dtype=torch.int8), 0), "zero size"),
    "no tensors": (lambda: Geometry((), (), 1), "no tensors"),
    "no groups": (lambda: Geometry((plain_tensor(4, 8),), (), 1), "no groups"),
    "empty group": (refs, "no refs"),
    "blocks per chunk": (
        lambda: Geometry((plain_tensor(4, 8),), ((GroupRef(0, 8),),), 0),
        "blocks_per_chunk",
    ),
    "ref too long": (lambda: refs((0, 9)), "9 bytes of a page of 8"),
    "ref of nothing": (lambda: refs((0, 0)), "0 bytes of a page"),
    "ref index": (lambda: refs((1, 8)), "no tensor 1"),
    "negative ref index": (lambda: refs((-1, 8)), "no tensor -1"),
    "block counts": (
        lambda: Geometry((plain_tensor(4, 8), plain_tensor(5, 8)), ((GroupRef(0, 8),),), 1),
        "5 blocks, tensor 0 has 4",
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_geometry_is_accepted(name: str) -> None:
    SOUND[name]().check()


@pytest.mark.parametrize("name", UNSOUND)
def test_unsound_geometry_is_named(name: str) -> None:
    make, words = UNSOUND[name]
    with pytest.raises(GeometryError, match=words):
        make().check()


def test_every_problem_is_listed() -> None:
    geometry = Geometry(
        (plain_tensor(4, 8), DeviceTensor(torch.zeros(3), 8, ())), ((GroupRef(5, 1),), ()), 0
    )
    with pytest.raises(GeometryError) as caught:
        geometry.check()
    assert len(caught.value.problems) == 5


def test_different_devices_are_refused() -> None:
    away = DeviceTensor(torch.zeros((4, 8), dtype=torch.int8, device="meta"), 8, ())
    with pytest.raises(GeometryError, match="on meta"):
        Geometry((plain_tensor(4, 8), away), ((GroupRef(0, 8),),), 1).check()


def test_aliasing_is_refused_and_interleaving_is_not() -> None:
    storage = torch.zeros(80, dtype=torch.int8)
    left = DeviceTensor(storage.as_strided((5, 8), (16, 1), 0), 8, ("a",))
    beside = DeviceTensor(storage.as_strided((5, 8), (16, 1), 8), 8, ("b",))
    over = DeviceTensor(storage.as_strided((5, 8), (16, 1), 7), 8, ("c",))
    Geometry((left, beside), ((GroupRef(0, 8),),), 1).check()
    with pytest.raises(GeometryError, match="tensors 0 and 1 share bytes: block 0"):
        Geometry((left, over), ((GroupRef(0, 8),),), 1).check()


def test_aliasing_of_different_strides_is_exact() -> None:
    storage = torch.zeros(64, dtype=torch.int8)
    left = DeviceTensor(storage.as_strided((4, 2), (6, 1), 0), 2, ("a",))  # 0 6 12 18
    apart = DeviceTensor(storage.as_strided((4, 1), (3, 1), 2), 1, ("b",))  # 2 5 8 11
    Geometry((left, apart), ((GroupRef(0, 2),),), 1).check()
    meets = DeviceTensor(storage.as_strided((4, 1), (4, 1), 3), 1, ("c",))  # 3 7 11 15
    with pytest.raises(GeometryError, match="block 1 of one, block 1 of the other"):
        Geometry((left, meets), ((GroupRef(0, 2),),), 1).check()


def strided_sets() -> st.SearchStrategy[StridedBytes]:
    return st.builds(
        lambda start, page, pad, count: StridedBytes(start, page + pad, page, count),
        st.integers(0, 40),
        st.integers(1, 6),
        st.integers(0, 9),
        st.integers(1, 8),
    )


def covered(item: StridedBytes, page: int) -> set[int]:
    first = item.start + page * item.stride
    return set(range(first, first + item.page))


def all_bytes(item: StridedBytes) -> set[int]:
    return set().union(*(covered(item, page) for page in range(item.count)))


@given(strided_sets(), strided_sets(), st.booleans())
@example(StridedBytes(0, 10, 2, 3), StridedBytes(12, 4, 1, 2), False)  # page -3 would overlap
@example(StridedBytes(12, 4, 1, 2), StridedBytes(0, 10, 2, 3), False)
@settings(max_examples=300)
def test_overlap_is_exact(left: StridedBytes, right: StridedBytes, same: bool) -> None:
    if same:
        page = min(right.page, left.stride)
        right = StridedBytes(right.start, left.stride, page, right.count)
    hit = first_overlap(left, right)
    assert (hit is not None) == bool(all_bytes(left) & all_bytes(right))
    if hit is not None:
        assert 0 <= hit[0] < left.count
        assert 0 <= hit[1] < right.count
        assert covered(left, hit[0]) & covered(right, hit[1])


def test_layout_numbers() -> None:
    tensors = (plain_tensor(4, 8, "a"), plain_tensor(4, 5, "b"))
    geometry = Geometry(tensors, ((GroupRef(1, 3), GroupRef(0, 8), GroupRef(1, 4)),), 3)
    assert geometry.slice_bytes == 3 * 13
    assert [geometry.tensor_area(t) for t in (0, 1)] == [0, 24]
    assert [(p.tensor, p.used) for p in geometry.group_pages[0]] == [(0, 8), (1, 4)]


def test_groups_that_share_a_tensor_are_one_class() -> None:
    tensors = tuple(plain_tensor(4, 8, f"l{i}") for i in range(4))
    groups = tuple(tuple(GroupRef(t, 8) for t in use) for use in ((0,), (1,), (2,), (0, 1), (3,)))
    classes = Geometry(tensors, groups, 1).group_classes
    assert classes[0] == classes[1] == classes[3]
    assert len({classes[0], classes[2], classes[4]}) == 3


WINDOW_FAULTS = {
    "dtype": ({"base": torch.zeros(4096, dtype=torch.uint8)}, "torch.int8"),
    "ndim": ({"base": torch.zeros((64, 64), dtype=torch.int8)}, "contiguous"),
    "strided": ({"base": torch.zeros(8192, dtype=torch.int8)[::2]}, "contiguous"),
    "rows": ({"num_rows": 0}, "no rows"),
    "rows offset": ({"rows_offset": -1}, "rows begin at -1"),
    "slice offset": ({"slice_offset": -1}, "slice begins at -1"),
    "slice end": ({"slice_offset": 60}, "slice ends at"),
    "slice bytes": ({"slice_bytes": 63}, "the geometry needs 64"),
    "end": ({"num_rows": 5}, "rows end at"),
}


@pytest.mark.parametrize("name", WINDOW_FAULTS)
def test_window_faults_are_named(name: str) -> None:
    geometry = simple_geometry()
    window = window_for(geometry)
    window.check(geometry)
    change, words = WINDOW_FAULTS[name]
    values = {field: getattr(window, field) for field in window.__slots__} | change
    with pytest.raises(GeometryError, match=words):
        type(window)(**values).check(geometry)

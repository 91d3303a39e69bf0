# SPDX-License-Identifier: Apache-2.0
"""Registration in whole rows: all or nothing, and never a condition for copying."""

import logging
from dataclasses import replace

import pytest
import torch

from kvsafe.device import PinnedRows, RowWindow, find_registrar, pin_rows


class Registrar:
    def __init__(self, fail_at: int = -1, fail_release: bool = False) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.fail_at = fail_at
        self.fail_release = fail_release

    def register(self, address: int, length: int) -> int:
        code = 2 if len(self.calls) == self.fail_at else 0
        self.calls.append(("register", address, length))
        return code

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address, 0))
        return 1 if self.fail_release else 0


def window(stride: int, rows: int) -> RowWindow:
    base = torch.zeros(4096 + stride * rows, dtype=torch.int8)
    return RowWindow(base, 4096, rows, stride, 0, stride)


def test_pieces_are_whole_rows_and_cover_all_of_them() -> None:
    rows = window(8192, 7)
    registrar = Registrar()
    pinned = pin_rows(registrar, rows, 3 * 8192 + 5000)
    assert pinned is not None
    assert len(pinned) == 3
    start = rows.base.data_ptr() + 4096
    assert registrar.calls == [
        ("register", start, 3 * 8192),
        ("register", start + 3 * 8192, 3 * 8192),
        ("register", start + 6 * 8192, 8192),
    ]


@pytest.mark.parametrize(("stride", "piece"), [(1024, 1), (1024, 6000), (6144, 1), (4096, 1)])
def test_pieces_end_on_host_pages(stride: int, piece: int) -> None:
    registrar = Registrar()
    assert pin_rows(registrar, window(stride, 24), piece) is not None
    lengths = [length for _, _, length in registrar.calls]
    assert sum(lengths) == 24 * stride
    assert all(length % 4096 == 0 and length % stride == 0 for length in lengths[:-1])


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_refused_piece_rolls_the_others_back(
    fail_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    registrar = Registrar(fail_at)
    rows = window(8192, 3)
    with caplog.at_level(logging.WARNING):
        assert pin_rows(registrar, rows, 8192) is None
    assert "pageable" in caplog.text
    done = [address for name, address, _ in registrar.calls if name == "register"][:-1]
    undone = [address for name, address, _ in registrar.calls if name == "unregister"]
    assert undone == done[::-1]
    assert len(undone) == fail_at


def test_no_runtime_means_pageable_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert pin_rows(None, window(4096, 1)) is None
    assert "pageable" in caplog.text


def test_release_goes_on_after_a_failure_and_happens_once() -> None:
    registrar = Registrar(fail_release=True)
    pinned = PinnedRows(registrar, [1, 2, 3])
    pinned.release()
    pinned.release()
    assert [address for _, address, _ in registrar.calls] == [3, 2, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a runtime is there")
def test_a_process_without_a_runtime_has_no_registrar() -> None:
    assert find_registrar() is None


def test_the_window_itself_is_left_alone() -> None:
    rows = window(4096, 2)
    before = rows.base.clone()
    pin_rows(Registrar(), replace(rows), 4096)
    assert torch.equal(rows.base, before)

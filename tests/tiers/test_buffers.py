# SPDX-License-Identifier: Apache-2.0
"""Buffers of a thread: where they begin, what a child after a fork sees, who shares them."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

import pytest

from kvsafe.tiers import buffers
from kvsafe.tiers.buffers import HUGE_BYTES, ThreadBuffers, own_pages, page_aligned

PAGE = mmap.PAGESIZE


def _place(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@pytest.mark.parametrize("length", [1, PAGE, HUGE_BYTES // 2 - PAGE])
def test_little_memory_takes_no_huge_page(length: int) -> None:
    view = own_pages(length)
    assert view.nbytes == length
    assert page_aligned(view)


@pytest.mark.parametrize("length", [HUGE_BYTES // 2, HUGE_BYTES - PAGE, 2 * HUGE_BYTES + PAGE])
def test_much_memory_begins_on_a_huge_page(length: int) -> None:
    view = own_pages(length)
    assert view.nbytes == length
    assert _place(view) % HUGE_BYTES == 0
    view[-1] = 7
    assert (view[0], view[-1]) == (0, 7)


def _huge_kib(place: int) -> int | None:
    """KiB of huge pages in the mapping around an address; None where it is not told."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= place < end
        elif inside and first == "AnonHugePages:":
            return int(line.split()[1])
    return None


def test_much_memory_is_in_huge_pages_where_the_kernel_has_them() -> None:
    chosen = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not chosen.exists() or "[never]" in chosen.read_text():
        pytest.skip("no transparent huge pages here")
    view = own_pages(4 * HUGE_BYTES)
    view[:] = bytes(len(view))
    if _huge_kib(_place(view)) == 0:
        pytest.skip("no huge page was free")
    assert _huge_kib(_place(view)) == 4 * HUGE_BYTES // 1024


def _exit_of_child(work: object) -> int:
    child = os.fork()
    if child == 0:
        os._exit(work() if callable(work) else 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_after_a_fork_sees_nothing_and_changes_nothing() -> None:
    view = own_pages(HUGE_BYTES)
    view[:4] = b"here"

    def look() -> int:
        seen = bytes(view[:4])
        view[:4] = b"gone"
        return 0 if seen == bytes(4) else 1

    assert _exit_of_child(look) == 0
    assert bytes(view[:4]) == b"here"


def test_a_kernel_without_wipe_on_fork_gets_memory_that_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffers, "_WIPEONFORK", 12345)
    view = own_pages(HUGE_BYTES)
    view[:4] = b"here"
    assert view.nbytes == HUGE_BYTES and page_aligned(view)
    # What a fork does not copy is where a read under way puts its bytes in both.
    assert _exit_of_child(lambda: 0 if bytes(view[:4]) == b"here" else 1) == 0


def test_each_thread_has_its_own_and_keeps_it() -> None:
    made = ThreadBuffers(3 * PAGE, 2)
    mine = made.get_all()
    assert [view.nbytes for view in mine] == [3 * PAGE] * 2
    assert all(map(page_aligned, mine))
    assert made.get() is mine[0]
    others: list[memoryview] = []
    thread = threading.Thread(target=lambda: others.extend(made.get_all()))
    thread.start()
    thread.join(30)
    mine[0][:4] = b"mine"
    assert bytes(others[0][:4]) == bytes(4)

# SPDX-License-Identifier: Apache-2.0
"""J: the shared region of the tiering spec outlives a killed engine, and two can share one."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory here")
PAGE = os.sysconf("SC_PAGE_SIZE")


def _open(engine: str) -> SharedOffloadRegion:
    """As the tiering spec opens it: no barrier, so that the name stays."""
    return SharedOffloadRegion(engine, 2, None, PAGE, PAGE)


@pytest.fixture
def engine() -> Iterator[str]:
    name = f"finding-j-{uuid.uuid4().hex}"
    yield name
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"/dev/shm/vllm_offload_{name}.mmap")


def _die(region: SharedOffloadRegion) -> None:
    """What the kernel does for a killed process: unmap and close, run nothing of ours."""
    region._base = None
    region.mmap_obj.close()
    os.close(region.fd)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="finding J")
def test_a_restart_after_a_kill_finds_no_old_bytes(engine: str) -> None:
    first = _open(engine)
    first.mmap_obj[:3] = b"old"
    _die(first)
    second = _open(engine)
    with contextlib.ExitStack() as stack:
        stack.callback(second.cleanup)
        assert second.mmap_obj[:3] == bytes(3)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="finding J")
def test_two_live_engines_with_one_id_share_no_memory(engine: str) -> None:
    first, second = _open(engine), _open(engine)
    with contextlib.ExitStack() as stack:
        stack.callback(first.cleanup)
        stack.callback(second.cleanup)
        first.mmap_obj[:3] = b"his"
        assert second.mmap_obj[:3] == bytes(3)


def test_an_engine_that_ends_in_order_leaves_nothing(engine: str) -> None:
    first = _open(engine)
    first.mmap_obj[:3] = b"old"
    first.cleanup()
    assert not Path(first.mmap_path).exists()

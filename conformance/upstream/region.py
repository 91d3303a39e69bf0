# SPDX-License-Identifier: Apache-2.0
"""Our host region in place of vLLM's `SharedOffloadRegion`.

All memory is that of a `HostRegion`: it creates or joins the file, takes the memory, locks it,
and removes it. The stand-in gives it the file name that vLLM's tests look for, carves the views
that vLLM's workers ask for, and keeps to the tests' barrier, which our engine does not have.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import mmap
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.cpu import shared_offload_region as theirs

from kvsafe.host import HostRegion, RegionShape
from kvsafe.host import region as ours
from kvsafe.host.lease import REGION_SUFFIX, region_prefix

MADE: Counter[str] = Counter()
_reserve = ours._reserve
_made_here: set[Path] = set()


class Place(type(Path())):  # type: ignore[misc]
    """Shared memory, in which the region of one launch has the name that vLLM gives it."""

    engine: str
    check: Callable[[int], None] | None

    @classmethod
    def of(cls, engine: str, check: Callable[[int], None] | None) -> Place:
        """The place for this engine id; `check` is asked before memory is taken."""
        place: Place = cls(ours.SHARED_MEMORY)
        place.engine, place.check = engine, check
        return place

    def __truediv__(self, name: str) -> Path:
        token = hashlib.sha256(self.engine.encode()).hexdigest()[:24]
        if name == f"{region_prefix()}{token}{REGION_SUFFIX}":
            name = f"vllm_offload_{self.engine}.mmap"
        return ours.SHARED_MEMORY / name


def _checked_reserve(fd: int, shape: RegionShape, folder: Path) -> None:
    """Faults that a test puts into vLLM's checks happen where ours takes its memory."""
    if isinstance(folder, Place):
        rows = shape.num_rows * shape.row_bytes
        if folder.check is not None:
            folder.check(rows)
        theirs.check_shm_free_space(
            rows, allocation_name="CPU KV offload shared region in /dev/shm"
        )
    _reserve(fd, shape, folder)


class Region:
    """A `HostRegion` under the interface of `SharedOffloadRegion`."""

    BLOCK_SIZE_ALIGNMENT = mmap.PAGESIZE

    def __init__(
        self,
        engine_id: str,
        num_chunks: int,
        rank: int | None,
        kv_bytes_per_chunk: int,
        cpu_page_size: int,
        barrier: Callable[[], None] | None = None,
        *,
        creator_memory_check: Callable[[int], None] | None = None,
        populate_only_on_creator: bool = False,
    ) -> None:
        MADE["SharedOffloadRegion"] += 1
        self.num_chunks, self.rank = num_chunks, rank
        self.total_size_bytes = num_chunks * kv_bytes_per_chunk
        self._row_stride = kv_bytes_per_chunk
        shape = RegionShape(num_chunks, kv_bytes_per_chunk, kv_bytes_per_chunk // cpu_page_size)
        place = Place.of(engine_id, creator_memory_check)
        self._region = _opened(engine_id, shape, place, barrier)
        self._creator = self._region.created
        self.mmap_path = str(self._region.path)
        self._meet(barrier)
        self.fd = self._region._fd
        if self.fd is None:
            raise ours.RegionError("a region that was just opened is closed")
        start = shape.rows_offset
        # A second map of the rows alone: tests count bytes from row 0, and look at the object.
        self.mmap_obj: Any = mmap.mmap(self.fd, self.total_size_bytes, offset=start)
        rows = self._region.memory[start : start + self.total_size_bytes]
        self._base: Any = torch.frombuffer(rows, dtype=torch.int8)
        self._views: list[torch.Tensor] = []
        self._worker_offset = (rank or 0) * cpu_page_size
        self._worker_area_end = self._worker_offset + cpu_page_size
        self._canonical_offset = 0
        self.is_pinned = False
        self.pinned_addresses: list[int] = []

    def _meet(self, barrier: Callable[[], None] | None) -> None:
        if barrier is None:
            return
        try:
            barrier()
        except Exception:
            self._region.close()
            raise
        if self._creator:
            self._region.forget_name()
            self._creator = False

    @property
    def base_tensor(self) -> torch.Tensor:
        """All rows, int8."""
        if self._base is None:
            raise RuntimeError("the region was released")
        return self._base

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        """The next part of this worker's slice in every row."""
        end = self._worker_offset + tensor_page_size
        if end > self._worker_area_end:
            raise AssertionError(f"{end} exceeds worker area end {self._worker_area_end}")
        view = self._view(tensor_page_size, self._worker_offset)
        self._worker_offset = end
        return view

    def create_next_canonical_view(self, tensor_page_size: int) -> torch.Tensor:
        """The next part of every row, the same for all workers."""
        view = self._view(tensor_page_size, self._canonical_offset)
        self._canonical_offset += tensor_page_size
        return view

    def _view(self, length: int, start: int) -> torch.Tensor:
        size, stride = (self.num_chunks, length), (self._row_stride, 1)
        view = torch.as_strided(self._base, size=size, stride=stride, storage_offset=start)
        self._views.append(view)
        return view

    def create_kv_memoryview(self) -> memoryview:
        """All rows, uint8, shape (rows, bytes per row)."""
        return memoryview(self._region.rows)

    def cleanup(self) -> None:
        """Let go. The map counts as closed only if our region has really given up its own."""
        if self.is_pinned and self._base is not None:
            for address in reversed(self.pinned_addresses or [self._base.data_ptr()]):
                theirs.host_unregister(address)
            self.pinned_addresses.clear()
            self.is_pinned = False
        self._views.clear()
        self._base = None
        held = weakref.ref(self._region._map) if hasattr(self._region, "_map") else None
        self._region.close()
        if held is not None and held() is None:
            self.mmap_obj.close()
        self.mmap_obj = None
        self.fd = None
        self._creator = False


def _opened(
    engine: str, shape: RegionShape, place: Place, barrier: Callable[[], None] | None
) -> HostRegion:
    try:
        region = HostRegion.open(engine, shape, place)
        if region.created:
            _made_here.add(region.path)
        return region
    except Exception:
        if barrier is not None:
            with contextlib.suppress(Exception):
                barrier()
        raise


def sweep() -> None:
    """Remove the files of tests that never let their regions go."""
    for path in _made_here:
        path.unlink(missing_ok=True)


def put_in_place() -> None:
    """From here on vLLM's name means ours, in this process."""
    ours._reserve = _checked_reserve
    theirs.SharedOffloadRegion = Region
    atexit.register(sweep)

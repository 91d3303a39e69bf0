# SPDX-License-Identifier: Apache-2.0
"""Registration of the shared rows as pinned memory: faster copies, never a condition for them."""

import ctypes
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from kvsafe.device.plan import RowWindow

_LOG = logging.getLogger(__name__)

# Drivers refuse very large single registrations.
PIECE_BYTES = 64 * 1024**3
_HOST_PAGE = 4096
_LIBRARIES = {"cuda": "libcudart", "hip": "libamdhip64"}


class HostRegistrar(Protocol):
    """The runtime's two calls; both return the runtime's error code, 0 for success."""

    def register(self, address: int, length: int) -> int:
        """Pin `length` bytes at `address`."""

    def unregister(self, address: int) -> int:
        """Unpin what was registered at `address`."""


class RuntimeRegistrar:
    """HostRegistrar over the CUDA or HIP runtime library that torch has loaded."""

    def __init__(self, library: ctypes.CDLL, prefix: str) -> None:
        """Raises AttributeError when the library lacks one of the calls."""
        self._register = getattr(library, f"{prefix}HostRegister")
        self._register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._unregister = getattr(library, f"{prefix}HostUnregister")
        self._unregister.argtypes = [ctypes.c_void_p]
        self._last_error = getattr(library, f"{prefix}GetLastError")

    def register(self, address: int, length: int) -> int:
        return self._drained(int(self._register(address, length, 0)))

    def unregister(self, address: int) -> int:
        return self._drained(int(self._unregister(address)))

    def _drained(self, code: int) -> int:
        # An error left pending would be raised by the next, innocent kernel launch.
        if code != 0:
            self._last_error()
        return code


def find_registrar() -> HostRegistrar | None:
    """The registrar of the runtime in this process, or None without one."""
    prefix = "hip" if torch.version.hip else "cuda"
    path = _loaded_library(_LIBRARIES[prefix])
    if path is None:
        return None
    try:
        return RuntimeRegistrar(ctypes.CDLL(path), prefix)
    except (OSError, AttributeError):
        return None


def _loaded_library(stem: str) -> str | None:
    """Path of the shared library that this very process has mapped."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(rf"\s(/\S*/{re.escape(stem)}[^/\s]*\.so[^/\s]*)$", maps, re.MULTILINE)
    return found.group(1) if found else None


class PinnedRows:
    """Pieces that are registered; `release` gives all of them back, once."""

    def __init__(self, registrar: HostRegistrar, addresses: list[int]) -> None:
        self._registrar = registrar
        self._addresses = addresses

    def __len__(self) -> int:
        return len(self._addresses)

    def release(self) -> None:
        """Unregister in reverse order; a failure is logged, the rest is still released."""
        while self._addresses:
            code = self._registrar.unregister(self._addresses.pop())
            if code != 0:
                _LOG.warning("host memory could not be unregistered (code %d)", code)


def pin_rows(
    registrar: HostRegistrar | None, window: RowWindow, piece_bytes: int = PIECE_BYTES
) -> PinnedRows | None:
    """Register all rows in pieces of whole rows; None means that they stay pageable.

    All or nothing: a copy whose memory is half pinned fails on some drivers.
    """
    if registrar is None:
        _LOG.warning("no runtime to register host memory with: copies stay pageable and slower")
        return None
    addresses: list[int] = []
    pinned = PinnedRows(registrar, addresses)
    for address, length in _pieces(window, piece_bytes):
        code = registrar.register(address, length)
        if code != 0:
            _LOG.warning("host memory was not registered (code %d): copies stay pageable", code)
            pinned.release()
            return None
        addresses.append(address)
    return pinned


def _pieces(window: RowWindow, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """(address, length) of whole rows each, ending on page borders where the stride allows."""
    step = _HOST_PAGE // math.gcd(_HOST_PAGE, window.row_stride)
    rows = max(piece_bytes // window.row_stride // step, 1) * step
    first = window.base.data_ptr() + window.rows_offset
    for row in range(0, window.num_rows, rows):
        count = min(rows, window.num_rows - row)
        yield first + row * window.row_stride, count * window.row_stride

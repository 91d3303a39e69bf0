# SPDX-License-Identifier: Apache-2.0
"""The shared objects that are built beside our modules where there is a C compiler.

Shared by the folders that have one; knows none of them. They are plain C behind `ctypes`, without
Python in them, and whoever uses one can do without.
"""

import ctypes
import importlib.machinery
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Door = TypeVar("Door")
SUFFIXES = importlib.machinery.EXTENSION_SUFFIXES


def load_beside(folder: Path, name: str, door: Callable[[ctypes.CDLL], Door]) -> Door | None:
    """What `door` makes of the shared object `name` in `folder`.

    None where it was not built, is of another version (`door` raises `ValueError`), or cannot be
    loaded.
    """
    for suffix in SUFFIXES:
        path = folder / f"{name}{suffix}"
        if path.is_file():
            try:
                return door(ctypes.CDLL(str(path)))
            except (OSError, AttributeError, ValueError):
                return None
    return None


def sizes_of(library: ctypes.CDLL, symbol: str, count: int) -> tuple[int, ...]:
    """The sizes of the structures that a shared object was built with."""
    return tuple((ctypes.c_int32 * count).in_dll(library, symbol))

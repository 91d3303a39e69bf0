# SPDX-License-Identifier: Apache-2.0
"""Faults that a test can put into a running engine, by name; `restore` takes them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.engine.state import State


def damage_row(state: State, prompt: list[int], chunk: int, at: int, **values: Any) -> int:
    """Flip one bit of a chunk's host row, as a broken memory would; returns the row."""
    key = list(state.keys(prompt, **values))[chunk]
    row = state.manager.primary_tier.row_of(key)
    if row is None:
        raise RuntimeError("that chunk is in no row")
    view = state.station.region.row(row)
    view[at] ^= 1
    return int(row)


FAULTS: tuple[Callable[..., Any], ...] = (damage_row,)

# SPDX-License-Identifier: Apache-2.0
"""Contracts that are wrong on purpose: a checker that confirms one of them checks nothing."""

from __future__ import annotations

from fuzz.contracts.lifecycle import _state
from kvsafe.lifecycle.rows import evictable
from kvsafe.lifecycle.words import READY
from kvsafe.seal.layout import record_offset, round_up


def rounding_is_strict(value: int, step: int) -> None:
    """False where `value` is a multiple already."""
    assert 0 <= value <= 1 << 20
    assert 1 <= step <= 1 << 20
    assert round_up(value, step) > value


def records_never_touch_the_fixed_part(writers: int) -> None:
    """False for many writers in one page: step 3 has to check it."""
    assert 1 <= writers <= 1024
    assert record_offset(4096, writers, 0) >= 144


def a_pinned_chunk_may_go(pins: int) -> None:
    """False for every pin above 0."""
    assert 0 <= pins <= 3
    assert evictable(_state(pins, False, READY), 0)

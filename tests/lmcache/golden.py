# SPDX-License-Identifier: Apache-2.0
"""Vectors that LMCache 0.5.6 itself computed, and the token lists that they are about."""

import json
from functools import cache
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data" / "golden.json"


@cache
def golden() -> dict[str, Any]:
    """All vectors."""
    loaded: dict[str, Any] = json.loads(_DATA.read_text())
    return loaded


def pattern(count: int) -> list[int]:
    """A prompt that is easy to make anywhere."""
    return [(i * 7 + 3) % 500 + 2 for i in range(count)]


TOKENS: dict[str, list[int]] = {
    "empty": [],
    "single_0": [0],
    "short_10": list(range(10)),
    "zeros_512": [0] * 512,
    "big_ids_512": [151643 + i for i in range(512)],
    "max_u32_256": [2**32 - 1] * 256,
    "same_second_chunk": [1] * 256 + pattern(256),
    "negative_-1_256": [-1] * 256,
    **{f"pattern_{count}": pattern(count) for count in (255, 256, 257, 600)},
}

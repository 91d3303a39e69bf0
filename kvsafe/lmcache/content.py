# SPDX-License-Identifier: Apache-2.0
"""What can be said about the values of a chunk that nobody attests: are they a model's at all?

Two things no model computes: numbers that are not finite, and a token whose keys or values are
all zero in some layer. Storage that lost its bytes shows as one of them often, an attacker's bytes
never have to. Passing says nothing about whose values these are.
"""

import math
from typing import Final

import numpy as np

from kvsafe.lmcache.frames import Dtype
from kvsafe.seal.refusal import Refusal, RefusalKind

_INFINITY: Final = {
    Dtype.HALF: (np.int16, 0x7C00),
    Dtype.FLOAT16: (np.int16, 0x7C00),
    Dtype.BFLOAT16: (np.int16, 0x7F80),
    Dtype.FLOAT32: (np.int32, 0x7F800000),
}
"""The bits of the infinity. As integers, exactly what is not finite lies there or above."""


def judge_content(
    chunk: memoryview, dtype: Dtype, dims: tuple[int, int, int, int]
) -> Refusal | None:
    """Refuse values that no model computes. `dims` is [planes, layers, tokens, elements]."""
    known = _INFINITY.get(dtype)
    if known is not None and not _finite(np.frombuffer(chunk, known[0]), known[1]):
        return _refuse("values", "finite numbers", "others")
    if _zero_token(np.frombuffer(chunk, np.uint8).reshape(math.prod(dims[:3]), -1)):
        return _refuse("values", "no token of zeros only", "one")
    return None


def _finite(numbers: "np.ndarray[tuple[int], np.dtype[np.signedinteger]]", infinity: int) -> bool:
    """Two looks without copies: signed, the sign bit hides the negative numbers; unsigned not."""
    unsigned = numbers.view(f"u{numbers.itemsize}")
    sign = 1 << (8 * numbers.itemsize - 1)
    return int(numbers.max()) < infinity and int(unsigned.max()) < (sign | infinity)


def _zero_token(tokens: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]") -> bool:
    """Whether a row has zeros only. A row whose first bytes are not all zero needs no look."""
    if tokens.shape[1] % 8:
        suspects = tokens[~tokens[:, :8].any(axis=1)]
    else:
        suspects = tokens[tokens.view(np.uint64)[:, 0] == 0]
    return not bool(suspects.any(axis=1).all())


def _refuse(field: str, expected: str, found: str) -> Refusal:
    return Refusal.of(RefusalKind.PEER_CONTENT, field, expected, found)

# SPDX-License-Identifier: Apache-2.0
"""Values that no model computes are refused; values that one could have computed are not."""

import numpy as np
import pytest

from kvsafe.lmcache import Dtype
from kvsafe.lmcache.content import judge_content
from kvsafe.seal.refusal import RefusalKind

DIMS = (2, 2, 4, 8)
NOT_FINITE = {
    Dtype.HALF: ("<u2", (0x7C00, 0xFC00, 0x7E01)),
    Dtype.FLOAT16: ("<u2", (0x7C00, 0xFC00, 0x7E01)),
    Dtype.BFLOAT16: ("<u2", (0x7F80, 0xFF80, 0x7FC1)),
    Dtype.FLOAT32: ("<u4", (0x7F800000, 0xFF800000, 0x7FC00001)),
}


@pytest.mark.parametrize("dtype", NOT_FINITE)
def test_infinities_and_not_a_number(dtype: Dtype) -> None:
    kind, patterns = NOT_FINITE[dtype]
    good = np.full(DIMS, 0x3C00, kind)
    assert judge_content(good.data.cast("B"), dtype, DIMS) is None
    for pattern in patterns:
        bad = good.copy()
        bad[1, 1, 3, 7] = pattern
        refusal = judge_content(bad.data.cast("B"), dtype, DIMS)
        assert refusal is not None
        assert refusal.kind is RefusalKind.PEER_CONTENT


@pytest.mark.parametrize("dtype", [*NOT_FINITE, Dtype.UINT8, Dtype.FLOAT8_E4M3FN])
def test_a_token_of_zeros_only(dtype: Dtype) -> None:
    good = np.zeros(DIMS, NOT_FINITE.get(dtype, ("<u1", ()))[0])
    good[..., 3] = 1
    assert judge_content(good.data.cast("B"), dtype, DIMS) is None
    bad = good.copy()
    bad[1, 0, 2] = 0
    refusal = judge_content(bad.data.cast("B"), dtype, DIMS)
    assert refusal is not None
    assert refusal.kind is RefusalKind.PEER_CONTENT

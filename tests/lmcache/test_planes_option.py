# SPDX-License-Identifier: Apache-2.0
"""`mp_planes`: which line of LMCache's multiprocess servers the peers are."""

import pytest

from kvsafe.engine.config.lmcache import complete_lmcache
from kvsafe.engine.config.problems import Refused
from kvsafe.engine.config.tiers import check_kvsafe_lmcache


def options(scheme: str, **more: object) -> dict[object, object]:
    """The options of a tier as an operator writes them."""
    made: dict[object, object] = {"type": "kvsafe-lmcache", "url": f"{scheme}://127.0.0.1:7000"}
    made.update(more)
    return made


def test_one_plane_unless_the_operator_says_two() -> None:
    given = [options("resp"), options("resp", mp_planes=2), options("lm")]
    found = [complete_lmcache(check_kvsafe_lmcache(one)).mp_planes for one in given]
    assert found == [1, 2, 1]


@pytest.mark.parametrize("wrong", [options("lm", mp_planes=2), options("resp", mp_planes=3)])
def test_any_other_number_and_any_other_server_is_refused(wrong: dict[object, object]) -> None:
    with pytest.raises(Refused) as refused:
        complete_lmcache(check_kvsafe_lmcache(wrong))
    assert "mp_planes" in str(refused.value.problems)

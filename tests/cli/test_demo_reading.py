# SPDX-License-Identifier: Apache-2.0
"""What the demo reads from a metrics page and from a log is what the server said."""

from __future__ import annotations

import pytest

from kvsafe.cli.demo.reading import read_metrics, read_refusals
from kvsafe.seal.refusal import Refusal, RefusalKind

PAGE = r"""# HELP kvsafe:refusals_total Chunks refused.
# TYPE kvsafe:refusals_total counter
kvsafe:refusals_total{engine="0",number="1001",step="10",tier="1:fs"} 2.0
kvsafe:refusals_total{engine="0",number="703",step="7",tier="1:fs"} 1.0
kvsafe:refusals_created{engine="0",number="703",step="7",tier="1:fs"} 1.7e+09
kvsafe:chunks_served_total{engine="0",model_name="a \"quoted\", {odd} name"} 2e+01
kvsafe:epoch{engine="0"} 0.0
process_start_total 5
broken_total{x="1"} not-a-number
}{ nonsense
"""


def test_counters_are_summed_over_the_labels_that_were_asked_for() -> None:
    metrics = read_metrics(PAGE)
    assert metrics.total("kvsafe:refusals") == 3
    assert metrics.total("kvsafe:refusals", number="1001") == 2
    assert metrics.total("kvsafe:refusals", number="1001", tier="2:fs") == 0
    assert metrics.total("kvsafe:chunks_served", model_name=r"a \"quoted\", {odd} name") == 20
    assert metrics.total("process_start") == 5
    assert metrics.value("process_start_total") == 5.0
    assert metrics.value("process_start") == 0.0


def test_what_is_not_there_counts_nothing() -> None:
    metrics = read_metrics(PAGE)
    assert metrics.total("kvsafe:quarantined") == 0
    assert metrics.total("broken") == 0
    assert read_metrics("").samples == ()


def _line(refusal: Refusal) -> str:
    head = "(EngineCore pid=7) WARNING 01-02 03:04:05 [journal.py:44] "
    return f"{head}kvsafe: tier 1:fs, chunk 50f2647846bc: {refusal}\n"


@pytest.mark.parametrize("kind", list(RefusalKind))
def test_every_refusal_is_read_back_from_its_line(kind: RefusalKind) -> None:
    refusal = Refusal.of(kind, "rope.rope_theta, hf_config", 500000.0, "10000.0, found earlier")
    [line] = read_refusals(f"before\n{_line(refusal)}after\n")
    assert (line.tier, line.chunk) == ("1:fs", "50f2647846bc")
    assert (line.number, line.step) == (refusal.number, refusal.step)
    assert line.field == refusal.field
    assert refusal.expected in line.expected
    assert refusal.found.endswith(line.found)


def test_refusals_keep_their_order_and_other_lines_are_none() -> None:
    first = Refusal.of(RefusalKind.PAYLOAD_TAG, "writer[0].tag", b"\x01", b"\x02")
    second = Refusal.of(RefusalKind.IDENTITY_ELSEWHERE, "rope.rope_theta", 1.0, 2.0)
    log = f"kvsafe: 5 rows\n{_line(first)}kvsafe: tier 1:fs\n{_line(second)}"
    assert [line.number for line in read_refusals(log)] == [1001, 703]
    assert read_refusals("kvsafe: tier 1:fs, chunk zz: refusal x at step y") == ()

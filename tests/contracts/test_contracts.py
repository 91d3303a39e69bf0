# SPDX-License-Identifier: Apache-2.0
"""CrossHair over the contracts within a short bound; the page lists exactly what there is."""

from __future__ import annotations

import pytest

from fuzz.contracts.check import CONFIRMED, FALSE_ON_PURPOSE, MODULES, check, complaints, contracts
from tests.tidy.tree import ROOT

PAGE = ROOT / "spec" / "contracts.md"
# Far fewer than a quiet machine confirms in this time; the rest may stay bounded in this run.
SURE = {"seal": 2, "lifecycle": 3}


@pytest.mark.parametrize("module", MODULES)
def test_crosshair_refutes_only_what_is_false(module: str) -> None:
    verdicts = check(module, 3)
    assert complaints(verdicts) == []
    assert sum(one.outcome == CONFIRMED for one in verdicts) >= SURE.get(module, 0)


def test_the_page_lists_every_contract() -> None:
    text = PAGE.read_text()
    for module in MODULES:
        for one in contracts(module):
            assert f"| `{one.name}` | {one.says}" in text
    rows = [
        line
        for line in text.splitlines()
        if line.startswith(("| seal", "| life", "| geom", "| lmc"))
    ]
    told = sum(len(contracts(module)) for module in MODULES if module != FALSE_ON_PURPOSE)
    lines = [line for line in text.splitlines() if line.count("|") == 5 and "`" in line]
    assert len(lines) == told
    assert rows
    assert "refuted by" not in "".join(rows)

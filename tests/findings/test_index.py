# SPDX-License-Identifier: Apache-2.0
"""Every finding is in the index, has a reproducer, and an open one is expected to fail there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.findings.index import FOLDER, Finding, findings, page, read

ROOT = FOLDER.parents[1]
EXPECTED = re.compile(r"xfail\([^)]*strict=True")


def test_the_readme_has_the_index_of_today() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert readme == page(readme, findings()), "run python -m tests.findings.index --write"


@pytest.mark.parametrize("finding", findings(), ids=lambda finding: finding.name)
def test_a_finding_has_a_reproducer_that_is_expected_to_fail(finding: Finding) -> None:
    test = ROOT / finding.facts["test"]
    text = test.read_text(encoding="utf-8")
    assert f"finding {finding.name}" in text
    assert bool(EXPECTED.search(text)) == finding.facts["state"].startswith("open")


def test_every_reproducer_belongs_to_a_finding() -> None:
    named = {ROOT / finding.facts["test"] for finding in findings()}
    there = set(Path(__file__).parent.glob("test_*.py")) - {Path(__file__)}
    assert there - named == set()


def test_wrong_first_lines_are_seen(tmp_path: Path) -> None:
    good = "# Z9: x\n\n- state: open\n- seen in: 0\n- test: t\n- guard: g\n"
    path = tmp_path / "Z9-x.md"
    path.write_text(good)
    assert read(path).facts["guard"] == "g"
    for bad in (good.replace("Z9", "Z8"), good.replace("- test: t\n", ""), good.replace("# ", "")):
        path.write_text(bad)
        with pytest.raises(ValueError, match="Z9"):
            read(path)

# SPDX-License-Identifier: Apache-2.0
"""The list of differences from vLLM's own tests is wrong in both directions, and says which."""

from pathlib import Path

import pytest

from conformance.upstream.listing import Difference, Outcome, complaints, listed, outcomes

PAGE = Path(__file__).resolve().parents[2] / "spec" / "upstream-tests.md"
ROWS = [
    Difference("a::one", 1, "assert 1 == 2", "why"),
    Difference("a::many[*]", 2, "no header", "why"),
]
FOUND = {
    "a::one": Outcome("failed", "AssertionError: assert 1 == 2"),
    "a::many[x]": Outcome("failed", "no header"),
    "a::many[y]": Outcome("failed", "there is no header"),
    "a::other": Outcome("passed"),
    "a::skipped": Outcome("skipped"),
}


def test_a_run_that_is_as_listed_has_no_complaint() -> None:
    assert complaints(FOUND, ROWS, whole=True) == []


@pytest.mark.parametrize(
    ("test", "outcome", "said"),
    [
        ("a::other", Outcome("failed", "x"), "a::other failed and is not listed"),
        ("a::one", Outcome("passed"), "a::one passed and is listed"),
        ("a::many[x]", Outcome("passed"), "a::many[x] passed and is listed"),
        ("a::one", Outcome("skipped"), "a::one skipped and is listed"),
        ("a::one", Outcome("failed", "KeyError"), "a::one ends with 'KeyError', listed is"),
        ("a::many[z]", Outcome("failed", "no header"), "a::many[*]: 3 tests, listed are 2"),
    ],
)
def test_every_departure_is_said(test: str, outcome: Outcome, said: str) -> None:
    (complaint,) = complaints({**FOUND, test: outcome}, ROWS, whole=True)
    assert complaint.startswith(said)


def test_a_test_that_is_gone_is_missed_in_a_whole_run_only() -> None:
    less = {test: outcome for test, outcome in FOUND.items() if test != "a::many[y]"}
    assert complaints(less, ROWS, whole=True) == ["a::many[*]: 1 tests, listed are 2"]
    assert complaints(less, ROWS, whole=False) == []


def test_two_rows_for_one_test_are_refused() -> None:
    rows = [*ROWS, Difference("a::o*e", 1, "assert", "why")]
    assert complaints(FOUND, rows, whole=True) == ["a::one is listed 2 times"]


def test_brackets_and_dots_of_a_name_are_taken_as_they_are() -> None:
    row = Difference("k.a::t[1.0-*]", 1, "x", "why")
    assert row.holds("k.a::t[1.0-cpu]")
    assert not row.holds("k.a::t1.0-cpu")
    assert not row.holds("kxa::t[1.0-cpu]")


def test_a_report_is_read_as_pytest_writes_it(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.v1.a" name="good"/>'
        '<testcase classname="tests.v1.a" name="bad"><failure message="no header">x</failure>'
        '</testcase><testcase classname="tests.v1.a" name="broken"><error message="no setup"/>'
        '</testcase><testcase classname="tests.v1.a" name="not"><skipped message="no"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert outcomes(report) == {
        "a::good": Outcome("passed"),
        "a::bad": Outcome("failed", "no header"),
        "a::broken": Outcome("failed", "no setup"),
        "a::not": Outcome("skipped"),
    }


def test_every_row_of_the_page_is_read_and_says_why() -> None:
    rows = listed(PAGE)
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert len(rows) == sum("::" in line for line in lines if line.startswith("|"))
    assert len({row.tests for row in rows}) == len(rows)
    assert all(row.number > 0 and row.ends and row.why for row in rows)

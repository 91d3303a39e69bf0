# SPDX-License-Identifier: Apache-2.0
"""`spec/assertions.md` is about the vLLM that is installed: none missing, none stale."""

import re
from pathlib import PurePath

import pytest

from tests.support.assertions import PAGE, PLACES, installed, named_tests, written

ROOT = PAGE.parents[1]


def test_the_page_has_every_assertion_and_no_other() -> None:
    page = written(PAGE.read_text(encoding="utf-8"))
    known = {mark for marks in page.values() for mark in marks}
    found = installed()
    new = [str(item) for item in found if item.mark not in page.get(item.file, set())]
    marks = {item.mark for item in found}
    gone = sorted(known - marks)
    assert not new, (
        "vLLM asserts what spec/assertions.md does not know. Find out whether an input can reach "
        "it through our connector, guard it if so, and write it down:\n" + "\n".join(new)
    )
    assert not gone, (
        f"spec/assertions.md has assertions that vLLM has not, or not as they were: {gone}. "
        "Take them off the page, and look whether their guards are still needed."
    )


def test_marks_tell_assertions_apart() -> None:
    found = installed()
    assert len(found) > 100
    assert len({item.mark for item in found}) == len(found)


def test_every_test_that_the_page_names_is_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = named_tests(text)
    assert len(named) > 10
    for file, function in sorted(named):
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", source, re.MULTILINE), f"{file}::{function}"


def test_every_file_of_the_page_is_one_that_is_looked_at() -> None:
    page = written(PAGE.read_text(encoding="utf-8"))
    assert page and all(any(PurePath(file).match(place) for place in PLACES) for file in page)


@pytest.mark.parametrize("change", ["new", "gone", "twice"])
def test_a_page_that_does_not_fit_is_noticed(change: str) -> None:
    text = "### `a.py`\n| `0a1b2c` `ffffff` | f | x |\n"
    assert written(text) == {"a.py": {"0a1b2c", "ffffff"}}
    if change == "twice":
        with pytest.raises(ValueError, match="twice"):
            written(text + "| `ffffff` | g | y |\n")
    elif change == "new":
        first = installed()[0]
        assert first.mark not in written(text).get(first.file, set())
    else:
        assert "ffffff" not in {item.mark for item in installed()}

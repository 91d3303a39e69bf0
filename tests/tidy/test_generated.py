# SPDX-License-Identifier: Apache-2.0
"""The generated pages of spec/ are what the tables in the code say; `make spec` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvsafe.engine.config import options_markdown
from kvsafe.seal.tables import pages
from tests.tidy.tree import ROOT

PAGES = {**pages(), "spec/configuration.md": options_markdown()}


def stale(root: Path, wanted: Mapping[str, str]) -> Iterator[str]:
    """The pages below `root` that are missing or hold another text."""
    for place, text in wanted.items():
        path = root / place
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            yield place


def test_the_pages_that_are_generated() -> None:
    assert set(PAGES) == {"spec/identity.md", "spec/refusals.md", "spec/configuration.md"}


@pytest.mark.parametrize("place", sorted(PAGES))
def test_the_committed_page_is_what_the_tables_say(place: str) -> None:
    assert list(stale(ROOT, {place: PAGES[place]})) == [], "run `make spec`"


def test_make_writes_every_page() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.split("\nspec:", 1)[1].split("\n\n", 1)[0]
    assert "-m kvsafe.seal.tables" in recipe
    assert "-m kvsafe.engine.config --write spec/configuration.md" in recipe


def test_drift_is_seen(tmp_path: Path) -> None:
    wanted = {"a.md": "one\n", "b.md": "two\n"}
    (tmp_path / "a.md").write_text("one\n", encoding="utf-8")
    assert list(stale(tmp_path, wanted)) == ["b.md"]
    (tmp_path / "b.md").write_text("two, by hand\n", encoding="utf-8")
    assert list(stale(tmp_path, wanted)) == ["b.md"]
    (tmp_path / "b.md").write_text("two\n", encoding="utf-8")
    assert list(stale(tmp_path, wanted)) == []

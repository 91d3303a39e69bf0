# SPDX-License-Identifier: Apache-2.0
"""The README names every make target, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT

# `make name` where a command is expected: in code spans and in indented or fenced lines.
SPAN = re.compile(r"`make ([a-z][a-z-]*)[^`\n]*`")
LINE = re.compile(r"^\s*(?:\$ )?make ([a-z][a-z-]*)\b", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def targets(makefile: str) -> set[str]:
    """The targets that the Makefile offers: those on its .PHONY line."""
    [line] = re.findall(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)
    return set(line.split())


def named(readme: str) -> set[str]:
    """The make targets that a Markdown text names as commands."""
    fenced = "\n".join(FENCE.findall(readme))
    return set(SPAN.findall(readme)) | set(LINE.findall(fenced))


def test_the_readme_and_the_makefile_name_the_same_targets() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md yet")
    assert named(readme.read_text()) == targets((ROOT / "Makefile").read_text())


def test_every_target_has_a_rule_and_a_line_of_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    rules = set(re.findall(r"^([a-z][a-z-]*):.*## ", makefile, re.MULTILINE))
    assert rules == targets(makefile)


def test_targets_in_text_are_seen(tmp_path: Path) -> None:
    text = "Run `make demo` or\n```sh\nmake test\n$ make unit PYTEST_ARGS=-x\n```\nWe make sure.\n"
    assert named(text) == {"demo", "test", "unit"}

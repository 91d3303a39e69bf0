# SPDX-License-Identifier: Apache-2.0
"""Modules and functions stay small enough to be read in one go, and say what they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.tidy.tree import Source, sources

MODULE_LINES = 400
FUNCTION_LINES = 60
LICENCE = "# SPDX-License-Identifier: Apache-2.0"

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)


def too_long(source: Source) -> Iterator[str]:
    """The module and each function that is longer than the limit."""
    lines = len(source.text.splitlines())
    if lines > MODULE_LINES:
        yield f"{source.place}: {lines} lines, at most {MODULE_LINES}"
    for node in ast.walk(source.tree):
        if isinstance(node, FUNCTIONS) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{source.place}: {node.name}: {length} lines, at most {FUNCTION_LINES}"


def undocumented(source: Source) -> Iterator[str]:
    """The module, and each public class or function at its top, that has no docstring."""
    if ast.get_docstring(source.tree) is None:
        yield f"{source.place}: the module has no docstring"
    for node in source.tree.body:
        if not isinstance(node, DEFINITIONS) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield f"{source.place}: {node.name} has no docstring"


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.place)
def test_the_first_line_names_the_licence(source: Source) -> None:
    lines = source.text.splitlines()
    first = lines[1] if lines and lines[0].startswith("#!") else (lines or [""])[0]
    assert first == LICENCE


@pytest.mark.parametrize("source", sources("kvsafe"), ids=lambda source: source.place)
def test_modules_and_functions_are_short(source: Source) -> None:
    assert list(too_long(source)) == []


@pytest.mark.parametrize("source", sources("kvsafe"), ids=lambda source: source.place)
def test_what_is_public_is_documented(source: Source) -> None:
    assert list(undocumented(source)) == []


def test_long_ones_are_seen() -> None:
    body = "    pass\n" * FUNCTION_LINES
    assert list(too_long(Source.of("kvsafe/x.py", f"def f():\n{body}")))
    assert list(too_long(Source.of("kvsafe/x.py", "x = 1\n" * (MODULE_LINES + 1))))
    assert list(too_long(Source.of("kvsafe/x.py", f"def f():\n{body[9:]}"))) == []
    assert list(too_long(Source.of("kvsafe/x.py", "x = 1\n" * MODULE_LINES))) == []


def test_missing_docstrings_are_seen() -> None:
    text = '"""M."""\ndef f(): pass\nclass C: pass\ndef _g(): pass\ndef h():\n    """H."""\n'
    found = [line.split(": ")[1] for line in undocumented(Source.of("kvsafe/x.py", text))]
    assert found == ["f has no docstring", "C has no docstring"]

# SPDX-License-Identifier: Apache-2.0
"""Constructs that have no place in kvsafe: code from bytes, and asserts that input could reach."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.tidy.tree import Source, imports, sources

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {"torch.load", "torch.jit.load", "numpy.load", "np.load", "yaml.load", "builtins.eval"}


def breaches(source: Source) -> Iterator[str]:
    """Every banned construct in `source`, with its line."""
    for name in imports(ast.walk(source.tree), source.place):
        if name.split(".")[0] in MODULES or name in ATTRIBUTES:
            yield f"{source.place}: imports {name}"
    for node in ast.walk(source.tree):
        found = _banned(node)
        if found:
            yield f"{source.place}:{getattr(node, 'lineno', 0)}: {found}"


def _banned(node: ast.AST) -> str:
    if isinstance(node, ast.Assert):
        return "assert: raise a typed error or return a refusal"
    if isinstance(node, ast.Name) and node.id in CALLS:
        return node.id
    if isinstance(node, ast.Attribute) and ast.unparse(node) in ATTRIBUTES:
        return ast.unparse(node)
    return ""


@pytest.mark.parametrize("source", sources("kvsafe"), ids=lambda source: source.place)
def test_nothing_banned(source: Source) -> None:
    assert list(breaches(source)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "run = exec",
        "import marshal as m",
        "def f(x):\n    assert x > 0",
    ],
)
def test_a_breach_is_seen(text: str) -> None:
    assert list(breaches(Source.of("kvsafe/tiers/x.py", text)))


def test_harmless_names_pass() -> None:
    text = "import re\nmodel.eval()\nre.compile('a')\nload = json.load\n"
    assert list(breaches(Source.of("kvsafe/tiers/x.py", text))) == []

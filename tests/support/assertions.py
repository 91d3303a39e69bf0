# SPDX-License-Identifier: Apache-2.0
"""The assertions of the installed vLLM's offload code, and what `spec/assertions.md` says of them.

`python -m tests.support.assertions` prints every one of them with its mark, for the page.
"""

import ast
import hashlib
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "spec" / "assertions.md"
CONNECTOR = "distributed/kv_transfer/kv_connector/v1"
PLACES = (
    f"{CONNECTOR}/offloading/*.py",
    f"{CONNECTOR}/offloading_connector.py",
    "v1/kv_offload/base.py",
    "v1/kv_offload/config.py",
    "v1/kv_offload/cpu/manager.py",
    "v1/kv_offload/cpu/shared_offload_region.py",
    "v1/kv_offload/cpu/policies/*.py",
    "v1/kv_offload/tiering/*.py",
    "v1/kv_offload/tiering/fs/*.py",
)
_HEADING = re.compile(r"### `([^`]+\.py)`")
_ROW = re.compile(r"\| ((?:`[0-9a-f]{6}` ?)+)\|")
_MARK = re.compile(r"`([0-9a-f]{6})`")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


class Assertion(NamedTuple):
    """One `assert`, or one `raise AssertionError`.

    Attributes:
        file: path inside the vllm package.
        function: qualified name of what it is in.
        expression: what is asserted, in Python's own spelling of it; line breaks do not count.
        number: which of several equal ones of this function it is, from 0.
    """

    file: str
    function: str
    expression: str
    number: int

    @property
    def mark(self) -> str:
        """Six hex digits that name it in the page."""
        text = "\0".join(map(str, self))
        return hashlib.blake2s(text.encode(), digest_size=3).hexdigest()

    def __str__(self) -> str:
        return f"`{self.mark}` {self.file}: {self.function}: {self.expression}"


def installed() -> list[Assertion]:
    """Those of the vLLM that is installed, in the order of the files."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("vllm is not installed")
    root = Path(spec.origin).parent
    paths = [path for place in PLACES for path in sorted(root.glob(place))]
    return [found for path in paths for found in _of_file(path, str(path.relative_to(root)))]


def _of_file(path: Path, name: str) -> Iterator[Assertion]:
    seen: Counter[tuple[str, str]] = Counter()
    for function, expression in _walk(ast.parse(path.read_text(encoding="utf-8")), ()):
        yield Assertion(name, function, expression, seen[function, expression])
        seen[function, expression] += 1


def _walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inside = names
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*names, child.name)
        if isinstance(child, ast.Assert):
            yield ".".join(inside), ast.unparse(child.test)
        elif isinstance(child, ast.Raise) and child.exc is not None:
            raised = ast.unparse(child.exc)
            if raised.startswith("AssertionError"):
                yield ".".join(inside), f"raise {raised}"
        yield from _walk(child, inside)


def written(text: str) -> dict[str, set[str]]:
    """The marks on the page, by file. Raises `ValueError` if one stands there twice."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            marks = found.setdefault(heading[1], set())
        elif row := _ROW.match(line):
            for mark in _MARK.findall(row[1]):
                if mark in marks:
                    raise ValueError(f"{mark} stands twice on the page")
                marks.add(mark)
    return found


def named_tests(text: str) -> set[tuple[str, str]]:
    """(file, function) of every test that the page names."""
    return set(_TEST.findall(text))


if __name__ == "__main__":
    for assertion in installed():
        print(assertion)

# SPDX-License-Identifier: Apache-2.0
"""The files that the rules look at, and small helpers over Python's syntax tree."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {"build", "dist", "__pycache__"}
PYTHON_FOLDERS = ("kvsafe", "tests", "fuzz", "conformance", "benchmarks")


@dataclass(frozen=True)
class Source:
    """One Python file: its place in the tree, its text and its syntax tree."""

    place: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, place: str, text: str) -> Source:
        """Parse `text` as if it stood at `place`."""
        return cls(place, text, ast.parse(text, place))


@cache
def files() -> tuple[Path, ...]:
    """Every file that git tracks or would track; without git, all but hidden folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        found = (ROOT / name for name in listed.stdout.split("\0") if name)
        return tuple(sorted(path for path in found if path.is_file()))
    return tuple(sorted(_walk(ROOT)))


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_symlink():
            continue
        if path.is_file():
            yield path
        elif path.name == ".ci" or (path.name[0] != "." and path.name not in NOT_OURS):
            yield from _walk(path)


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Every Python file below `folders` (default: all that hold Python)."""
    wanted = folders or PYTHON_FOLDERS
    found = []
    for path in files():
        place = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and place.startswith(tuple(f"{name}/" for name in wanted)):
            found.append(Source.of(place, path.read_text(encoding="utf-8")))
    return tuple(found)


def texts() -> Iterator[tuple[str, str]]:
    """Place and text of every file that is UTF-8."""
    for path in files():
        try:
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def imports(nodes: Iterable[ast.AST], place: str) -> Iterator[str]:
    """Full dotted names that the imports among `nodes` name; relative ones are resolved."""
    package = place.removesuffix(".py").split("/")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def at_import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run on import of the module: not function bodies, not TYPE_CHECKING blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from at_import_time(node)

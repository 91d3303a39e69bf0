# SPDX-License-Identifier: Apache-2.0
"""Where a source can be broken, and the broken tree.

Faults are put into the syntax tree, so line numbers stay. Left alone, since no test could or
should notice: docstrings, annotations, decorators, texts of messages, `__all__`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

_COMPARE: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
# Calls whose loss no caller can see.
_QUIET: Final = ("logger", "warnings", "log")


@dataclass(frozen=True)
class Mutant:
    """One fault: the node (by its place in a walk of the tree), its line, and what it does."""

    place: int
    line: int
    name: str
    before: str
    after: str


def mutants(source: str) -> list[Mutant]:
    """All faults that the operators can put into `source`, in the order of its lines."""
    tree = ast.parse(source)
    skipped = _skipped(tree)
    found = []
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        for name, change in _changes(node):
            broken = change(copy.deepcopy(node))
            line = getattr(node, "lineno", 0)
            found.append(Mutant(place, line, name, _text(node), _text(broken)))
    return sorted(found, key=lambda one: (one.line, one.place, one.name))


def break_tree(source: str, mutant: Mutant) -> ast.Module:
    """The syntax tree of `source` with this one fault in it."""
    tree = ast.parse(source)
    node = next(node for place, node in enumerate(ast.walk(tree)) if place == mutant.place)
    change = dict(_changes(node))[mutant.name]
    broken = ast.copy_location(change(copy.deepcopy(node)), node)
    _Swap(node, broken).visit(tree)
    return ast.fix_missing_locations(tree)


class _Swap(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:70]


def _skipped(tree: ast.Module) -> set[int]:
    """Ids of all nodes that are left alone."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            roots += node.decorator_list
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            roots += [node.returns] if node.returns is not None else []
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            roots.append(node.annotation)
        if isinstance(node, ast.Raise):
            roots += list(ast.iter_child_nodes(node))
        if isinstance(node, ast.JoinedStr):
            roots.append(node)
        if _is_quiet(node) or _is_all(node) or _is_text(node):
            roots.append(node)
    return {id(inner) for root in roots for inner in ast.walk(root)}


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and _text(node.targets[0]) == "__all__"


def _is_quiet(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).split(".")[0] in _QUIET
    )


Change = Callable[[ast.AST], ast.AST]


def _changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """Name and effect of each fault that this node can have."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        yield "compare", _compare
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield "arithmetic", _arithmetic
    elif isinstance(node, ast.BoolOp):
        yield "and-or", _and_or
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", lambda old: old.operand  # type: ignore[attr-defined]
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool, bytes):
        yield "constant", _constant
    elif isinstance(node, ast.Return) and not _is_nothing(node.value):
        yield "return", lambda old: ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Raise):
        yield "raise", lambda old: ast.Pass()
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", lambda old: ast.Pass()
    elif isinstance(node, ast.If | ast.IfExp) and isinstance(node.test, ast.Name | ast.Call):
        yield "if", _if


def _is_nothing(node: ast.AST | None) -> bool:
    """None, or a constant that is as false as None; "constant" makes False true."""
    return node is None or (isinstance(node, ast.Constant) and not node.value)


def _compare(node: ast.AST) -> ast.AST:
    node.ops = [_COMPARE[type(node.ops[0])]()]  # type: ignore[attr-defined]
    return node


def _arithmetic(node: ast.AST) -> ast.AST:
    node.op = _ARITHMETIC[type(node.op)]()  # type: ignore[attr-defined]
    return node


def _and_or(node: ast.AST) -> ast.AST:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()  # type: ignore[attr-defined]
    return node


def _constant(node: ast.AST) -> ast.AST:
    value = node.value  # type: ignore[attr-defined]
    if isinstance(value, bool):
        return ast.Constant(not value)
    if isinstance(value, int):
        return ast.Constant(value + 1)
    return ast.Constant(value + b"\x01")


def _if(node: ast.AST) -> ast.AST:
    node.test = ast.UnaryOp(ast.Not(), node.test)  # type: ignore[attr-defined]
    return node

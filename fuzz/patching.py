# SPDX-License-Identifier: Apache-2.0
"""Attributes set for the length of a block, and put back whatever happens."""

from __future__ import annotations

from types import TracebackType
from typing import Self

_MISSING = object()


class Patch:
    """Sets attributes of modules and classes; on leaving the block all are as before."""

    def __init__(self) -> None:
        self._undo: list[tuple[object, str, object]] = []

    def set(self, owner: object, name: str, value: object) -> None:
        """Set `name` of `owner`. Raises `AttributeError` if there is no such name."""
        getattr(owner, name)
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for owner, name, value in reversed(self._undo):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._undo.clear()

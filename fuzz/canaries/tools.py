# SPDX-License-Identifier: Apache-2.0
"""Ways to seed a fault: something else instead, a check left out, other arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.patching import Patch
from fuzz.target import Target

Fault = Callable[[Patch, Target], None]


def instead(owner: object, name: str, value: object) -> Fault:
    """The fault that `name` is something else."""
    return lambda patch, _: patch.set(owner, name, value)


def gone(owner: object, name: str) -> Fault:
    """The fault that a check was left out."""
    return instead(owner, name, lambda *_: None)


def fed(owner: object, name: str, change: Callable[..., tuple[Any, ...]]) -> Fault:
    """The fault that a function looks at something else: its arguments are changed first."""
    right = getattr(owner, name)
    return instead(owner, name, lambda *args: right(*change(*args)))


def both(*faults: Fault) -> Fault:
    """The same fault in several places."""

    def fault(patch: Patch, target: Target) -> None:
        for one in faults:
            one(patch, target)

    return fault

# SPDX-License-Identifier: Apache-2.0
"""Canaries: seeded faults, one at a time, that a target has to find in so many executions.

A target that stays quiet while a check is missing proves nothing. Each fault is the smallest
form of a mistake that someone could make; it is switched on by name, here, and never in kvsafe.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from fuzz.execute import check
from fuzz.mutate import Maker
from fuzz.patching import Patch
from fuzz.target import Target
from fuzz.targets import PLACES, make

MODULES = {
    "seal": ("header", "rows", "inspect"),
    "state": ("config", "keys"),
    "device": ("plans", "order"),
    "disk": ("disk",),
    "life": ("machine", "stations"),
    "peers": ("lmkeys", "lm", "resp"),
    "world": ("lifecycle",),
}
"""The modules of this folder and the targets of their canaries: only what is needed is imported."""


@dataclass(frozen=True)
class Canary:
    """One seeded fault: its target, what it leaves out, how many executions may go by."""

    name: str
    target: str
    says: str
    within: int
    fault: Callable[[Patch, Target], None]


@dataclass(frozen=True)
class Hunt:
    """What came of a search: the execution that found it (0: none did), and how it looked."""

    canary: Canary
    at: int
    signature: str
    data: bytes
    seconds: float
    clean: bool

    @property
    def good(self) -> bool:
        """Found in time, by an input on which the real code is quiet."""
        return 0 < self.at <= self.canary.within and self.clean


@cache
def of_target(name: str) -> tuple[Canary, ...]:
    """The canaries of one target."""
    found: list[Canary] = []
    for module, targets in MODULES.items():
        if name in targets:
            found += importlib.import_module(f"fuzz.canaries.{module}").CANARIES
    return tuple(canary for canary in found if canary.target == name)


def every() -> tuple[Canary, ...]:
    """All canaries, in the order of the targets."""
    return tuple(canary for name in PLACES for canary in of_target(name))


def named(name: str, target: str) -> Canary:
    """The canary of that name and target. Raises `KeyError` for another name."""
    for canary in of_target(target):
        if canary.name == name:
            return canary
    raise KeyError(name)


def inputs(target: Target, seed: int) -> Iterator[bytes]:
    """What a hunt tries: the target's own seeds, then inputs from the seed alone.

    Not the corpus: what a hunt says must not change when an input is added there.
    """
    pool = target.seeds()
    yield from pool
    maker = Maker(seed, target.max_len)
    while True:
        yield maker.next(pool)


def hunt(canary: Canary, seed: int = 1, target: Target | None = None) -> Hunt:
    """Switch the fault on and run its target until it is found, `within` executions at most."""
    began = time.monotonic()
    own = target is None
    target = target or make(canary.target)
    at, signature, data = 0, "", b""
    try:
        with Patch() as patch:
            canary.fault(patch, target)
            for number, data in enumerate(inputs(target, seed), 1):
                finding = check(target, data)
                if finding is not None:
                    at, signature = number, finding.signature
                if finding is not None or number >= canary.within:
                    break
        clean = check(target, data) is None
    finally:
        if own:
            target.close()
    return Hunt(canary, at, signature, data, time.monotonic() - began, clean)

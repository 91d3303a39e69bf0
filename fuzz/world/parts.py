# SPDX-License-Identifier: Apache-2.0
"""What one world is made of; vLLM's factories, which take only names, find it here."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fuzz.world.content import Script
from fuzz.world.device import Device, Model
from fuzz.world.hands import Clock, HandThreads
from fuzz.world.plan import Setting
from fuzz.world.tier import HandTier
from fuzz.world.watch import KeyBook, LoadWatch


@dataclass
class Parts:
    """One world's parts. What the flavour makes is filled in while vLLM builds its connector.

    Attributes:
        copies: the worker's transfers: `waiting` tasks, of which `run(index)` runs one.
        threads: proof threads (kvsafe).
        spec: our spec, both halves of which share it (kvsafe).
        half: the scheduler half of the connector.
        manager: vLLM's manager (stock).
        store_keys: per store job that the worker has not seen yet, the key of each row (stock).
        eager: for how many steps tiers and copies go on between a step's schedule and its
            execution, as threads and streams do.
    """

    setting: Setting
    device: Device
    model: Model
    watch: LoadWatch
    keys: KeyBook
    counts: Counter[str]
    scripts: dict[str, Script]
    clock: Clock
    copies: Any = None
    tiers: list[HandTier] = field(default_factory=list)
    threads: HandThreads = field(default_factory=HandThreads)
    spec: Any = None
    half: Any = None
    manager: Any = None
    store_keys: dict[int, dict[int, bytes]] = field(default_factory=dict)
    eager: int = 0


_current: list[Parts] = []


def current() -> Parts:
    """The world that is being built or run."""
    return _current[-1]


@contextlib.contextmanager
def at_work(parts: Parts) -> Iterator[None]:
    """Make these the current parts."""
    _current.append(parts)
    try:
        yield
    finally:
        _current.pop()


def fresh(setting: Setting) -> Parts:
    """Empty memory, nothing built yet."""
    counts: Counter[str] = Counter()
    device = Device(setting.blocks)
    model = Model(device, setting, counts)
    scripts: dict[str, Script] = {}
    watch = LoadWatch(device, model, scripts, setting.windows, counts)
    return Parts(
        setting=setting,
        device=device,
        model=model,
        watch=watch,
        keys=KeyBook(setting.blocks_per_chunk),
        counts=counts,
        scripts=scripts,
        clock=Clock(),
    )

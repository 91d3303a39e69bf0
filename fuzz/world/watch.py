# SPDX-License-Identifier: Apache-2.0
"""The oracle's memory: which tokens a block hash stands for, and what a load has to bring."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fuzz.world.content import Numbers, Script
from fuzz.world.device import Device, Model
from fuzz.world.outcome import WrongWorld
from fuzz.world.plan import BLOCK_TOKENS


class _Demand(NamedTuple):
    req_id: str
    group: int
    number: int
    weights: int
    part: Numbers


class KeyBook:
    """What each block hash means, learnt from the requests that have it."""

    def __init__(self, blocks_per_chunk: int) -> None:
        self._span = blocks_per_chunk * BLOCK_TOKENS
        self._meaning: dict[bytes, tuple[Script, int]] = {}

    def learn(self, script: Script, hashes: list[bytes]) -> None:
        """Block `i` of these hashes ends `(i + 1) * BLOCK_TOKENS` tokens into the script."""
        for index in range(len(hashes) - 1, -1, -1):
            if hashes[index] in self._meaning:
                return
            self._meaning[hashes[index]] = script, (index + 1) * BLOCK_TOKENS

    def numbers(self, key: bytes, weights: int) -> Numbers | None:
        """What the chunk of this offload key must hold, or None if nobody has had the key."""
        found = self._meaning.get(key[:-4])
        if found is None:
            return None
        script, end = found
        return script.numbers(int.from_bytes(key[-4:], "big"), weights)[end - self._span : end]


def describe(held: Numbers, demand: "_Demand", scripts: Iterable[Script], weights: int) -> str:
    """What a wrong block holds, in words that do not depend on the request."""
    first = int(held[0])
    if first == 0:
        return "what was never written"
    for old in range(weights + 1):
        for script in scripts:
            for group in range(4):
                places = np.flatnonzero(script.numbers(group, old) == first)
                if not len(places):
                    continue
                if old != weights:
                    return "KV of old weights"
                if group != demand.group:
                    return "KV of another group"
                own = script.numbers(group, old)[int(places[0])] in demand.part
                return "a part of the right block" if own else "KV of another block"
    return "damaged bytes"


class LoadWatch:
    """Holds every block that a load has filled against what the request demands of it."""

    def __init__(
        self,
        device: Device,
        model: Model,
        scripts: dict[str, Script],
        windows: Sequence[int],
        counts: Counter[str],
    ) -> None:
        self._device = device
        self._model = model
        self._scripts = scripts
        self._windows = windows
        self._counts = counts
        self._demanded: dict[int, _Demand] = {}

    def expect(self, req_id: str, script: Script, flat: Any) -> None:
        """A load begins; `flat` is vLLM's list of the blocks that it has to fill."""
        weights = self._model.weights
        at = 0
        sizes = zip(flat.group_sizes, flat.block_indices, strict=True)
        for group, (size, first) in enumerate(sizes):
            numbers = script.numbers(group, weights)
            for offset, block in enumerate(flat.block_ids[at : at + size].tolist()):
                index = first + offset
                part = numbers[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                self._demanded[block] = _Demand(req_id, group, index, weights, part)
            at += size
        self._counts["load"] += 1
        self._counts["load_blocks"] += at

    def landed(self, blocks: list[int]) -> None:
        """A part of a load was copied. Raises `WrongWorld` unless it is what was demanded."""
        for block in blocks:
            demand = self._demanded.get(block)
            if demand is None:
                raise WrongWorld("wrong-load", f"block {block} was filled, no load was for it")
            if demand.weights != self._model.weights:
                continue
            self._counts["landed_blocks"] += 1
            held = self._device.numbers[block][: len(demand.part)]
            if not np.array_equal(held, demand.part):
                weights = self._model.weights
                what = describe(held, demand, self._scripts.values(), weights)
                kind = "window" if self._windows[demand.group] else "full"
                raise WrongWorld(
                    "wrong-load",
                    f"{demand.req_id}, {kind} group: block {block}, number {demand.number} of the "
                    f"request, was filled with {what}",
                )

# SPDX-License-Identifier: Apache-2.0
"""A plan: the shape of a world and what its driver does, as plain data that can be cut down.

A plan comes from a seed, from a line of JSON, or from any bytes (`raw`). Events carry small
numbers that are taken modulo what is there when they happen, so every plan is valid, and so is
every plan from which events were removed.
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

Draw = Callable[[int], int]
"""A number from 0 up to, but not including, the argument."""


class Event(NamedTuple):
    """One act of the driver: its name, and numbers whose meaning the name decides."""

    name: str
    a: int = 0
    b: int = 0
    c: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """The shape of a world.

    Attributes:
        windows: per KV-cache group its sliding window in tokens, 0 for full attention.
        blocks_per_chunk: blocks of one group under one key.
        rows: chunks that host memory holds.
        blocks: accelerator blocks, the null block included.
        policy: `lru` or `arc`.
        tiers: per secondary tier whether it asks for whole requests.
        budget: tokens per step.
        seats: requests that may run at a time.
        pipelined: async scheduling with two batches in flight.
        lagging: the worker executes a batch later than it is scheduled, as another process does.
        second_runner: what the scheduler says is meant for vLLM's second model runner.
        whole: offload decoded tokens too, not only the prompt.
        events: KV events are published.
        fail: `kv_load_failure_policy` is `fail` (kvsafe only: the stock half knows no failure).
        no_prefix_cache: the accelerator's prefix cache is off.
        new_weights: resets may come with new weights.
    """

    windows: tuple[int, ...] = (0,)
    blocks_per_chunk: int = 1
    rows: int = 4
    blocks: int = 24
    policy: str = "lru"
    tiers: tuple[bool, ...] = ()
    budget: int = 16
    seats: int = 4
    pipelined: bool = False
    lagging: bool = False
    second_runner: bool = False
    whole: bool = True
    events: bool = False
    fail: bool = False
    no_prefix_cache: bool = False
    new_weights: bool = False


BLOCK_TOKENS = 4
"""Tokens per block, in every world."""

_GROUPS = ((0,), (0,), (0, 8), (0, 6), (0, 12), (0, 16), (0, 5), (0, 8, 16), (8,), (16,), (0, 4))
_TIERS = ((), (False,), (False,), (True,), (False, False), (True, False))

# Name and weight. Resets, faults and what only kvsafe survives by design have tables of their
# own, so that a world can be calm: nothing is found in one that is reset at every turn.
WORK = {
    "step": 30,
    "arrive": 14,
    "copy": 14,
    "copy_one": 4,
    "tier_ok": 8,
    "go": 12,
    "idle": 3,
    "abort": 2,
    "abort_late": 1,
    "shrug": 2,
    "eager": 3,
    "execute": 3,
}
RESETS = {
    "reset_blocks": 3,
    "reset_running": 3,
    "reset_connector": 2,
    "reset_all": 2,
    "reset_twice": 1,
    "pause": 1,
}
FAULTS = {"tier_fail": 3, "tier_part": 2, "lose": 2, "kill": 1, "lie": 1}
# A theme of its own: resets of the connector while requests with sliding windows run.
OVERTAKEN = {
    "step": 40,
    "arrive": 12,
    "copy": 10,
    "go": 8,
    "idle": 1,
    "eager": 4,
    "execute": 2,
    "tier_ok": 4,
    "abort": 2,
    "reset_connector": 5,
    "reset_twice": 1,
    "reset_running": 1,
}
WINDOWED = ((8,), (0, 8), (0, 5), (0, 16), (8,), (0, 8, 16))
OURS = {"proofs": 10}
OUR_FAULTS = {
    "copy_fault": 2,
    "damage_row": 1,
    "damage_object": 2,
    "hang": 1,
    "mute": 1,
    "revive": 2,
    "clock": 2,
    "foreign_epoch": 1,
}
FLAVOURS = ("stock", "kvsafe")


@dataclass(frozen=True, slots=True)
class Plan:
    """A world and everything its driver does."""

    flavour: str
    setting: Setting
    events: tuple[Event, ...]

    def line(self) -> str:
        """One line of JSON that `read` takes back."""
        events = [[event.name, event.a, event.b, event.c] for event in self.events]
        return json.dumps([self.flavour, asdict(self.setting), events], separators=(",", ":"))

    def without(self, start: int, stop: int) -> "Plan":
        """The same plan with events `start` to `stop` removed."""
        return replace(self, events=self.events[:start] + self.events[stop:])

    def __str__(self) -> str:
        lines = [f"{self.flavour} {self.setting}"]
        lines += [f"  {index:3} {_said(event)}" for index, event in enumerate(self.events)]
        return "\n".join(lines)


def _said(event: Event) -> str:
    return f"{event.name} {event.a} {event.b} {event.c}"


def read(line: str) -> Plan:
    """A plan from its line. Raises `ValueError` for anything else."""
    try:
        flavour, shape, events = json.loads(line)
        shape["windows"], shape["tiers"] = tuple(shape["windows"]), tuple(shape["tiers"])
        setting = Setting(**shape)
        return Plan(flavour, setting, tuple(Event(*event) for event in events))
    except (TypeError, KeyError) as exc:
        raise ValueError(f"not a plan: {exc}") from exc


def from_seed(seed: int, flavour: str, length: int = 60) -> Plan:
    """The plan of a seed: about `length` events."""
    draw = random.Random(seed).randrange
    setting = setting_of(draw, flavour)
    overtaken = draw(5) == 0
    if overtaken:
        setting = windowed(setting, draw)
    count = length // 2 + draw(length)
    return Plan(flavour, setting, tuple(_events(draw, flavour, count, overtaken=overtaken)))


def windowed(setting: Setting, draw: Draw) -> Setting:
    """The same world with sliding windows and little memory."""
    windows = WINDOWED[draw(len(WINDOWED))]
    blocks = (8 + draw(8)) * len(windows)
    return replace(setting, windows=windows, blocks=blocks, rows=4 + draw(9))


def setting_of(draw: Draw, flavour: str) -> Setting:
    """Any world."""
    ours = flavour == "kvsafe"
    windows = _GROUPS[draw(len(_GROUPS))]
    per_chunk = (1, 1, 2, 2, 3)[draw(5)]
    tiers = _TIERS[draw(len(_TIERS))]
    return Setting(
        windows=windows,
        blocks_per_chunk=per_chunk,
        rows=2 + draw(9),
        blocks=(9 + draw(16)) * len(windows),
        policy=("lru", "arc")[draw(2)],
        tiers=tiers,
        budget=(8, 16, 16, 32)[draw(4)],
        seats=2 + draw(3),
        pipelined=draw(2) == 0,
        lagging=draw(3) == 0,
        second_runner=draw(2) == 0,
        whole=draw(3) > 0,
        events=draw(4) == 0,
        fail=ours and draw(6) == 0,
        no_prefix_cache=draw(10) == 0,
        # vLLM leaves secondary tiers as they are on a reset, and says so: with new weights
        # their chunks are stale. That is known and no news from here.
        new_weights=draw(3) == 0 and (ours or not tiers),
    )


def _events(draw: Draw, flavour: str, count: int, *, overtaken: bool) -> list[Event]:
    weights = dict(OVERTAKEN if overtaken else WORK)
    mood, ours = draw(8), flavour == "kvsafe"
    if ours:
        weights.update(OURS)
    if overtaken:
        mood = 4
    if mood % 2:
        weights.update(RESETS)
    elif mood == 2:
        weights["reset_blocks"] = 4
    if mood in (0, 1, 5):
        weights.update({**FAULTS, **(OUR_FAULTS if ours else {})})
    names = by_weight(weights)
    return [Event(names[draw(len(names))], draw(256), draw(256), draw(256)) for _ in range(count)]


def by_weight(weights: dict[str, int]) -> list[str]:
    """Every name as often as its weight says."""
    return [name for name, weight in weights.items() for _ in range(weight)]

# SPDX-License-Identifier: Apache-2.0
"""Any bytes as a plan: the first bytes choose a theme and two seeds, the rest changes single acts.

Read front to back as choices, bytes by chance make worlds in which next to nothing happens: a
damaged object needs a tier that holds one, and a request that comes back for it. So dice draw a
whole story of the theme, with short phrases in which such things happen one after the other, and
every five bytes behind the first six put another act in the place of one of the story's. What is
left out or made zero keeps the rest of the story as it is.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fuzz.world.plan import (
    OUR_FAULTS,
    OURS,
    OVERTAKEN,
    RESETS,
    WORK,
    Event,
    Plan,
    Setting,
    by_weight,
    setting_of,
    windowed,
)

HEAD_BYTES = 6
ACT_BYTES = 5
_LEAST_ACTS = 16
_MORE_ACTS = 64
# What every story begins with: chunks in rows and tiers, and nothing of them in the accelerator.
_OPENING = ("arrive", "go", "arrive", "go", "idle")


@dataclass(frozen=True, slots=True)
class Theme:
    """What a story is about.

    Attributes:
        weights: acts by weight, beside the daily work.
        phrases: acts that come one after the other.
        tiers: tiers to choose from; empty: any that a world may have.
        overtaken: sliding windows, and the work of `OVERTAKEN` instead of the daily one.
    """

    weights: dict[str, int]
    phrases: tuple[tuple[str, ...], ...]
    tiers: tuple[tuple[bool, ...], ...] = ()
    overtaken: bool = False


_ONE_OR_TWO = ((False,), (True,), (False, False), (True, False))
_BAD_TIERS = {
    "tier_fail": 4, "tier_part": 4, "lose": 3, "lie": 2, "mute": 2, "hang": 2, "revive": 4,
    "clock": 3, "shrug": 3,
}  # fmt: skip
_COMES_BACK = ("idle", "arrive", "go")
_STORES = ("arrive", "step", "step", "step")
_CASCADES = (*_STORES, "copy", "copy", "step", "proofs", "step")
_DAMAGE_PHRASES = (
    ("damage_object", *_COMES_BACK),
    ("damage_object", "damage_object", *_COMES_BACK),
    ("damage_row", *_COMES_BACK),
    ("idle", "arrive", "step", "damage_row", "copy", "step"),
    (*_STORES, "copy_fault", "step", "proofs"),
    ("idle", "arrive", "step", "copy_fault", "step", "copy_fault", "step"),
    ("foreign_epoch", *_COMES_BACK),
)
_TIER_PHRASES = (
    ("idle", "arrive", "step", "tier_fail", "step", "proofs"),
    ("idle", "arrive", "step", "tier_part", "proofs", "step"),
    (*_CASCADES, "tier_fail", "step"),
    ("lie", *_COMES_BACK, "revive"),
    ("lose", "lose", "idle", "arrive", "step", "tier_ok"),
    ("idle", "arrive", "step", "lose", "tier_ok", "step"),
    ("mute", "arrive", "step", "step", "clock", "clock", "step", "revive"),
    ("idle", "arrive", "step", "hang", "clock", "clock", "step", "revive", "step"),
    (*_CASCADES, "hang", "clock", "clock", "step", "revive"),
)
_KILL_PHRASES = (
    ("kill", *_COMES_BACK, "revive"),
    ("idle", "arrive", "step", "kill", "tier_ok", "step", "proofs", "step", "revive"),
    (*_CASCADES, "kill", "tier_ok", "step", "revive"),
    ("idle", "arrive", "step", "abort", "copy", "step"),
    ("idle", "arrive", "step", "hang", "abort", "step", "revive"),
    ("arrive", "step", "pause", "arrive", "go"),
)
_RESET_PHRASES = (
    ("idle", "arrive", "step", "reset_connector", "step", "copy"),
    ("arrive", "step", "reset_running", "step", "copy"),
    ("arrive", "step", "copy", "step", "reset_all", "arrive", "go"),
    ("idle", "arrive", "step", "reset_twice", "step"),
    ("arrive", "step", "step", "pause", "arrive", "step"),
)
THEMES = {
    "calm": Theme({}, (_COMES_BACK,)),
    "resets": Theme(RESETS, _RESET_PHRASES),
    "damage": Theme(
        {"copy_fault": 4, "damage_row": 3, "damage_object": 6, "foreign_epoch": 1},
        _DAMAGE_PHRASES,
        _ONE_OR_TWO,
    ),
    "tiers": Theme(_BAD_TIERS, _TIER_PHRASES, _ONE_OR_TWO),
    "kills": Theme(
        {"kill": 6, "hang": 2, "revive": 6, "abort": 4, "abort_late": 3, "pause": 1, "clock": 2},
        _KILL_PHRASES,
        _ONE_OR_TWO,
    ),
    "overtaken": Theme({}, _RESET_PHRASES[:2], overtaken=True),
}
_ALONE = tuple((name,) for name in THEMES)
_TOGETHER = (
    ("damage", "tiers"),
    ("damage", "kills"),
    ("damage", "resets"),
    ("tiers", "kills"),
    ("tiers", "resets"),
    ("kills", "resets"),
    ("damage", "tiers", "kills"),
    ("resets", "damage", "tiers", "kills"),
)
MIXES = (*_ALONE, *_TOGETHER, ("calm",), ("resets", "damage", "tiers", "kills"))
"""What the first byte chooses from: themes that one story has at the same time."""


def from_bytes(data: bytes, flavour: str) -> Plan:
    """The plan that any bytes stand for; no bytes are a world in which nothing is done."""
    head = data[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0")
    theme = _mixed(MIXES[head[0] % len(MIXES)])
    setting = _setting(theme, random.Random(int.from_bytes(head[2:4], "little")), flavour)
    known = _known(theme, flavour)
    dice = random.Random(int.from_bytes(head[4:6], "little"))
    count = _LEAST_ACTS + head[1] % _MORE_ACTS if data else 0
    story = _story(theme, known, dice, count)
    names = by_weight(known)
    # Most places are behind the end of the story, so bytes by chance leave most of it standing.
    for start in range(HEAD_BYTES, len(data) - ACT_BYTES + 1, ACT_BYTES):
        at, name, a, b, c = data[start : start + ACT_BYTES]
        if at < count:
            story[at] = Event(names[name % len(names)], a, b, c)
    return Plan(flavour, setting, tuple(story))


def _mixed(names: tuple[str, ...]) -> Theme:
    themes = [THEMES[name] for name in names]
    return Theme(
        {name: weight for theme in themes for name, weight in theme.weights.items()},
        tuple(phrase for theme in themes for phrase in theme.phrases),
        tuple(tiers for theme in themes for tiers in theme.tiers),
        any(theme.overtaken for theme in themes),
    )


def _setting(theme: Theme, dice: random.Random, flavour: str) -> Setting:
    setting = setting_of(dice.randrange, flavour)
    if theme.overtaken:
        return windowed(setting, dice.randrange)
    if not theme.tiers:
        return setting
    # Some requests fit into the rows, all do not: what one wants again may come from a tier.
    rows = (3 + dice.randrange(6)) * len(setting.windows)
    setting = replace(setting, tiers=dice.choice(theme.tiers), rows=rows)
    # Stock's tiers keep what old weights made, and vLLM says so.
    return setting if flavour == "kvsafe" else replace(setting, new_weights=False)


def _known(theme: Theme, flavour: str) -> dict[str, int]:
    """The acts of a theme that this flavour knows, by weight."""
    weights = {**(OVERTAKEN if theme.overtaken else WORK), **theme.weights}
    if flavour == "kvsafe":
        return {**weights, **OURS}
    return {name: weight for name, weight in weights.items() if name not in OUR_FAULTS}


def _story(theme: Theme, known: dict[str, int], dice: random.Random, count: int) -> list[Event]:
    told = [name for name in _told(theme, known, dice, count) if name in known]
    return [_event(name, dice) for name in told[:count]]


def _event(name: str, dice: random.Random) -> Event:
    # Short prompts: a long one evicts its own beginning.
    a = 6 + dice.randrange(34) if name == "arrive" else dice.randrange(256)
    return Event(name, a, dice.randrange(256), dice.randrange(256))


def _told(theme: Theme, known: dict[str, int], dice: random.Random, count: int) -> Iterator[str]:
    """Names, `count` at least of those that are known: single ones and phrases."""
    yield from _OPENING
    names = by_weight(known)
    for _ in range(count):
        yield dice.choice(names)
        if dice.randrange(3) == 0:
            yield from dice.choice(theme.phrases)

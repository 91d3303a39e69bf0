# SPDX-License-Identifier: Apache-2.0
"""The monitor by hand: each thing that a tier may do wrong, and the law that it breaks."""

from __future__ import annotations

from typing import Any

import pytest

from kvsafe.lifecycle import monitor as module
from kvsafe.lifecycle.monitor import HIT, MISS, WAIT, Divergence, Monitor

Word = tuple[Any, ...]

EPOCH = 7
OFFER: list[Word] = [
    ("begin_offer", "a"),
    ("allocated", ("a",), (0,), EPOCH),
    ("end_offer", True),
]
SEALED: list[Word] = [*OFFER, ("proven", "a")]
READY: list[Word] = [*SEALED, ("readied", ("a",))]
READ: list[Word] = [*READY, ("pinned", ("a",), (1,))]
HIDDEN: list[Word] = [*READ, ("withdrawn", "a")]
EVICTED: list[Word] = [("begin_offer", "b"), ("freed", 0), ("end_offer", True)]


def told(words: list[Word]) -> Monitor:
    """A monitor of three rows that heard these words."""
    monitor = Monitor(3)
    for name, *parts in words:
        getattr(monitor, name)(*parts)
    return monitor


SOUND: dict[str, list[Word]] = {
    "a store": [*OFFER, ("counted", 0, 1, 2, ())],
    "sealed": [*SEALED, ("counted", 0, 1, 2, ())],
    "ready": [*READY, ("counted", 1, 0, 2, ())],
    "read": [*READ, ("counted", 0, 0, 2, ())],
    "read twice": [*READ, ("pinned", ("a",), (2,)), ("counted", 0, 0, 2, ())],
    "three readers": [
        *READ,
        ("pinned", ("a", "a"), (2, 3)),
        ("unpinned", ("a", "a"), (2, 1)),
        ("counted", 0, 0, 2, ()),
    ],
    "read and done": [*READ, ("unpinned", ("a",), (0,)), ("counted", 1, 0, 2, ())],
    "evicted": [*READY, *EVICTED, ("counted", 0, 0, 3, ())],
    "failed": [
        *OFFER,
        ("begin_failure", "a"),
        ("freed", 0),
        ("end_failure",),
        ("counted", 0, 0, 3, ()),
    ],
    "seal failed": [*SEALED, ("begin_failure", "a"), ("freed", 0), ("counted", 0, 0, 3, ())],
    "hidden": [*HIDDEN, ("counted", 0, 0, 2, ())],
    "hidden and gone": [
        *HIDDEN,
        ("unpinned", ("a",), (None,)),
        ("freed", 0),
        ("counted", 0, 0, 3, ()),
    ],
    "withdrawn twice": [*HIDDEN, ("withdrawn", "a")],
    "nobody knows it": [("withdrawn", "x"), ("proven", "x"), ("readied", ("x",))],
    "given again": [*READY, *EVICTED, *OFFER, ("counted", 0, 1, 2, ())],
    "two rows": [
        ("allocated", ("a", "b"), (0, 2), EPOCH),
        ("counted", 0, 2, 1, ()),
    ],
    "retired": [*READY, ("counted", 1, 0, 1, (0, 2))],
    "no room": [*READY, ("begin_offer", "b"), ("end_offer", False)],
    "an offer that began before": [("end_offer", False)],
    "answers": [
        ("answered", "a", MISS, EPOCH),
        *OFFER,
        ("answered", "a", WAIT, EPOCH),
        ("answered", "a", MISS, EPOCH),
        ("answered", "a", WAIT, EPOCH + 1),
        *READY[3:],
        ("answered", "a", HIT, EPOCH),
        ("answered", "a", MISS, EPOCH),
        ("answered", "a", MISS, EPOCH + 1),
    ],
    "reset": [*READ, ("reset",), ("counted", 0, 0, 3, ()), *OFFER, ("counted", 0, 1, 2, ())],
}


@pytest.mark.parametrize("name", SOUND)
def test_what_the_machine_does_is_no_divergence(name: str) -> None:
    monitor = told(SOUND[name])
    assert monitor.found == []
    assert monitor.divergences == 0


WRONG: dict[str, tuple[list[Word], str, str, str]] = {
    "a row of nobody": (
        [("freed", 1)],
        "rows have one owner",
        "a row in use",
        "one that nobody owned",
    ),
    "its own input": (
        [*READY, ("begin_offer", "ab"), ("freed", 0)],
        "own input is never evicted",
        "kept",
        "evicted",
    ),
    "evicted while read": (
        [*READ, ("freed", 0)],
        "pinned is never evicted",
        "kept",
        "stage 2, pins 1: row freed",
    ),
    "evicted while written": (
        [*OFFER, ("freed", 0)],
        "only what is idle is evicted",
        "kept",
        "stage 0, pins 0: row freed",
    ),
    "evicted after the failure": (
        [*OFFER, ("begin_failure", "a"), ("end_failure",), ("freed", 0)],
        "only what is idle is evicted",
        "kept",
        "stage 0, pins 0: row freed",
    ),
    "a failure of what is ready": (
        [*READY, ("begin_failure", "a"), ("freed", 0)],
        "only what is idle is evicted",
        "kept",
        "stage 2, pins 0: row freed",
    ),
    "hidden and read": (
        [*HIDDEN, ("freed", 0)],
        "pinned is never evicted",
        "kept",
        "stage 3, pins 1: row freed",
    ),
    "half an eviction": (
        [*READY, ("begin_offer", "bc"), ("freed", 0), ("end_offer", False)],
        "a failed eviction changes nothing",
        "no chunk gone",
        "1",
    ),
    "a second write": (
        [*OFFER, ("allocated", ("a",), (1,), EPOCH)],
        "one write per key",
        "one chunk",
        "another row for the same key",
    ),
    "a row given twice": (
        [*OFFER, ("allocated", ("b",), (0,), EPOCH)],
        "rows have one owner",
        "one",
        "a row given twice",
    ),
    "ready unproven": (
        [*OFFER, ("readied", ("a",))],
        "sealed or proven before ready",
        "not ready",
        "stage 0 made ready",
    ),
    "ready twice": (
        [*READY, ("readied", ("a",))],
        "sealed or proven before ready",
        "not ready",
        "stage 2 made ready",
    ),
    "a reader of nothing": (
        [("pinned", ("a",), (1,))],
        "only ready is read",
        "no chunk",
        "a reader",
    ),
    "a reader of what is written": (
        [*SEALED, ("pinned", ("a",), (1,))],
        "only ready is read",
        "nobody reads it",
        "stage 1 is read",
    ),
    "a reader of what is hidden": (
        [*HIDDEN, ("pinned", ("a",), (2,))],
        "only ready is read",
        "nobody reads it",
        "stage 3 is read",
    ),
    "another refcount": ([*READY, ("pinned", ("a",), (2,))], "pins equal readers", "1", "2"),
    "another refcount at the end": (
        [*READ, ("unpinned", ("a",), (1,))],
        "pins equal readers",
        "0",
        "1",
    ),
    "an end of nothing": (
        [("unpinned", ("a",), (0,))],
        "pins equal readers",
        "no chunk",
        "a reader less",
    ),
    "an end too many": (
        [*READY, ("unpinned", ("a",), (0,))],
        "refcounts keep their floor",
        "no reader to end",
        "one ended",
    ),
    "hidden while idle": (
        [*READY, ("withdrawn", "a")],
        "what is refused is withdrawn",
        "gone or hidden",
        "hidden while idle",
    ),
    "hidden while written": (
        [*OFFER, ("withdrawn", "a")],
        "what is refused is withdrawn",
        "gone or hidden",
        "hidden while idle",
    ),
    "a hit of nothing": ([("answered", "a", HIT, EPOCH)], "only ready is offered", MISS, HIT),
    "a wait for nothing": ([("answered", "a", WAIT, EPOCH)], "only ready is offered", MISS, WAIT),
    "a hit of what is written": (
        [*SEALED, ("answered", "a", HIT, EPOCH)],
        "only ready is offered",
        WAIT,
        HIT,
    ),
    "a wait for what is ready": (
        [*READY, ("answered", "a", WAIT, EPOCH)],
        "only ready is offered",
        HIT,
        WAIT,
    ),
    "a hit of what is hidden": (
        [*HIDDEN, ("answered", "a", HIT, EPOCH)],
        "only ready is offered",
        MISS,
        HIT,
    ),
    "a hit of another epoch": (
        [*READY, ("answered", "a", HIT, EPOCH + 1)],
        "revoked is never served",
        MISS,
        HIT,
    ),
    "one too many is evictable": (
        [*READY, ("counted", 2, 0, 2, ())],
        "counts equal recount",
        "(1, 0, 2)",
        "(2, 0, 2)",
    ),
    "one too many is pending": (
        [*READY, ("counted", 1, 1, 2, ())],
        "counts equal recount",
        "(1, 0, 2)",
        "(1, 1, 2)",
    ),
    "a row is missing": (
        [*READY, ("counted", 1, 0, 1, (0,))],
        "counts equal recount",
        "(1, 0, 2)",
        "(1, 0, 1)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_step_breaks_its_law(name: str) -> None:
    words, law, expected, found = WRONG[name]
    assert told(words[:-1]).found == []
    monitor = told(words)
    assert monitor.take_found() == [Divergence(law, expected, found)]
    assert monitor.divergences == 1
    text = str(Divergence(law, expected, found))
    assert text == f"{law}: the machine says {expected}, the tier did {found}"


# After these the monitor knows no more what the tier holds.
_BLINDING = (
    "own input is never evicted",
    "pinned is never evicted",
    "only what is idle is evicted",
    "sealed or proven before ready",
    "refcounts keep their floor",
    "what is refused is withdrawn",
    "revoked is never served",
)


@pytest.mark.parametrize("name", WRONG)
def test_after_a_divergence_nothing_follows_from_it(name: str) -> None:
    """One fault is told once; what it leaves is unknown, until the tier starts anew."""
    words, law, _, _ = WRONG[name]
    after: list[Word] = [("counted", 9, 9, 9, ()), ("pinned", ("a",), (5,))]
    if law in _BLINDING:
        assert told([*words, *after]).divergences == 1
    fresh = told([*words, ("reset",), *READY, ("counted", 1, 0, 2, ())])
    assert fresh.divergences == 1
    assert told([*words, ("reset",), ("freed", 0)]).divergences == 2


def test_the_steps_are_those_of_the_machine() -> None:
    """By stage (pending, proven, offered, hidden) and pins (none, one, more)."""
    gone, keep = (-1, 0), (3, 0)
    never = (None, None, None)
    steps = module._STEPS
    assert steps.pin == (never, never, ((2, 1),) * 3, never)
    unpinned = [(None, (stage, -1), (stage, -1)) for stage in (2, 3)]
    assert steps.unpin == (never, never, *unpinned)
    assert steps.ready == (never, ((2, 0), None, None), never, never)
    assert steps.evict == (never, never, (gone, None, None), never)
    assert steps.fail == ((gone, None, None), (gone, None, None), never, never)
    assert steps.withdraw == (never, never, (gone, keep, keep), (None, keep, keep))
    assert steps.answers == (WAIT, WAIT, HIT, MISS)


def test_the_stages_are_numbered_as_the_laws_say_them() -> None:
    assert (module.PENDING, module.PROVEN, module.OFFERED, module.HIDDEN) == (0, 1, 2, 3)


@pytest.mark.parametrize("pins", [3, 4])
def test_many_readers_are_many(pins: int) -> None:
    words = [*READY, *(("pinned", ("a",), (count,)) for count in range(1, pins + 1))]
    down = [("unpinned", ("a",), (count,)) for count in reversed(range(pins))]
    assert told([*words, *down, ("counted", 1, 0, 2, ())]).found == []
    assert told([*words, ("freed", 0)]).divergences == 1
    hidden = told([*words, ("withdrawn", "a"), *down[:-1], ("counted", 0, 0, 2, ())])
    assert hidden.found == []

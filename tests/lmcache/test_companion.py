# SPDX-License-Identifier: Apache-2.0
"""Companions: made for one chunk under one set of names by a holder of the key, or refused."""

import pytest

from kvsafe.lmcache.companion import TAIL_BYTES, Companions, Part
from kvsafe.seal.refusal import RefusalKind
from kvsafe.seal.suites import Suite
from tests.seal.rows import OLD_SECRET, OTHER_KEY, SECRET, World

PARTS: list[Part] = [("model@2@0@ff@bfloat16", 4096), ("model@2@1@ff@bfloat16", 4096)]
SUITES = list(Suite)


def companions(world: World) -> Companions:
    """The companions of a world."""
    return Companions(world.suite, world.keyring, world.layout.header_bytes)


def header(world: World, key: bytes | None = None) -> memoryview:
    """The header of a row that was sealed there."""
    row = world.chunk() if key is None else world.chunk(key)
    return memoryview(row)[: world.layout.header_bytes]


def kind(made: bytes | bytearray, world: World, parts: list[Part]) -> RefusalKind | None:
    """What is refused, if anything is."""
    refusal = companions(world).judge(memoryview(made), parts)
    return None if refusal is None else refusal.kind


@pytest.mark.parametrize("suite", SUITES)
def test_one_is_taken_for_what_it_was_made_for_and_holds_the_header(suite: Suite) -> None:
    world = World(suite)
    sealed = header(world)
    made = companions(world).make(sealed, PARTS)
    assert len(made) == companions(world).length == world.layout.header_bytes + TAIL_BYTES
    assert made.startswith(bytes(sealed))
    assert kind(made, world, PARTS) is None


@pytest.mark.parametrize(
    "parts",
    [
        PARTS[:1],
        PARTS[::-1],
        [*PARTS, PARTS[0]],
        [(PARTS[0][0], 4095), PARTS[1]],
        [("model@2@0@fe@bfloat16", 4096), PARTS[1]],
        [],
    ],
)
def test_for_other_parts_it_is_refused(parts: list[Part]) -> None:
    world = World()
    made = companions(world).make(header(world), PARTS)
    assert kind(made, world, parts) is RefusalKind.PEER_COMPANION


@pytest.mark.parametrize("suite", SUITES)
def test_every_flipped_bit_of_the_tail_is_seen(suite: Suite) -> None:
    world = World(suite)
    made = companions(world).make(header(world), PARTS)
    for at in range(8 * (len(made) - TAIL_BYTES), 8 * len(made)):
        bad = bytearray(made)
        bad[at // 8] ^= 1 << at % 8
        assert kind(bad, world, PARTS) is RefusalKind.PEER_COMPANION


def test_the_tail_of_one_chunk_does_not_fit_the_header_of_another() -> None:
    world = World()
    one = companions(world).make(header(world), PARTS)
    other = companions(world).make(header(world, OTHER_KEY), PARTS)
    mixed = other[:-TAIL_BYTES] + one[-TAIL_BYTES:]
    assert kind(mixed, world, PARTS) is RefusalKind.PEER_COMPANION


def test_keys_and_lengths() -> None:
    world = World()
    made = companions(world).make(header(world), PARTS)
    stranger = World(secrets=(OLD_SECRET,))
    assert kind(made, stranger, PARTS) is RefusalKind.KEY_ID
    rotated = World(secrets=(OLD_SECRET, SECRET))
    assert kind(made, rotated, PARTS) is None
    for wrong in (made[:-1], made + b"\0", b""):
        assert kind(wrong, world, PARTS) is RefusalKind.PEER_COMPANION
    with pytest.raises(ValueError, match="no sealed header"):
        companions(world).make(memoryview(bytes(world.layout.header_bytes)), PARTS)

# SPDX-License-Identifier: Apache-2.0
"""LMCache's key texts, object keys, frames and companions: one text for one key, both ways."""

from __future__ import annotations

from fuzz.chunks import EPOCH, KEY, Engine, engines, sealed
from fuzz.target import ByteSource, Target, demand
from kvsafe.lmcache import frames, keys, objectkeys
from kvsafe.lmcache.companion import TAIL_BYTES, Companions
from kvsafe.seal.refusal import Refusal

_PARTS = (
    "m", "a/b", "@", "%", " ", "1", "0", "-1", "00", "ff", "FF", "half", "é", "", "x" * 140, "t%v",
    "u%w", "t%", "1%2", "m ", " m", "01", "0001", "AB" * 32, "ab" * 32, "00000000",
)  # fmt: skip
_MODELS = ("m", "org/model-7b", "a b", " a", "a ", "a@b", "a%b", "é", "", "x" * 140, "1")
_TAGS = ("t", "u", "a b", "a@b", "a%b", "", "7", "é")
_NUMBERS = (0, 1, 7, -1, 10**9 - 1, 10**9, 1 << 70)


class LmKeys(Target):
    """Key texts that a peer could take for another key.

    Oracles: a text that is taken is the one text of its key; a key that passes its check reads
    back as itself, so no two keys share a text; a companion is taken only for the header and
    the names that it was made for.
    """

    name = "lmkeys"
    max_len = 400
    memory_mib = 64

    def once(self, data: bytes) -> None:
        source = ByteSource(data)
        ways = (_text, _key, _object_text, _object, _tags, _frames, _companion)
        ways[source.below(len(ways))](source)

    def seeds(self) -> list[bytes]:
        text = b"m@1@0@ff@half@3@t%v"
        thing = b"m@01000100@0@" + b"ab" * 32 + b"@s"
        plain = bytes((3 * n) % 256 for n in range(60))
        return [
            bytes([0, 0]) + text, bytes([2, 0]) + thing,
            *(bytes([way]) + plain for way in range(7)),
            bytes([5]) + bytes(190), bytes([6]) + bytes(20),
        ]  # fmt: skip


def _any_text(source: ByteSource, good: tuple[str, ...]) -> str:
    """Any text, or a good one with a few of its parts changed, left out or doubled."""
    if source.below(4) == 3:
        return source.rest().decode("utf-8", "replace")
    parts = list(good)
    for _ in range(source.below(4)):
        at, part = source.below(len(parts) + 1), source.pick(_PARTS)
        parts[at : at + source.below(3)] = [part]
    return "@".join(parts)


def _text(source: ByteSource) -> None:
    model = source.pick(("m", "org/model", "x" * 140))
    text = _any_text(source, (model, "1", "0", "ff", "half", "3", "t%v")[: source.between(5, 7)])
    key = keys.parse_key(text)
    if isinstance(key, Refusal):
        return
    demand(key.text() == text, "a second text of one key", "accepted")
    demand(key.check() is None, "a key that its own check refuses", "accepted")
    demand(len(text.encode()) <= 150, "a key that a server would cut", "accepted")


def _key(source: ByteSource) -> None:
    """A key from its parts."""
    tags = tuple(
        (source.pick(_TAGS), source.pick(_TAGS)) for _ in range(source.pick((0, 0, 1, 2, 3, 17)))
    )
    layer = source.pick((None, *_NUMBERS)) if source.flag() else None
    dtype = source.pick((*keys.DTYPES, "float16", ""))
    number = source.number(64) if source.flag() else source.pick(_NUMBERS)
    key = keys.CacheKey(
        source.pick(_MODELS), source.pick(_NUMBERS[:3]), source.pick(_NUMBERS),
        -number if source.flag() else number, dtype, layer, tags,
    )  # fmt: skip
    if key.check() is None:
        demand(keys.parse_key(key.text()) == key, "a key that reads back as another", "accepted")


def _object_text(source: ByteSource) -> None:
    text = _any_text(source, ("m", "01000100", "0", "ab" * 32, "s")[: source.between(4, 5)])
    key = objectkeys.parse_object_key(text)
    if isinstance(key, Refusal):
        return
    demand(key.text() == text, "a second text of one object key", "accepted")
    demand(key.check() is None, "an object key that its own check refuses", "accepted")


def _object(source: ByteSource) -> None:
    digest = source.raw(source.pick((32, 32, 32, 31, 33)))
    key = objectkeys.ObjectKey(
        source.pick(_MODELS),
        source.pick(_NUMBERS),
        source.pick(_NUMBERS),
        digest,
        source.pick(_TAGS),
    )
    if key.check() is None:
        again = objectkeys.parse_object_key(key.text())
        demand(again == key, "an object key that reads back as another", "accepted")


def _tags(source: ByteSource) -> None:
    """Tags out of a request's parameters."""
    params: dict[str, object] = {}
    for _ in range(source.below(5)):
        name = source.pick(("lmcache.tag.", "lmcache.tag", "x")) + source.pick(_TAGS)
        params[name] = source.pick((*_TAGS, 1, None))
    found = keys.request_tags(params)
    if isinstance(found, Refusal):
        return
    asked = [name for name in params if name.startswith("lmcache.tag.")]
    demand(len(found) == len(asked), "another number of tags than was asked for", "accepted")
    key = keys.CacheKey("m", 1, 0, 1, "half", None, found)
    if key.check() is None:
        demand(keys.parse_key(key.text()) == key, "tags that read back as others", "accepted")


def _frames(source: ByteSource) -> None:
    """Requests and replies as bytes, read and written again."""
    raw = source.raw(186)
    request = frames.decode_request(raw)
    if isinstance(request, frames.Request) and keys.check_length(request.key) is None:
        again = frames.decode_request(request.encode())
        demand(again == request, "a request that reads back as another")
    reply = frames.decode_reply(source.raw(36))
    demand(frames.decode_reply(reply.encode()) == reply, "a reply that reads back as another")


def _companion(source: ByteSource) -> None:
    """A companion with its header or tail edited, for the names asked for or for others."""
    number = source.below(3)
    engine = engines()[number]
    made = Companions(engine.suite, engine.keyring, engine.layout.header_bytes)
    header = memoryview(sealed(number, 0))[: engine.layout.header_bytes]
    parts = (("a", 1), ("b", 2))
    entry = bytearray(made.make(header, parts))
    start = bytes(entry)
    for _ in range(source.below(3)):
        at = source.pick((source.below(144), len(entry) - 1 - source.below(TAIL_BYTES + 40)))
        entry[at] ^= 1 << source.below(8)
    asked = source.pick((parts, parts[:1], (("a", 1), ("b", 3)), (("a", 1), ("c", 2)), parts[::-1]))
    refusal = made.judge(memoryview(entry), asked)
    right = bytes(entry) == start and asked == parts
    if right:
        demand(refusal is None, "a companion for its own names was refused")
    elif refusal is None:
        demand(asked == parts, "a companion of other names", "accepted")
        demand(_unopened(engine, entry, number), "a header that was edited", "accepted")


def _unopened(engine: Engine, entry: bytearray, number: int) -> bool:
    """A companion says nothing of the header but its tag: with the payload it must not open."""
    size = engine.layout.header_bytes
    row = entry[:size] + sealed(number, 0)[size:]
    answer = engine.opener.open(memoryview(row), KEY, EPOCH)
    return isinstance(answer, Refusal) or bytes(row) == sealed(number, 0)

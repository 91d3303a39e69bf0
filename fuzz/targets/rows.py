# SPDX-License-Identifier: Apache-2.0
"""Whole rows: valid chunks, edited, with tags recomputed, so that the search gets behind them."""

from __future__ import annotations

from functools import cache

from conformance.reader.chunk_reader import judge
from fuzz.chunks import (
    EPOCH,
    FIXED,
    GENERATION,
    KEY,
    RECORD,
    VARIANTS,
    Engine,
    engines,
    sealed,
)
from fuzz.target import ByteSource, Finding, Target, demand
from kvsafe.seal import header, sealing
from kvsafe.seal.batch import BatchOpener, batch_opener
from kvsafe.seal.header import Header
from kvsafe.seal.opening import Expectation
from kvsafe.seal.refusal import Refusal

_NAMES = tuple(FIXED)
_PARTS = tuple(RECORD)
_ROW_LIMIT = (1 << 20) + 16384
HEADER, SLICES = 2, 6
"""Of eight ways to treat tags: from the first on headers are tagged anew, from the other slices."""


class Rows(Target):
    """`open()` over rows: opened are exactly the rows that were sealed, for who may have them.

    Four oracles: what is opened equals what was sealed but for `sealed_at`, which decides
    nothing; the independent reader of `conformance/` gives the same number; a row that was
    sealed for this question opens; and where rows are opened in batches, C says yes to exactly
    those that are opened, cover all slots and have the active key.
    """

    name = "rows"
    max_len = 256
    memory_mib = 128

    def __init__(self) -> None:
        for number in range(len(engines())):
            for variant in range(VARIANTS):
                sealed(number, variant)
            quick(number)

    def once(self, data: bytes) -> None:
        source = ByteSource(data)
        number = source.below(len(engines()))
        engine = engines()[number]
        if source.rarely():
            _reuse(source, engine)
            return
        question = _question(source, engine)
        row = bytearray(sealed(number, source.pick((0, 0, 0, 0, 1, 2, 3, 4, 5))))
        start = bytes(row)
        for _ in range(source.below(5)):
            edit(source, number, row)
        tags = source.below(8)
        if tags >= SLICES:
            engine.retag_slices(row, source.below(2))
        if tags >= HEADER:
            engine.retag_header(row, source.pick((0, 0, 0, 1, 2)))
        _ask(engine, row, start, question, tags)

    def seeds(self) -> list[bytes]:
        found = [bytes([engine, 0, 0, 0, 0]) for engine in range(len(engines()))]
        for kind in range(9):
            found.append(bytes([kind, 0, 0, 0, 0, 1, kind, 9, 9, 9, 9, 9, 3]))
        return [*found, bytes([0, 15, 3, 1, 4, 1, 5, 9, 2, 6])]


def _question(source: ByteSource, engine: Engine) -> tuple[bytes, int, tuple[int, ...]]:
    """Key, epoch and wanted slots: mostly those of the chunk."""
    what = source.raw(1)[0]
    key = KEY
    if what & 7 == 7:
        key = source.pick(
            (KEY[:-1], KEY + b"\0", KEY[:1], KEY[::-1], KEY[:-5] + b"\xff" + KEY[-4:])
        )
    epoch = source.pick((EPOCH - 1, EPOCH + 1, 0, (1 << 64) - 1)) if what & 56 == 56 else EPOCH
    wanted: tuple[int, ...] = ()
    if what & 64:
        span = engine.slots + 2
        wanted = tuple(source.below(span) - (what >> 7) for _ in range(source.below(4)))
    return key, epoch, wanted


def edit(source: ByteSource, number: int, row: bytearray) -> None:
    """One change to the row."""
    engine, kind = engines()[number], source.below(9)
    if kind == 0:
        name = source.pick(_NAMES)
        at, length = FIXED[name]
        _put(row, at, _value(source, length))
    elif kind == 1:
        at, length = RECORD[source.pick(_PARTS)]
        start = engine.record_at(source.below(len(engine.slices)))
        _put(row, start + at, _value(source, length))
    elif kind == 2:
        start = engine.places()[source.pick(tuple(engine.places()))]
        _put(row, start + source.below(48), source.some(16) or b"\1")
    elif kind == 3:
        _put(row, source.below(max(1, len(row))), source.some(16) or b"\1")
    elif kind == 4:
        other = sealed(number, source.below(VARIANTS))
        _splice(source, engine, row, other)
    elif kind == 5:
        _resize(source, row)
    elif kind == 6:
        _other_document(source, engine, row)
    elif kind == 7:
        _two_records(source, engine, row)
    elif row:
        at = source.below(len(row))
        row[at] ^= 1 << source.below(8)


def _put(row: bytearray, at: int, data: bytes) -> None:
    data = data[: max(0, len(row) - at)]
    row[at : at + len(data)] = data


def _value(source: ByteSource, length: int) -> bytes:
    if length in (2, 4, 8):
        return source.number(8 * length).to_bytes(length, "little")
    return source.raw(length)


def _splice(source: ByteSource, engine: Engine, row: bytearray, other: bytes) -> None:
    """A whole part of another sealed chunk of the same engine."""
    places = [*engine.places().values(), len(other)]
    first = source.below(len(places) - 1)
    last = first + 1 + source.below(len(places) - 1 - first)
    start, end = places[first], max(places[first], places[last])
    _put(row, start, other[start:end])


def _resize(source: ByteSource, row: bytearray) -> None:
    size = min(source.number(32), _ROW_LIMIT) if source.flag() else len(row) + source.below(9) - 4
    size = max(0, size)
    del row[size:]
    row.extend(bytes(size - len(row)))


def _other_document(source: ByteSource, engine: Engine, row: bytearray) -> None:
    """Another identity or geometry document under its right digest."""
    places = engine.places()
    name = source.pick(("identity", "geometry"))
    own = engine.document if name == "identity" else engine.geometry
    document = bytearray(own)
    document[source.below(len(own)) :] = source.some(12)
    end = places["records"]
    behind = engine.geometry if name == "identity" else b""
    body = (bytes(document) + behind).ljust(end - places[name], b"\0")
    _put(row, places[name], body[: end - places[name]])
    digest = engine.suite.digest(bytes(document))
    at, length = FIXED[f"{name}_bytes"]
    _put(row, at, len(document).to_bytes(length, "little"))
    _put(row, FIXED[f"{name}_digest"][0], digest if source.flag() else source.raw(32))


def _two_records(source: ByteSource, engine: Engine, row: bytearray) -> None:
    """Exchange, or double, two writer records or their slices."""
    first, last = engine.record_at(0), engine.record_at(len(engine.slices) - 1)
    if last + 64 > len(row):
        return
    one, other = bytes(row[first : first + 64]), bytes(row[last : last + 64])
    what = source.below(4)
    if what in (0, 2):
        row[first : first + 64] = other
    if what in (0, 1):
        row[last : last + 64] = one
    if what == 3:
        places = engine.layout.slices
        length = min(place.length for place in places)
        start = engine.layout.header_bytes
        parts = [start + places[0].offset, start + places[-1].offset]
        one, other = (bytes(row[at : at + length]) for at in parts)
        _put(row, parts[0], other)
        _put(row, parts[1], one)


def _ask(
    engine: Engine,
    row: bytearray,
    start: bytes,
    question: tuple[bytes, int, tuple[int, ...]],
    tags: int,
) -> None:
    """Ask both readers; `tags` tells which tags were recomputed behind the edits."""
    key, epoch, wanted = question
    answer = engine.opener.open(memoryview(row), key, epoch, wanted)
    number = answer.number if isinstance(answer, Refusal) else 0
    verdict = judge(row, engine.expected(key, epoch, wanted))
    if number == 0 != verdict.number:
        raise Finding("accepted", f"opened, and {verdict.number} to the independent reader")
    demand(number == verdict.number, f"{number} to us, {verdict.number} to the independent reader")
    if number:
        demand(len(str(answer)) < 2048, "a refusal without a bound", "memory")
    elif tags < SLICES:
        number_of = engines().index(engine)
        originals = (sealed(number_of, variant) for variant in range(VARIANTS))
        demand(
            any(_same(engine, row, made, exact=tags < HEADER) for made in originals),
            "a row that nobody sealed was opened",
            "accepted",
        )
    _ask_quickly(engine, row, key, epoch)
    if len(row) < 144:
        return
    own = (bytes(row[144 : 144 + row[76]]), int.from_bytes(row[24:32], "little"))
    if bytes(row) == start and (key, epoch) == own:
        _control(engine, row, number, wanted)


@cache
def quick(number: int) -> BatchOpener | None:
    """The batch opener of `engines()[number]`; None where its rows are opened one by one."""
    engine = engines()[number]
    digest = engine.suite.digest(engine.document)
    want = Expectation(
        engine.suite, engine.keyring, engine.layout, engine.document, digest, engine.geometry
    )
    return batch_opener(want, len(KEY))


def _ask_quickly(engine: Engine, row: bytearray, key: bytes, epoch: int) -> None:
    """The batch opener takes a row exactly if it is opened, whole, and of the active key.

    It is not told which slots are wanted.
    """
    opener = quick(engines().index(engine))
    if opener is None:
        return
    view = memoryview(row)
    (taken,) = opener.right([view], [key], epoch)
    answer = engine.opener.open(view, key, epoch)
    opened = isinstance(answer, Header)
    demand(opened or not taken, "refused, and right to the batch opener", "accepted")
    whole = (
        isinstance(answer, Header)
        and answer.fixed.key_id == engine.keyring.active.key_id
        and answer.coverage == header.bitmap(engine.slots, range(engine.slots))
    )
    demand(taken == whole, f"{taken} to the batch opener: plainly sealed is {whole}")


def _control(engine: Engine, row: bytearray, number: int, wanted: tuple[int, ...]) -> None:
    """An untouched row opens for its own key and epoch, if it covers what is wanted."""
    at = engine.places()["coverage"]
    bits = int.from_bytes(row[at : at + (engine.slots + 7) // 8], "little")
    held = all(0 <= slot < engine.slots and bits >> slot & 1 for slot in wanted)
    demand((number == 0) == held, f"{number} for an untouched row")


def _same(engine: Engine, row: bytearray, made: bytes, *, exact: bool) -> bool:
    """Whether this is that sealed row.

    Not `exact`: whoever has the key of headers may also change what only the header says: key
    id, `sealed_at`, coverage, and the tag that follows.
    """
    if exact:
        return row == made
    tag, cover = engine.layout.header_bytes - 32, engine.places()["coverage"]
    hidden = ((16, 24), (40, 48), (cover, cover + (engine.slots + 7) // 8), (tag, tag + 32))
    left, right = bytearray(row), bytearray(made)
    for low, high in hidden:
        left[low:high] = right[low:high] = bytes(high - low)
    return left == right


def _reuse(source: ByteSource, engine: Engine) -> None:
    """A row that is allocated again: records of the earlier allocation never close a header."""
    layout = engine.layout
    row = bytearray(layout.row_bytes)
    view = memoryview(row)
    places = range(len(engine.slices))
    left: dict[int, tuple[bytes, int, int]] = {}
    for _ in range(source.below(6)):
        index = source.below(len(places))
        mark = (
            source.pick((KEY, KEY[::-1])),
            EPOCH - source.below(2),
            GENERATION - source.below(3),
        )
        sealing.SliceSealer(engine.setting, index).seal_slice(view, *mark)
        left[index] = mark
    covered = header.bitmap(engine.slots, list(range(engine.slots)))
    refusal = sealing.HeaderSealer(engine.setting, engine.geometry).seal(
        view, KEY, EPOCH, GENERATION, covered
    )
    ready = all(index in left and left[index][2] == GENERATION for index in places)
    demand((refusal is None) == ready, "a header over records of another allocation", "accepted")
    if refusal is not None:
        return
    answer = engine.opener.open(view, KEY, EPOCH, range(engine.slots))
    right = all(mark == (KEY, EPOCH, GENERATION) for mark in left.values())
    demand(isinstance(answer, Refusal) != right, "a slice of another key or epoch", "accepted")

# SPDX-License-Identifier: Apache-2.0
"""Bytes that claim to be a header or a document, and values that become one."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Mapping

from conformance.reader import canonical
from fuzz.chunks import FIXED, engines, identity_values, sealed
from fuzz.target import ByteSource, Target, demand
from kvsafe.seal import cbor, identity, layer_names, opening
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.suites import Suite

_FIELDS = tuple(FIXED)
_TEXTS = ("", "a", "model", "é", "\U0001f600", "x" * 300)
_FLOATS = (0.0, -0.0, 1.5, 0.1, math.inf, -math.inf, math.nan, 65504.0, 1e300, 5e-324)


class Header(Target):
    """Header bytes, CBOR documents, identity documents and layer names."""

    name = "header"
    max_len = 1024
    memory_mib = 64

    def once(self, data: bytes) -> None:
        source = ByteSource(data)
        ways = (_outer, _document, _value, _compare, _identity, _names, _texts, _digest)
        ways[source.below(len(ways))](source)

    def seeds(self) -> list[bytes]:
        row = sealed(0, 0)
        document = engines()[0].document
        pair = bytes([3]) + len(document[:200]).to_bytes(2, "little")
        return [
            bytes([0, 0, 0]) + row[:300],
            bytes([1]) + document[:900],
            pair + document[:200] + document[:200],
            bytes([4, 5, 2, 9, 0]),
            bytes([5, 6, 1, 2, 3, 4, 5]),
            bytes([6]) + b"l.{0-9}.attn\n=x\nl.{0-8/2} k.{1-5}",
            bytes([6]) + b"l.{0-9999}",
            bytes([2]) + bytes(range(1, 60)),
        ]


def _outer(source: ByteSource) -> None:
    """A header, or any bytes as one: a value, and places inside the row if it is one."""
    number = source.below(3)
    engine = engines()[number]
    if source.below(4) == 3:
        row = bytearray(source.rest())
    else:
        row = bytearray(sealed(number, 0)[: 4096 + 512])
        for _ in range(source.between(1, 4)):
            at, length = FIXED[source.pick(_FIELDS)]
            value = source.number(8 * length) if length <= 8 else int(source.flag())
            row[at : at + length] = value.to_bytes(length, "little")
        del row[source.pick((len(row), source.number(16))) :]
        engine.retag_header(row)
    answer = opening.read_outer(memoryview(row), engine.suite, engine.keyring)
    if isinstance(answer, Refusal):
        demand(1 <= answer.step <= 4, f"step {answer.step} of an outer reading")
        demand(len(str(answer)) < 2048, "a refusal without a bound", "memory")
        return
    fixed, spans, head = answer
    order = (144, spans.key, spans.coverage, spans.identity, spans.geometry, spans.filler)
    demand(list(order) == sorted(order), "parts of a header that are not in their order")
    demand(spans.filler <= spans.records <= spans.tag, "documents over the records", "accepted")
    demand(len(head) == fixed.header_bytes <= len(row), "a header outside its row", "accepted")


def _document(source: ByteSource) -> None:
    """Any bytes as a document: what is taken is exactly what would be written."""
    raw = source.rest()
    ours = theirs = None
    with contextlib.suppress(cbor.CborError):
        ours = (cbor.decode(raw, limit=4096),)
    with contextlib.suppress(canonical.DocumentError):
        theirs = (canonical.decode(raw),)
    demand((ours is None) == (theirs is None), "two readers of a document disagree", "accepted")
    if ours is not None and theirs is not None:
        demand(same(ours[0], theirs[0]), "two readers of a document read two values")
        demand(cbor.encode(ours[0]) == raw, "two encodings of one document", "accepted")


def _value(source: ByteSource) -> None:
    """Any value: what is written is read back as the same value."""
    value = tree(source, 0)
    try:
        raw = cbor.encode(value)
    except cbor.CborError:
        return
    demand(same(cbor.decode(raw, limit=1 << 20), value), "a value that comes back changed")


def tree(source: ByteSource, depth: int) -> object:
    """A value of a document, sometimes one that no document may hold."""
    kind = source.below(9 if depth < 9 else 7)
    if kind == 7:
        return [tree(source, depth + 1) for _ in range(source.below(4))]
    if kind == 8:
        count = source.below(4)
        return {source.pick(_TEXTS) + str(n): tree(source, depth + 1) for n in range(count)}
    simple = (
        None, source.flag(), source.number() - (1 << 63 if source.flag() else 0),
        source.pick(_FLOATS), source.pick(_TEXTS), source.some(40), -source.number(),
    )  # fmt: skip
    return simple[kind]


def same(left: object, right: object) -> bool:
    """Equality as documents know it: 1, 1.0 and true are three things, and so is -0.0."""
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, float) and isinstance(right, float):
        both = math.isnan(left) and math.isnan(right)
        return both or struct.pack(">d", left) == struct.pack(">d", right)
    return type(left) is type(right) and left == right


def _compare(source: ByteSource) -> None:
    """Two documents: a refusal names a difference exactly when there is one."""
    suite = source.pick(tuple(Suite))
    ours = engines()[0].document
    theirs = _changed(source, ours)
    told = suite.digest(theirs if source.flag() else ours)
    answer = opening.explain_identity(suite, ours, theirs, told)
    damaged = identity.decode_identity(theirs)
    if suite.digest(theirs) != told or isinstance(damaged, identity.IdentityDamaged):
        demand(answer.kind is RefusalKind.IDENTITY_DAMAGED, f"{answer.number} for a damaged one")
        return
    mine = identity.decode_identity(ours)
    if isinstance(mine, identity.IdentityDamaged):
        demand(False, "our own document is damaged")
        return
    unlike = identity.differences(mine, damaged)
    demand(bool(unlike) == (ours != theirs), "a difference that nobody names")
    demand(len(unlike) <= 64 and len(str(answer)) < 2048, "a refusal without a bound", "memory")
    if unlike:
        demand(answer.kind is RefusalKind.IDENTITY, f"{answer.number} for another model")


def _changed(source: ByteSource, document: bytes) -> bytes:
    """The document of another engine, or one with bytes changed, or any value at all."""
    kind = source.below(5)
    if kind == 0:
        return identity.Identity.of(identity_values(source.below(3))).document
    values = identity_values()
    name = source.pick(tuple(values))
    if kind == 1:
        return cbor.encode({**values, name: _twin(values[name])})
    if kind == 2:
        try:
            return cbor.encode({**values, name: tree(source, 1)})
        except cbor.CborError:
            return document
    out = bytearray(document)
    for _ in range(source.below(4)):
        at = source.below(len(out))
        part = source.some(8)
        out[at : at + source.below(9)] = part
        out = out or bytearray(b"\xa0")
    return bytes(out)


def _twin(value: object) -> object:
    """Another value that Python calls equal, where there is one."""
    twins: dict[object, object] = {1: True, False: 0, 1.5: 1.25}
    return twins.get(value, value) if isinstance(value, int | float) else value


def _identity(source: ByteSource) -> None:
    """Values of an identity: refused by name, or written and read back whole."""
    values = identity_values(source.below(3))
    for _ in range(source.below(3)):
        name = source.pick((*values, "other", ""))
        if source.rarely():
            values.pop(name, None)
        else:
            values[name] = tree(source, 1)
    try:
        made = identity.Identity.of(values)
    except identity.IdentityError as error:
        demand(len(str(error)) < 1024, "an error without a bound", "memory")
        return
    demand(len(made.document) <= identity.DOCUMENT_LIMIT, "a document over its limit", "memory")
    known = {field.name for field in identity.IDENTITY_FIELDS}
    demand(values.keys() == known, "an identity with other fields", "accepted")
    back = identity.decode_identity(made.document)
    demand(isinstance(back, Mapping) and same(back, values), "an identity that comes back changed")


def _names(source: ByteSource) -> None:
    """Layer names, shortened and put back."""
    parts = ("layers.", ".attn", "l", "", "{", "}", "=", " ", "01", "9", "10", "²", "é")
    names = []
    for _ in range(source.below(24)):
        count = 1 + source.below(3)
        names.append("".join(_name_part(source, parts) for _ in range(count)))
    short = layer_names.compress_names(names)
    demand(layer_names.expand_names(short) == names, "layer names that come back changed")


def _name_part(source: ByteSource, parts: tuple[str, ...]) -> str:
    return str(source.below(13)) if source.flag() else source.pick(parts)


def _texts(source: ByteSource) -> None:
    """Any text as layer names: an `IdentityError`, or a list within its limit."""
    texts = source.rest().decode("utf-8", "replace").split("\n")
    try:
        names = layer_names.expand_names(texts, limit=512)
    except identity.IdentityError:
        return
    plain = sum(text.startswith("=") for text in texts)
    demand(len(names) <= 512 + plain, f"{len(names)} names from texts with a limit", "memory")


def _digest(source: ByteSource) -> None:
    """Any text as a digest: 32 bytes or an `IdentityError`."""
    text = source.rest().decode("utf-8", "replace")
    if source.flag():
        text = text.encode().hex()
    try:
        found = identity.parse_digest(text)
    except identity.IdentityError:
        return
    clean = text.strip().lower().rpartition(":")[2]
    demand(found.hex() == clean and len(found) == 32, "a digest of other bytes", "accepted")

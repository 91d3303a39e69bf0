# SPDX-License-Identifier: Apache-2.0
"""One chunk for people and for programs: every field of its header, never its content.

The key is a block hash, which would confirm a guessed prompt: only its first bytes are shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kvsafe.cli.inspect.judge import Verdict
from kvsafe.cli.inspect.outline import Outline
from kvsafe.cli.inspect.reading import Examined
from kvsafe.cli.inspect.screen import moment, table
from kvsafe.cli.inspect.tree import shown
from kvsafe.engine.rows.epochs import PRIVATE_EPOCH
from kvsafe.engine.tiers.names import GROUP_BYTES
from kvsafe.seal.cbor import CborError, decode
from kvsafe.seal.identity import IDENTITY_FIELDS
from kvsafe.seal.layout import MAX_DOCUMENT_BYTES
from kvsafe.seal.refusal import MEANINGS, Refusal

__all__ = ["chunk_document", "chunk_lines", "document_of", "refusal_document", "verdict_text"]

ENGINE_ONLY = "steps 6 to 8 ask for more than a file: which engine wants it"
_KEY_SHOWN = 6
_LEAF_LIMIT = 300
_NUMBERS = (
    "version", "suite", "epoch", "generation", "sealed_at", "header_bytes", "payload_bytes",
    "identity_bytes", "geometry_bytes", "slots",
)  # fmt: skip


def document_of(data: bytes) -> Mapping[str, Any] | None:
    """A document of a header as plain data, or None if it is none."""
    try:
        value = decode(data, limit=MAX_DOCUMENT_BYTES)
    except CborError:
        return None
    return value if isinstance(value, dict) else None


def refusal_document(refusal: Refusal) -> dict[str, Any]:
    """A refusal as plain data."""
    return {
        "number": refusal.number,
        "step": refusal.step,
        "name": refusal.kind.name,
        "meaning": MEANINGS[refusal.kind],
        "field": refusal.field,
        "expected": refusal.expected,
        "found": refusal.found,
    }


def verdict_text(found: Examined) -> str:
    """The verdict in one line."""
    verdict = found.verdict
    if verdict is None:
        return "gone: it was removed meanwhile" if found.gone else f"not read: {found.trouble}"
    if verdict.refusal is not None:
        return str(verdict.refusal)
    if not verdict.proven:
        return "not proven: the header is well formed, and no key was there to check its tag"
    if verdict.stale is not None:
        return f"whole and authentic, but of another epoch: {verdict.stale}"
    unkeyed = verdict.outline is not None and not verdict.outline.suite.keyed
    return "whole, but unkeyed: anyone could have made it" if unkeyed else "good"


def chunk_document(path: str, found: Examined) -> dict[str, Any]:
    """One file as plain data for JSON: byte strings are hex, floats that JSON lacks are text."""
    verdict = found.verdict
    out: dict[str, Any] = {"path": path, "verdict": found.word}
    if found.info is not None:
        out.update(file_bytes=found.info.st_size, written=found.info.st_mtime)
    if verdict is None:
        return {**out, "trouble": found.trouble}
    out["proven"] = verdict.proven
    out["refusal"] = None if verdict.refusal is None else refusal_document(verdict.refusal)
    out["stale"] = None if verdict.stale is None else refusal_document(verdict.stale)
    out["unchecked"] = list(verdict.unchecked)
    if verdict.outline is not None:
        out["header"] = _header_document(verdict.outline)
        out["identity"] = _plain(document_of(verdict.outline.identity))
        out["geometry"] = _geometry(verdict.outline)
    return out


def _header_document(found: Outline) -> dict[str, Any]:
    fixed = found.fixed
    return {
        **{name: getattr(fixed, name) for name in _NUMBERS},
        "suite_name": found.suite.label,
        "key_id": fixed.key_id.hex(),
        "private_epoch": bool(fixed.epoch & PRIVATE_EPOCH),
        "key_prefix": found.key[:_KEY_SHOWN].hex(),
        "key_bytes": fixed.key_bytes,
        "group": _group(found),
        "covered": found.covered(),
        "identity_digest": fixed.identity_digest.hex(),
        "geometry_digest": fixed.geometry_digest.hex(),
        "writers": [
            {"rank": r.rank, "offset": r.offset, "length": r.length} for r in found.records
        ],
    }


def _group(found: Outline) -> int:
    return int.from_bytes(found.key[-GROUP_BYTES:], "big")


def _geometry(found: Outline) -> object:
    """The geometry with each worker's own document decoded, or None."""
    document = document_of(found.geometry)
    workers = None if document is None else document.get("workers")
    if not isinstance(workers, list):
        return _plain(document)
    return {"workers": [_plain(_worker(item)) for item in workers]}


def _worker(item: object) -> object:
    if isinstance(item, list) and len(item) == 2 and isinstance(item[1], bytes):
        return {"ranks": item[0], "geometry": document_of(item[1])}
    return item


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def chunk_lines(path: str, found: Examined) -> Iterator[str]:
    """One file as text for people."""
    yield f"file     {path}"
    if found.info is not None:
        yield f"         {found.info.st_size:,} bytes, written {moment(found.info.st_mtime)} UTC"
    yield f"verdict  {verdict_text(found)}"
    verdict = found.verdict
    if verdict is None:
        return
    for text in _unchecked(verdict):
        yield f"         not checked: {text}"
    if verdict.outline is not None:
        yield ""
        yield from _header_lines(verdict.outline, verdict.proven)
        yield ""
        yield from _identity_lines(verdict.outline)
        yield ""
        yield from _geometry_lines(verdict.outline)


def _unchecked(verdict: Verdict) -> Iterator[str]:
    yield from verdict.unchecked
    if verdict.refusal is None:
        yield ENGINE_ONLY


def _header_lines(found: Outline, proven: bool) -> Iterator[str]:
    fixed = found.fixed
    state = "its tag is right" if proven else "as it says itself: NOT proven"
    yield f"header   {fixed.header_bytes:,} bytes, {state}"
    rows = [
        ("version", str(fixed.version)),
        ("suite", f"{fixed.suite} ({found.suite.label})"),
        ("key id", fixed.key_id.hex()),
        ("epoch", _epoch_text(fixed.epoch)),
        ("sealed", f"{moment(fixed.sealed_at)} UTC, generation {fixed.generation}"),
        (
            "key",
            f"{found.key[:_KEY_SHOWN].hex()}... ({fixed.key_bytes} bytes), group {_group(found)}",
        ),
        ("payload", f"{fixed.payload_bytes:,} bytes"),
        ("coverage", _coverage_text(found)),
    ]
    yield from (f"  {name:<9}{text}" for name, text in rows)
    yield f"writers  {len(found.records)}"
    heads = ("rank", "offset", "length")
    cells = [(str(r.rank), f"{r.offset:,}", f"{r.length:,}") for r in found.records]
    yield from (f"  {line}" for line in table(heads, cells, right="rank offset length"))


def _epoch_text(epoch: int) -> str:
    return f"{epoch} (private: of one launch)" if epoch & PRIVATE_EPOCH else str(epoch)


def _coverage_text(found: Outline) -> str:
    """`3 of 5 slots: 0-1, 4`."""
    ranges: list[list[int]] = []
    for slot in found.covered():
        if ranges and ranges[-1][1] == slot - 1:
            ranges[-1][1] = slot
        else:
            ranges.append([slot, slot])
    spans = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges[:40])
    more = ", ..." if len(ranges) > 40 else ""
    slots = f"{len(found.covered())} of {found.fixed.slots} slots"
    return f"{slots}: {spans}{more}" if spans else slots


def _identity_lines(found: Outline) -> Iterator[str]:
    document = document_of(found.identity)
    yield f"identity {found.fixed.identity_digest.hex()}, {found.fixed.identity_bytes:,} bytes"
    if document is None:
        yield "  (no document)"
        return
    order = {field.name: place for place, field in enumerate(IDENTITY_FIELDS)}
    names = sorted(document, key=lambda name: (order.get(name, len(order)), name))
    rows = [row for name in names for row in _leaves(name, document[name])]
    yield from _leaf_lines(rows)


def _geometry_lines(found: Outline) -> Iterator[str]:
    yield f"geometry {found.fixed.geometry_digest.hex()}, {found.fixed.geometry_bytes:,} bytes"
    yield from _leaf_lines(list(_leaves("", _geometry(found))))


def _leaf_lines(rows: list[tuple[str, str]]) -> Iterator[str]:
    width = min(52, max((len(name) for name, _ in rows), default=0))
    yield from (f"  {name:<{width}}  {text}".rstrip() for name, text in rows[:_LEAF_LIMIT])
    if len(rows) > _LEAF_LIMIT:
        yield f"  and {len(rows) - _LEAF_LIMIT} more (--json shows all)"


def _leaves(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Dotted names of all leaves with their values in short, printable text."""
    if isinstance(value, Mapping) and value:
        for key in value:
            yield from _leaves(f"{name}.{key}" if name else str(key), value[key])
    elif isinstance(value, list) and value and not all(isinstance(x, str | int) for x in value):
        for place, item in enumerate(value):
            yield from _leaves(f"{name}[{place}]", item)
    else:
        yield _short(name), _short(_text(value))


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "(empty)"
    return "(empty)" if isinstance(value, Mapping) else str(value) or "(empty)"


def _short(text: str) -> str:
    text = shown(text)
    return text if len(text) <= 160 else text[:159] + "…"

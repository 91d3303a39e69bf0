# SPDX-License-Identifier: Apache-2.0
"""Seeded faults in the chunk format: documents, headers, tags, and the ten steps of opening."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cbor2

from fuzz.canaries import Canary
from fuzz.canaries.tools import Fault, both, fed, gone, instead
from fuzz.chunks import engines
from fuzz.targets.rows import quick
from kvsafe.seal import cbor, identity, layer_names, opening, sealing
from kvsafe.seal.batch import BatchOpener, native
from kvsafe.seal.header import Header
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.opening import Opener
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.suites import Suite


def context(change: Callable[..., tuple[Any, ...]]) -> Fault:
    """A fault in what goes before a slice under its tag, on both sides."""
    return both(fed(sealing, "slice_context", change), fed(opening, "slice_context", change))


def ignoring(**fields: object) -> Callable[..., tuple[Any, ...]]:
    """The first argument (a fixed part) with harmless values in these fields."""
    return lambda fixed, *rest: (fixed._replace(**fields), *rest)


def _record_unchecked(*names: str) -> Fault:
    def change(place: Any, record: Any, generation: int) -> tuple[Any, ...]:
        harmless = {
            "rank": place.rank, "reserved": 0, "offset": place.offset, "length": place.length,
            "generation": generation,
        }  # fmt: skip
        return place, record._replace(**{name: harmless[name] for name in names}), generation

    return fed(opening, "_check_writer", change)


def _loose(data: Any, *, limit: int) -> object:
    try:
        value = cbor2.loads(bytes(data[:limit]))
        cbor2.dumps(value, canonical=True)
    except Exception:
        raise cbor.CborError("no document") from None
    return value


def _half_tagged(self: Suite, subkey: bytes, context: bytes, body: Any) -> bytes:
    return _tag_slice(self, subkey, context, body[: len(body) // 2])


_tag_slice = Suite.tag_slice
_check_epoch = opening._check_epoch
_check_key = opening._check_key
_seal_record = sealing._check_record
_compare = identity._compare
_taken = BatchOpener.right


def _prefix(header: Header, key: bytes) -> Any:
    return None if header.key.startswith(key) else _check_key(header, key)


def _no_tail(self: Opener, row: memoryview, *rest: Any) -> tuple[Any, ...]:
    layout = self._want.layout
    body = bytes(row[: layout.header_bytes + layout.payload_bytes])
    return self, memoryview(body.ljust(layout.row_bytes, b"\0")), *rest


def _any_payload(self: BatchOpener, rows: Any, keys: Any, epoch: int) -> list[bool]:
    """What is taken, and rows of which only the tag of a slice is wrong."""
    engine = next(one for number, one in enumerate(engines()) if quick(number) is self)
    answers = [engine.opener.open(row, key, epoch) for row, key in zip(rows, keys, strict=True)]
    payloads = [
        isinstance(answer, Refusal) and answer.kind is RefusalKind.PAYLOAD_TAG for answer in answers
    ]
    taken = _taken(self, rows, keys, epoch)
    return [right or only for right, only in zip(taken, payloads, strict=True)]


_BATCHES = (
    Canary("slices unread in a batch", "rows", "the batch opener takes any payload", 4000,
           instead(BatchOpener, "right", _any_payload)),
) if native() else ()  # fmt: skip
"""Only where rows are opened in batches: else there is nothing to be wrong."""

CANARIES = (
    *_BATCHES,
    Canary("magic unchecked", "rows", "another file is read as a chunk", 1000,
           fed(opening, "read_fixed", lambda row: (b"\x89kvsafe\n" + bytes(row[8:]),))),
    Canary("suite unchecked", "rows", "the reader takes the writer's word for the suite", 2000,
           lambda patch, _: patch.set(
               opening, "_check_terms",
               lambda fixed, suite, ring, right=opening._check_terms: right(
                   fixed._replace(suite=suite.value), suite, ring))),
    Canary("lengths left out", "header", "what is declared is used before it is bounded", 800,
           instead(opening, "_check_lengths", lambda fixed, row_bytes: opening._spans(fixed))),
    Canary("off by one in the filler", "rows", "the last document byte counts as filler", 600,
           lambda patch, _: patch.set(
               opening, "_spans",
               lambda fixed, right=opening._spans: _moved(right(fixed)))),
    Canary("header tag without the records", "rows", "the tag covers the wrong range", 600,
           fed(Suite, "tag", lambda suite, key, data: (suite, key, bytes(data)[:-64]))),
    Canary("header tag not compared", "rows", "any header passes", 300,
           instead(opening, "tags_equal", lambda *_: True)),
    Canary("key left out", "rows", "key equality is not checked", 600,
           gone(opening, "_check_key")),
    Canary("a prefix of the key is enough", "rows", "keys are compared as prefixes", 1500,
           instead(opening, "_check_key", _prefix)),
    Canary("stale epoch passes", "rows", "a lower epoch is not refused", 1500,
           instead(opening, "_check_epoch",
                   lambda found, ours: None if found <= ours else _check_epoch(found, ours))),
    Canary("identity left out", "rows", "another model's header passes", 2500,
           gone(Opener, "_check_identity")),
    Canary("geometry left out", "rows", "another geometry passes", 2500,
           gone(Opener, "_check_geometry")),
    Canary("writers left out", "rows", "records are not compared with the layout", 1500,
           gone(Opener, "_check_writers")),
    Canary("swapped writer", "rows", "rank and place of a record are not checked", 2500,
           _record_unchecked("rank", "offset")),
    Canary("generation of a record unchecked", "rows", "a late writer's record passes", 2500,
           _record_unchecked("generation")),
    Canary("coverage off by one", "rows", "the slot after the wanted one is looked at", 1500,
           instead(Header, "covers",
                   lambda self, slot: bool(self.coverage[slot >> 3] >> (slot + 1 & 7) & 1))),
    Canary("tail left out", "rows", "bytes behind the payload are not checked", 4000,
           fed(Opener, "_check_padding", _no_tail)),
    Canary("half a slice tagged", "rows", "the tag covers half of the slice", 200,
           instead(Suite, "tag_slice", _half_tagged)),
    Canary("payload left out", "rows", "step 10 is skipped", 600,
           gone(Opener, "open_slice")),
    Canary("slice tag without the key", "rows", "a slice of another key passes", 200,
           context(lambda digest, epoch, generation, place, key: (
               digest, epoch, generation, place, b""))),
    Canary("any key id is the active key", "rows", "a key that is not in the ring is not missed",
           1500, instead(Keyring, "get", lambda self, _: self.active)),
    Canary("a stale record closes a header", "rows", "the sealer ignores generations", 3000,
           lambda patch, _: patch.set(
               sealing, "_check_record",
               lambda record, place, generation: _seal_record(
                   record._replace(generation=generation), place, generation))),
    Canary("a wrong tag is good", "inspect", "the command calls any header authentic", 400,
           instead(opening, "tags_equal", lambda *_: True)),
    Canary("payloads are not looked at", "inspect", "the command calls a damaged payload good", 400,
           gone(Opener, "open_slice")),
    Canary("old keys are forgotten", "inspect", "a chunk of an older key is refused", 100,
           instead(Keyring, "get", lambda self, _: None)),
    Canary("any CBOR is a document", "header", "encodings that are not canonical pass", 1500,
           both(instead(cbor, "decode", _loose), instead(identity, "decode", _loose))),
    Canary("true equals one", "header", "documents are compared as Python compares", 4000,
           instead(identity, "_same", lambda left, right: left == right)),
    Canary("names without a limit", "header", "layer names may expand without bound", 1500,
           lambda patch, _: patch.set(
               layer_names, "expand_names",
               lambda texts, limit=0, right=layer_names.expand_names: right(texts, 1 << 20))),
)  # fmt: skip


def _moved(spans: Any) -> Any:
    from dataclasses import replace

    return replace(spans, filler=spans.filler - 1)

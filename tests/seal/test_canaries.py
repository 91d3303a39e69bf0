# SPDX-License-Identifier: Apache-2.0
"""Canaries: seeded faults in sealing and opening, one at a time; a named case must see each.

A suite that stays green while a check is missing proves nothing. Each fault here is the smallest
form of a mistake that someone could make; the case beside it is the one that has to turn red.
"""

from collections.abc import Callable
from typing import Any

import cbor2
import pytest

from kvsafe.seal import identity, opening, sealing
from kvsafe.seal.cbor import CborError
from kvsafe.seal.header import FixedPart, Header, read_fixed
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.layout import MAGIC, RECORD
from kvsafe.seal.opening import Opener
from kvsafe.seal.refusal import Refusal
from kvsafe.seal.suites import Suite
from tests.seal.cases import BY_NAME, check
from tests.seal.rows import EPOCH

Fault = Callable[[pytest.MonkeyPatch], None]


def instead(owner: object, name: str, value: object) -> Fault:
    """The fault that `name` is something else."""
    return lambda patch: patch.setattr(owner, name, value)


def gone(owner: object, name: str) -> Fault:
    """The fault that a check was left out."""
    return instead(owner, name, lambda *_: None)


def fed(owner: object, name: str, change: Callable[..., tuple[Any, ...]]) -> Fault:
    """The fault that a function looks at something else: its arguments are changed first."""
    right = getattr(owner, name)
    return instead(owner, name, lambda *args: right(*change(*args)))


def both(*faults: Fault) -> Fault:
    """The same fault in several places."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        for one in faults:
            one(patch)

    return fault


def context(change: Callable[..., tuple[Any, ...]]) -> Fault:
    """A fault in what goes before a slice under its tag, on both sides."""
    return both(fed(sealing, "slice_context", change), fed(opening, "slice_context", change))


def ignoring(**fields: object) -> Callable[..., tuple[Any, ...]]:
    """The first argument (a fixed part) with harmless values in these fields."""
    return lambda fixed, *rest: (fixed._replace(**fields), *rest)


def record_ignoring(*names: str) -> Fault:
    """The check of one writer record without these fields."""

    def change(place: Any, record: Any, generation: int) -> tuple[Any, ...]:
        harmless = {
            "rank": place.rank,
            "reserved": 0,
            "offset": place.offset,
            "length": place.length,
            "generation": generation,
        }
        return place, record._replace(**{name: harmless[name] for name in names}), generation

    return fed(opening, "_check_writer", change)


def _one_writer_unchecked(index: int) -> Fault:
    right = Opener.open_slice

    def open_slice(self: Opener, row: memoryview, header: Header, at: int) -> Refusal | None:
        return None if at == index else right(self, row, header, at)

    return instead(Opener, "open_slice", open_slice)


def _first_record_only(self: Opener, header: Header) -> Refusal | None:
    place = self._want.layout.slices[0]
    return opening._check_writer(place, header.records[0], header.fixed.generation)


def _only_half_a_slice() -> Fault:
    right = Suite.tag_slice

    def tag_slice(self: Suite, subkey: bytes, context: bytes, body: Any) -> bytes:
        return right(self, subkey, context, body[: len(body) // 2])

    return instead(Suite, "tag_slice", tag_slice)


def _epoch(accept: Callable[[int, int], bool]) -> Fault:
    right = opening._check_epoch
    return instead(
        opening,
        "_check_epoch",
        lambda found, ours: None if accept(found, ours) else right(found, ours),
    )


def _prefix(header: Header, key: bytes) -> Refusal | None:
    return None if header.key.startswith(key) else _right_key(header, key)


_right_key = opening._check_key


def _same_digest(self: Opener, head: bytes, fixed: FixedPart, spans: Any) -> Refusal | None:
    if fixed.identity_digest == self._want.identity_digest:
        return None
    return _right_identity(self, head, fixed, spans)


_right_identity = Opener._check_identity


def _any_encoding(data: Any, *, limit: int) -> object:
    try:
        return cbor2.loads(bytes(data[:limit]))
    except Exception:
        raise CborError("no document") from None


def _clean_tail(self: Opener, row: memoryview, *rest: Any) -> tuple[Any, ...]:
    layout = self._want.layout
    body = bytes(row[: layout.header_bytes + layout.payload_bytes])
    return self, memoryview(body.ljust(layout.row_bytes, b"\0")), *rest


def _covers_next(self: Header, slot: int) -> bool:
    return bool(self.coverage[(slot + 1) >> 3] >> ((slot + 1) & 7) & 1)


_read = read_fixed

FAULTS: dict[str, tuple[Fault, str]] = {
    # steps 1 and 2
    "length unchecked": (instead(opening, "FIXED", RECORD), "row of 143 bytes"),
    "magic unchecked": (
        instead(opening, "read_fixed", lambda row: _read(row)._replace(magic=MAGIC)),
        "magic = 0000000000000000",
    ),
    "version unchecked": (fed(opening, "_check_terms", ignoring(version=1)), "version = 2"),
    "suite unchecked": (fed(opening, "_check_terms", ignoring(suite=1)), "suite = 2"),
    "flags unchecked": (fed(opening, "_check_terms", ignoring(flags=0)), "flags = 1"),
    "reserved unchecked": (fed(opening, "_check_terms", ignoring(reserved=0)), "reserved = 1"),
    "any key id is the active key": (
        instead(Keyring, "get", lambda self, _: self.active),
        "retired key",
    ),
    # step 3
    "payload length unchecked": (
        fed(opening, "_check_lengths", ignoring(payload_bytes=1)),
        "payload_bytes = 9223372036854775808",
    ),
    "writers unchecked": (fed(opening, "_check_lengths", ignoring(writers=2)), "writers = 1025"),
    "header may pass the row": (
        fed(opening, "_check_lengths", lambda fixed, _: (fixed, 1 << 40)),
        "header_bytes = 12288",
    ),
    "header of any length": (instead(opening, "PAGE_BYTES", 1), "header_bytes = 4095"),
    "documents of any length": (
        instead(opening, "MAX_DOCUMENT_BYTES", 1 << 40),
        "identity_bytes = 65537",
    ),
    "keys of any length": (instead(opening, "MAX_KEY_BYTES", 1 << 16), "key_bytes = 129"),
    # step 4
    "tags not compared": (
        instead(opening, "tags_equal", lambda *_: True),
        "retired key under the id of the new one",
    ),
    "header tag without the records": (
        fed(Suite, "tag", lambda suite, key, data: (suite, key, data[:-128])),
        "flipped bit of a record",
    ),
    "header tag of the fixed part": (
        fed(Suite, "tag", lambda suite, key, data: (suite, key, data[:144])),
        "flipped bit of the key",
    ),
    "header tag without the filler": (
        fed(Suite, "tag", lambda suite, key, data: (suite, key, bytes(data).replace(b"\0", b"\1"))),
        "flipped bit of the filler",
    ),
    # steps 5 to 8
    "key left out": (gone(opening, "_check_key"), "chunk of another key"),
    "a prefix of the key is enough": (
        instead(opening, "_check_key", _prefix),
        "our chunk asked for by a prefix",
    ),
    "epoch left out": (gone(opening, "_check_epoch"), "chunk from before a reset"),
    "epoch inverted": (
        fed(opening, "_check_epoch", lambda found, ours: (ours, found)),
        "chunk from before a reset",
    ),
    "older epochs pass": (_epoch(lambda found, ours: found <= ours), "chunk from before a reset"),
    "newer epochs pass": (_epoch(lambda found, ours: found >= ours), "chunk from after our epoch"),
    "identity left out": (gone(Opener, "_check_identity"), "header of another model"),
    "identity document not compared": (
        instead(Opener, "_check_identity", _same_digest),
        "identity under our digest",
    ),
    "any encoding is a document": (
        instead(identity, "decode", _any_encoding),
        "identity: more behind it",
    ),
    "geometry left out": (gone(Opener, "_check_geometry"), "geometry of another rank"),
    "geometry without the row": (
        fed(
            Opener,
            "_check_geometry",
            lambda self, *rest: (self, *rest[:-1], self._want.layout.row_bytes),
        ),
        "row of 8193 bytes",
    ),
    # step 9
    "writers left out": (gone(Opener, "_check_writers"), "one writer twice"),
    "only the first record checked": (
        instead(Opener, "_check_writers", _first_record_only),
        "one writer twice",
    ),
    "rank unchecked": (record_ignoring("rank"), "record 1 {'rank': 2}"),
    "reserved of a record unchecked": (record_ignoring("reserved"), "record 0 {'reserved': 1}"),
    "slices may overlap": (
        record_ignoring("offset", "length"),
        "record 1 {'offset': 95, 'length': 65}",
    ),
    "generation unchecked": (record_ignoring("generation"), "record 1 {'generation': 12}"),
    "coverage left out": (gone(opening, "_check_coverage"), "wanted and not covered"),
    "coverage off by one": (instead(Header, "covers", _covers_next), "wanted and not covered"),
    "the last wanted slot unchecked": (
        fed(opening, "_check_coverage", lambda header, wanted: (header, list(wanted)[:-1])),
        "wanted past the slots",
    ),
    "bits past the slots pass": (
        fed(
            opening,
            "_check_coverage",
            lambda header, wanted: (
                Header(header.fixed, header.key, b"\x1f", header.records),
                wanted,
            ),
        ),
        "coverage past the slots",
    ),
    "padding left out": (gone(Opener, "_check_padding"), "byte in the filler"),
    "tail left out": (fed(Opener, "_check_padding", _clean_tail), "last byte of the row"),
    # step 10
    "payload left out": (gone(Opener, "open_slice"), "flipped bit of the payload"),
    "first writer unchecked": (_one_writer_unchecked(0), "flipped bit of the payload"),
    "last writer unchecked": (_one_writer_unchecked(1), "last slice is another's"),
    "half a slice tagged": (_only_half_a_slice(), "last byte of the payload"),
    "slice tag without the key": (
        context(
            lambda digest, epoch, generation, place, key: (digest, epoch, generation, place, b"")
        ),
        "another key's slices under our key",
    ),
    "slice tag without the epoch": (
        context(lambda digest, epoch, *rest: (digest, EPOCH, *rest)),
        "an old epoch's slices under ours",
    ),
    "slice tag without the generation": (
        context(lambda digest, epoch, generation, *rest: (digest, epoch, 0, *rest)),
        "an old generation's slices under ours",
    ),
    "slice tag without the identity": (
        context(lambda digest, *rest: (bytes(32), *rest)),
        "another model's slices under ours",
    ),
    "slice tag without its place": (
        context(
            lambda digest, epoch, generation, place, key: (
                digest,
                epoch,
                generation,
                type(place)(0, 0, place.length),
                key,
            )
        ),
        "slice of another rank",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_seen_by_its_case(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, case = FAULTS[name]
    check(BY_NAME[case])
    fault(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - a wrong answer or a crash: both are red
        check(BY_NAME[case])
    monkeypatch.undo()
    check(BY_NAME[case])

# SPDX-License-Identifier: Apache-2.0
"""The verdict on one row, without an engine: the ten steps against what its own header says.

What needs an engine is left out: which key is asked for, which identity and geometry are
the live ones, which slots are wanted. In its stead the object name in the file's name is
held against the header, so that a whole chunk in another chunk's place is found as well.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvsafe.cli.inspect.keys import Epochs, Keys
from kvsafe.cli.inspect.outline import Outline, layout_of, outline_of
from kvsafe.engine.rows.epochs import PRIVATE_EPOCH
from kvsafe.engine.tiers.names import GROUP_BYTES, object_name
from kvsafe.seal.cbor import CborError, decode
from kvsafe.seal.identity import IdentityDamaged, decode_identity
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.layout import MAX_DOCUMENT_BYTES
from kvsafe.seal.opening import Expectation, Opener, read_outer
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.suites import Suite

__all__ = ["Judge", "Place", "Verdict", "place_of"]

NO_KEY = "steps 4, 5, 9 and 10 (tags, place, writers, padding): they need the key"
NO_PLACE = "step 5 (place): the file's name is no object name"
NO_EPOCH = "step 6 (epoch): no epoch file of this namespace was found, or none that can be read"
PRIVATE = "step 6 (epoch): a private epoch, which only the launch that sealed it knows"

_REMEMBERED = 64
_FILE = re.compile(r"(?:\d{1,6}-)?((?:[0-9a-f]{2}){8,124})\.(chunk|bin)(?:\.[0-9a-f]{1,32})?")
_GROUP_FOLDER = re.compile(r"[0-9a-f]{1,8}_g(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Place:
    """What a file's name says about the object name; `group` is None where it is not said."""

    tag: bytes
    group: bytes | None


def place_of(parts: Sequence[str]) -> Place | None:
    """Read the place from a path: `HEX.chunk`, `hh_gN/HEX.bin`, or a name in quarantine."""
    match = _FILE.fullmatch(parts[-1])
    if match is None:
        return None
    name = bytes.fromhex(match[1])
    if match[2] == "chunk":
        return Place(name[:-GROUP_BYTES], name[-GROUP_BYTES:])
    folder = _GROUP_FOLDER.fullmatch(parts[-2]) if len(parts) > 1 else None
    group = None if folder is None else int(folder[1]).to_bytes(GROUP_BYTES, "big")
    return Place(name, group)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known about one row.

    Attributes:
        refusal: the first step that refuses, or None.
        outline: what its header says, where it can be read at all.
        proven: the header's tag is right.
        stale: 601 or 602, where only the epoch is not the present one: no damage.
        unchecked: what could not be checked, in words.
    """

    refusal: Refusal | None
    outline: Outline | None = None
    proven: bool = False
    stale: Refusal | None = None
    unchecked: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """`refused`, `stale`, `unproven` or `good`."""
        if self.refusal is not None:
            return "refused"
        if not self.proven:
            return "unproven"
        return "good" if self.stale is None else "stale"


class Judge:
    """Judges rows with one set of keys. Thread-safe."""

    def __init__(self, keys: Keys, epochs: Epochs) -> None:
        self._keys = keys
        self._epochs = epochs

    def header(self, row: memoryview, place: Place | None) -> Verdict:
        """Steps 1 to 8 on a row of which at least the header is there (uint8, whole length)."""
        found = outline_of(row, len(row))
        if isinstance(found, Refusal):
            return Verdict(found)
        if found.suite not in self._keys.accepted:
            names = ", ".join(suite.label for suite in self._keys.accepted)
            refusal = Refusal.of(RefusalKind.SUITE, "suite", names, found.suite.label)
            return Verdict(refusal, found)
        ring = self._keys.ring(found.suite)
        if ring is None:
            return Verdict(_documents(found), found, unchecked=(NO_KEY,))
        outer = read_outer(row, found.suite, ring)
        if isinstance(outer, Refusal):
            return Verdict(outer, found)
        misplaced = None if place is None else _misplaced(found, ring, place)
        if misplaced is not None:
            return Verdict(misplaced, found, proven=True)
        stale, unchecked = self._epoch(found)
        if place is None:
            unchecked = (NO_PLACE, *unchecked)
        return Verdict(_documents(found), found, True, stale, unchecked)

    def row(self, row: memoryview, known: Verdict) -> Verdict:
        """Steps 8 to 10 on a whole row whose header was judged as `known`."""
        found = known.outline
        ring = None if found is None else self._keys.ring(found.suite)
        if found is None or ring is None or known.refusal is not None or not known.proven:
            return known
        layout = layout_of(found)
        if isinstance(layout, Refusal):
            return replace(known, refusal=layout)
        own = Expectation(
            suite=found.suite,
            keyring=ring,
            layout=layout,
            identity_document=found.identity,
            identity_digest=found.fixed.identity_digest,
            geometry_document=found.geometry,
        )
        answer = Opener(own).open(row, found.key, found.fixed.epoch)
        return replace(known, refusal=answer) if isinstance(answer, Refusal) else known

    def _epoch(self, found: Outline) -> tuple[Refusal | None, tuple[str, ...]]:
        epoch = found.fixed.epoch
        if epoch & PRIVATE_EPOCH:
            return None, (PRIVATE,)
        current = self._epochs.current(found.suite, namespace_of(found))
        if current is None:
            return None, (NO_EPOCH,)
        if epoch == current:
            return None, ()
        kind = RefusalKind.EPOCH_REVOKED if epoch < current else RefusalKind.EPOCH_UNKNOWN
        return Refusal.of(kind, "epoch", current, epoch), ()


def namespace_of(found: Outline) -> object:
    """The namespace in the identity document, whatever it may be; None if there is none."""
    return _namespace(found.identity)


@functools.lru_cache(_REMEMBERED)
def _namespace(document: bytes) -> object:
    values = decode_identity(document)
    return None if isinstance(values, IdentityDamaged) else values.get("namespace")


def _misplaced(found: Outline, ring: Keyring, place: Place) -> Refusal | None:
    fixed, suite = found.fixed, Suite(found.fixed.suite)
    private = fixed.epoch.to_bytes(8, "little") if fixed.epoch & PRIVATE_EPOCH else b""
    own = fixed.identity_digest + private
    name = object_name(suite, ring.name_secret, own, found.key)
    tag, group = name[:-GROUP_BYTES], name[-GROUP_BYTES:]
    if place.tag == tag and place.group in (None, group):
        return None
    return Refusal.of(RefusalKind.KEY, "file name", tag[:8], place.tag[:8])


def _documents(found: Outline) -> Refusal | None:
    """Steps 7 and 8, as far as the chunk alone can show them."""
    fixed, suite = found.fixed, found.suite
    return _identity_flaw(suite, found.identity, fixed.identity_digest) or _geometry_flaw(
        suite, found.geometry, fixed.geometry_digest
    )


# The chunks of one engine have the same documents: each is looked at once.
@functools.lru_cache(_REMEMBERED)
def _identity_flaw(suite: Suite, data: bytes, digest: bytes) -> Refusal | None:
    damaged = RefusalKind.IDENTITY_DAMAGED
    if suite.digest(data) != digest:
        return Refusal.of(damaged, "identity", digest, "another digest")
    document = decode_identity(data)
    if isinstance(document, IdentityDamaged):
        return Refusal.of(damaged, "identity", "a document", document)
    return None


@functools.lru_cache(_REMEMBERED)
def _geometry_flaw(suite: Suite, data: bytes, digest: bytes) -> Refusal | None:
    damaged = RefusalKind.GEOMETRY_DAMAGED
    if suite.digest(data) != digest:
        return Refusal.of(damaged, "geometry", digest, "another digest")
    try:
        value = decode(data, limit=MAX_DOCUMENT_BYTES)
    except CborError as exc:
        return Refusal.of(damaged, "geometry", "a document", exc)
    if not isinstance(value, dict):
        return Refusal.of(damaged, "geometry", "a map", type(value).__name__)
    return None

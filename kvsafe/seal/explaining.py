# SPDX-License-Identifier: Apache-2.0
"""Why a chunk is of another engine: steps 7 and 8 in words, once the comparison has failed."""

from collections.abc import Sequence

from kvsafe.seal.cbor import CborError, decode
from kvsafe.seal.identity import IdentityDamaged, decode_identity, differences
from kvsafe.seal.layout import MAX_DOCUMENT_BYTES
from kvsafe.seal.refusal import Refusal, RefusalKind
from kvsafe.seal.suites import Suite


def explain_identity(suite: Suite, expected: bytes, found: bytes, found_digest: bytes) -> Refusal:
    """Say which identity field differs, or that the document is not what its digest says."""
    if suite.digest(found) != found_digest:
        return Refusal.of(RefusalKind.IDENTITY_DAMAGED, "identity", found_digest, "another digest")
    theirs = decode_identity(found)
    ours = decode_identity(expected)
    for document in (theirs, ours):
        if isinstance(document, IdentityDamaged):
            return Refusal.of(RefusalKind.IDENTITY_DAMAGED, "identity", "a document", document)
    if isinstance(theirs, IdentityDamaged) or isinstance(ours, IdentityDamaged):
        return Refusal.of(RefusalKind.IDENTITY_DAMAGED, "identity", "a document", "damage")
    unlike = differences(ours, theirs)
    if not unlike:
        return Refusal.of(RefusalKind.IDENTITY_DAMAGED, "identity", expected[:8], found[:8])
    first = unlike[0]
    names = ", ".join(item.field for item in unlike)
    return Refusal.of(RefusalKind.IDENTITY, names, first.expected, first.found)


def explain_geometry(suite: Suite, expected: bytes, found: bytes, found_digest: bytes) -> Refusal:
    """Say at which leaf two geometries differ, or that a document is not what its digest says."""
    if suite.digest(found) != found_digest:
        return Refusal.of(RefusalKind.GEOMETRY_DAMAGED, "geometry", found_digest, "another digest")
    try:
        theirs = decode(found, limit=MAX_DOCUMENT_BYTES)
        ours = decode(expected, limit=MAX_DOCUMENT_BYTES)
    except CborError as exc:
        return Refusal.of(RefusalKind.GEOMETRY_DAMAGED, "geometry", "a document", exc)
    if not isinstance(theirs, dict):
        return Refusal.of(RefusalKind.GEOMETRY_DAMAGED, "geometry", "a map", type(theirs).__name__)
    name, left, right = first_difference("geometry", ours, theirs)
    return Refusal.of(RefusalKind.GEOMETRY, name, left, right)


def first_difference(name: str, ours: object, theirs: object) -> tuple[str, object, object]:
    """The first leaf at which two documents differ, by dotted name."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(set(ours) | set(theirs)):
            if ours.get(key) != theirs.get(key):
                return first_difference(f"{name}.{key}", ours.get(key), theirs.get(key))
    left, right = _items(ours), _items(theirs)
    if left is not None and right is not None and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            if one != other:
                return first_difference(f"{name}[{index}]", one, other)
    return name, ours, theirs


def _items(value: object) -> Sequence[object] | None:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return value
    return None

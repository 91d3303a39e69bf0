# SPDX-License-Identifier: Apache-2.0
"""Canonical CBOR in a small, strict subset (RFC 8949, section 4.2).

Documents inside a chunk header use only: maps with text keys, lists, integers of at most
64 bits, floats, text, byte strings, booleans and null. Tags, indefinite lengths, duplicate
keys and every encoding that is not the canonical one are damage, because two encodings of
one document would have two digests.
"""

from collections.abc import Callable

import cbor2

MAX_DEPTH = 8
"""Nesting allowed in a document; the deepest one that kvsafe writes has five levels."""

_INT_LOW = -(2**63)
_INT_HIGH = 2**64 - 1
_KNOWN_TAGS = (
    *range(0, 6),
    25,
    28,
    29,
    30,
    35,
    36,
    37,
    43,
    52,
    54,
    100,
    *range(256, 262),
    1004,
    43000,
)


class CborError(ValueError):
    """The bytes are not a document of the canonical subset."""


def _refuse_tag(*_: object) -> object:
    raise CborError("tags are not part of a document")


_TAG_DECODERS: dict[int, Callable[..., object]] = dict.fromkeys(_KNOWN_TAGS, _refuse_tag)


def encode(value: object) -> bytes:
    """Encode `value` canonically. Raises `CborError` for what is outside the subset."""
    _check(value, MAX_DEPTH)
    try:
        return cbor2.dumps(value, canonical=True)
    except UnicodeEncodeError:
        # A path that is no UTF-8 has half a surrogate pair for each byte of that kind.
        raise CborError("text that is not Unicode") from None


def decode(data: bytes | bytearray | memoryview, *, limit: int) -> object:
    """Decode one document of at most `limit` bytes.

    Raises `CborError` for anything that `encode` would not have produced: this is how
    hostile bytes are kept from choosing their own types or sizes.
    """
    if len(data) > limit:
        raise CborError(f"document of {len(data)} bytes, at most {limit} allowed")
    raw = bytes(data)
    try:
        value = cbor2.loads(
            raw,
            tag_hook=_refuse_tag,
            semantic_decoders=_TAG_DECODERS,
            max_depth=MAX_DEPTH,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
        )
        _check(value, MAX_DEPTH)
        again = cbor2.dumps(value, canonical=True)
    except (
        cbor2.CBORError,
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
    ) as exc:
        raise CborError(f"not a document: {type(exc).__name__}") from None
    if again != raw:
        raise CborError("not the canonical encoding")
    return value


def _check(value: object, depth: int) -> None:
    if depth == 0 and isinstance(value, list | tuple | dict):
        raise CborError("nested too deeply")
    if value is None or isinstance(value, bool | float | str | bytes):
        return
    if isinstance(value, int):
        if not _INT_LOW <= value <= _INT_HIGH:
            raise CborError("integer of more than 64 bits")
        return
    if isinstance(value, list | tuple):
        for item in value:
            _check(item, depth - 1)
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CborError("a map key is not text")
            _check(item, depth - 1)
        return
    raise CborError(f"type {type(value).__name__} is not part of a document")

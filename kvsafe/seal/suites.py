# SPDX-License-Identifier: Apache-2.0
"""Cipher suites: how a tag and a digest are computed.

A tag is always `F(subkey, message)` with a 32-byte subkey that belongs to one purpose.
Numbers are assigned once and never reused; they are in every chunk header.
"""

import enum
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from kvsafe.seal.keyring import MAX_KEYS, SuiteName

TAG_BYTES = 32
DIGEST_BYTES = 32

Bytes = bytes | bytearray | memoryview


class Suite(enum.IntEnum):
    """The way tags and digests are computed; the value is the number in the header.

    - `AES256_GMAC`: slices are hashed by GMAC (NIST SP 800-38D, AES-256), then HMAC-SHA-256; all
      else is HMAC-SHA-256. Default: four to five times as fast as BLAKE3 from 1 MiB on, where the
      processor has AES instructions.
    - `BLAKE3_KEYED`: BLAKE3 keyed hash (the BLAKE3 paper, 2021, section 2.4).
    - `HMAC_SHA256`: HMAC-SHA-256 (RFC 2104, FIPS 198-1).
    - `BLAKE3`: BLAKE3 without a secret. Finds accidents, not attackers.
    """

    BLAKE3_KEYED = 1
    HMAC_SHA256 = 2
    BLAKE3 = 3
    AES256_GMAC = 4

    @property
    def label(self) -> SuiteName:
        """The name used in configuration, logs and metrics."""
        return _LABELS[self]

    @property
    def keyed(self) -> bool:
        """Whether a tag proves that a holder of the key wrote the bytes."""
        return self is not Suite.BLAKE3

    @classmethod
    def named(cls, label: str) -> "Suite":
        """The suite with this configuration name. Raises `ValueError` for any other text."""
        for suite, text in _LABELS.items():
            if text == label:
                return suite
        raise ValueError(f"unknown suite {label!r}; one of {', '.join(_LABELS.values())}")

    def digest(self, data: Bytes) -> bytes:
        """32-byte digest of `data` without a key."""
        if self in _SHA256:
            return hashlib.sha256(data).digest()
        return blake3(data).digest()

    def tag(self, subkey: bytes, message: Bytes) -> bytes:
        """32-byte tag of one contiguous message."""
        if self in _SHA256:
            return hmac_sha256(subkey, message)
        if self is Suite.BLAKE3_KEYED:
            return blake3(message, key=subkey).digest()
        return self.tag_parts(subkey, (message,))

    def tag_parts(self, subkey: bytes, parts: Iterable[Bytes]) -> bytes:
        """32-byte tag of the concatenation of `parts`, without copying them together."""
        if self in _SHA256:
            return hmac_sha256(subkey, *parts)
        if self is Suite.BLAKE3_KEYED:
            hasher = blake3(key=subkey)
        else:
            # Without a secret the public constant only separates the purposes.
            hasher = blake3(subkey)
        for part in parts:
            hasher.update(part)
        return hasher.digest()

    def tag_slice(self, subkey: bytes, context: bytes, body: Bytes) -> bytes:
        """32-byte tag of a slice: of `context`, then of the contiguous bytes of `body`."""
        if self is not Suite.AES256_GMAC:
            return self.tag_parts(subkey, (context, body))
        # The GMAC is a fast hash under a secret and never leaves this function. With its constant
        # nonce it would give its key away; what is told is a pseudo-random function of it.
        secret = hmac_sha256(subkey, b"\1" + context)
        return hmac_sha256(subkey, b"\2" + context + gmac(secret, body))


_LABELS: Final[Mapping[Suite, SuiteName]] = {
    Suite.BLAKE3_KEYED: "blake3-keyed",
    Suite.HMAC_SHA256: "hmac-sha256",
    Suite.BLAKE3: "blake3",
    Suite.AES256_GMAC: "aes256-gmac",
}
_SHA256: Final = frozenset((Suite.HMAC_SHA256, Suite.AES256_GMAC))
"""Suites whose digests are SHA-256 and whose tags are HMAC-SHA-256."""

_LOCKED_BYTES: Final = 2047
_SHORT_BYTES: Final = 16 << 10
_KEPT_KEYS: Final = 2 * MAX_KEYS + 2
"""All subkeys of a ring: two of each key, one for names and one for state files."""
_NONCE: Final = bytes(12)
_PIECE_BYTES: Final = 1 << 30
"""The library takes less than 2 GiB in one call."""


def hmac_sha256(key: bytes, *parts: Bytes) -> bytes:
    """HMAC-SHA-256 (RFC 2104) of the concatenation of `parts`, without copying them together.

    The same as `hmac.digest`, which hashes the key anew for every message: for a short one that
    takes longer than the message. A header goes in pieces for which `hashlib` keeps the
    interpreter's lock (its documentation: up to 2047 bytes): handing the lock to another thread
    and waiting for it costs many times what the header does.
    """
    mac = _begun(key).copy()
    for part in parts:
        if _LOCKED_BYTES < len(part) <= _SHORT_BYTES:
            view = memoryview(part)
            for start in range(0, len(view), _LOCKED_BYTES):
                mac.update(view[start : start + _LOCKED_BYTES])
        else:
            mac.update(part)
    return mac.digest()


@lru_cache(maxsize=_KEPT_KEYS)
def _begun(key: bytes) -> hmac.HMAC:
    """An HMAC that has taken in its key and nothing else."""
    return hmac.new(key, digestmod="sha256")


def gmac(key: bytes, message: Bytes) -> bytes:
    """16-byte GMAC of a message (NIST SP 800-38D, section 3) with a constant nonce.

    Two of them under one key (32 bytes) give the key away: for use as a secret hash only, see
    `Suite.tag_slice`. Raises `BufferError` for a buffer that is not contiguous.
    """
    if len(message) <= _PIECE_BYTES:
        return AESGCM(key).encrypt(_NONCE, b"", message)
    state = Cipher(AES(key), GCM(_NONCE)).encryptor()
    view = memoryview(message)
    for start in range(0, len(view), _PIECE_BYTES):
        state.authenticate_additional_data(view[start : start + _PIECE_BYTES])
    state.finalize()
    return state.tag


def tags_equal(left: Bytes, right: Bytes) -> bool:
    """Compare two tags in time that does not depend on where they differ."""
    return hmac.compare_digest(left, right)

# SPDX-License-Identifier: Apache-2.0
"""Cipher suites: how a tag and a digest are computed.

A tag is always `F(subkey, message)` with a 32-byte subkey that belongs to one purpose.
Numbers are assigned once and never reused; they are in every chunk header.
"""

import enum
import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from typing import Final

from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from kvsafe.seal.keyring import SuiteName

TAG_BYTES = 32
DIGEST_BYTES = 32
SALT_BYTES = 16
"""The first half of a slice tag of `AES256_GMAC`; the second half is the tag of GCM."""

Bytes = bytes | bytearray | memoryview


class Suite(enum.IntEnum):
    """The way tags and digests are computed; the value is the number in the header.

    - `AES256_GMAC`: slices by GMAC (NIST SP 800-38D) with AES-256 and a key for each slice, all
      else by HMAC-SHA-256. Default: five times as fast as BLAKE3 where the processor has AES.
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
        if self is Suite.BLAKE3_KEYED:
            return blake3(message, key=subkey).digest()
        if self in _SHA256:
            return hmac.digest(subkey, message, "sha256")
        return self.tag_parts(subkey, (message,))

    def tag_parts(self, subkey: bytes, parts: Iterable[Bytes]) -> bytes:
        """32-byte tag of the concatenation of `parts`, without copying them together."""
        if self in _SHA256:
            mac = hmac.new(subkey, digestmod=hashlib.sha256)
            for part in parts:
                mac.update(part)
            return mac.digest()
        if self is Suite.BLAKE3_KEYED:
            hasher = blake3(key=subkey)
        else:
            # Without a secret the public constant only separates the purposes.
            hasher = blake3(subkey)
        for part in parts:
            hasher.update(part)
        return hasher.digest()

    def tag_slice(
        self, subkey: bytes, context: bytes, body: Bytes, *, like: bytes | None = None
    ) -> bytes:
        """32-byte tag of a slice: of `context`, then of the contiguous bytes of `body`.

        `like` is the tag to compare with: where tags carry a salt, the same salt is used.
        """
        if self is not Suite.AES256_GMAC:
            return self.tag_parts(subkey, (context, body))
        salt = _new_salt() if like is None else like[:SALT_BYTES]
        # The context is bound by the key. No key is used for two messages, so that the nonce of
        # GCM can be constant, and what is learnt about one key says nothing about another.
        key = hmac.digest(subkey, salt + context, "sha256")
        return salt + gmac(key, body)


_LABELS: Final[Mapping[Suite, SuiteName]] = {
    Suite.BLAKE3_KEYED: "blake3-keyed",
    Suite.HMAC_SHA256: "hmac-sha256",
    Suite.BLAKE3: "blake3",
    Suite.AES256_GMAC: "aes256-gmac",
}
_SHA256: Final = frozenset((Suite.HMAC_SHA256, Suite.AES256_GMAC))
"""Suites whose digests are SHA-256 and whose tags are HMAC-SHA-256."""

_ONE_MESSAGE: Final = bytes(12)
"""The nonce of a key that tags one message only."""

_PIECE_BYTES: Final = 1 << 30
"""The library takes less than 2 GiB in one call."""


def _new_salt() -> bytes:
    return os.urandom(SALT_BYTES)


def gmac(key: bytes, message: Bytes) -> bytes:
    """16-byte GMAC of a message under a key of its own (32 bytes), see NIST SP 800-38D, 3.

    The key must never have tagged another message: the nonce is constant.
    """
    if len(message) <= _PIECE_BYTES:
        return AESGCM(key).encrypt(_ONE_MESSAGE, b"", message)
    state = Cipher(AES(key), GCM(_ONE_MESSAGE)).encryptor()
    view = memoryview(message)
    for start in range(0, len(view), _PIECE_BYTES):
        state.authenticate_additional_data(view[start : start + _PIECE_BYTES])
    state.finalize()
    return state.tag


def tags_equal(left: Bytes, right: Bytes) -> bool:
    """Compare two tags in time that does not depend on where they differ."""
    return hmac.compare_digest(left, right)

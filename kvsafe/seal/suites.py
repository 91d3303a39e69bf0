# SPDX-License-Identifier: Apache-2.0
"""Cipher suites: how a tag and a digest are computed.

A tag is always `F(subkey, message)` with a 32-byte subkey that belongs to one purpose.
Numbers are assigned once and never reused; they are in every chunk header.
"""

import enum
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Final

from blake3 import blake3

from kvsafe.seal.keyring import SuiteName

TAG_BYTES = 32
DIGEST_BYTES = 32

Bytes = bytes | bytearray | memoryview


class Suite(enum.IntEnum):
    """The way tags and digests are computed; the value is the number in the header.

    - `BLAKE3_KEYED`: BLAKE3 keyed hash (the BLAKE3 paper, 2021, section 2.4). Default.
    - `HMAC_SHA256`: HMAC-SHA-256 (RFC 2104, FIPS 198-1), for FIPS-minded deployments.
    - `BLAKE3`: BLAKE3 without a secret. Finds accidents, not attackers.
    """

    BLAKE3_KEYED = 1
    HMAC_SHA256 = 2
    BLAKE3 = 3

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
        if self is Suite.HMAC_SHA256:
            return hashlib.sha256(data).digest()
        return blake3(data).digest()

    def tag(self, subkey: bytes, message: Bytes) -> bytes:
        """32-byte tag of one contiguous message."""
        if self is Suite.BLAKE3_KEYED:
            return blake3(message, key=subkey).digest()
        return self.tag_parts(subkey, (message,))

    def tag_parts(self, subkey: bytes, parts: Iterable[Bytes]) -> bytes:
        """32-byte tag of the concatenation of `parts`, without copying them together."""
        if self is Suite.HMAC_SHA256:
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


_LABELS: Final[Mapping[Suite, SuiteName]] = {
    Suite.BLAKE3_KEYED: "blake3-keyed",
    Suite.HMAC_SHA256: "hmac-sha256",
    Suite.BLAKE3: "blake3",
}


def tags_equal(left: Bytes, right: Bytes) -> bool:
    """Compare two tags in time that does not depend on where they differ."""
    return hmac.compare_digest(left, right)

# SPDX-License-Identifier: Apache-2.0
"""Digests, subkeys and tags of the four suites: spec/chunk.md, section 4."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

import blake3
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

NUMBERS = {"blake3-keyed": 1, "hmac-sha256": 2, "blake3": 3, "aes256-gmac": 4}
OVER_SHA256 = ("hmac-sha256", "aes256-gmac")
PUBLIC_SECRET = hashlib.sha256(b"kvsafe 1 unkeyed: public, proves nothing").digest()
NO_KEY_ID = bytes(8)
PIECE = 1 << 24


def _hmac(key: bytes, *parts: bytes | memoryview) -> bytes:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(part)
    return mac.digest()


def key_id(secret: bytes) -> bytes:
    """The 8 bytes that name a secret key of 32 bytes."""
    return _hmac(secret, b"kvsafe 1 key id")[:8]


def ring(suite: str, secrets: Iterable[bytes]) -> dict[bytes, bytes]:
    """Key id to key: the public one in suite 3, else every one of `secrets`."""
    if suite == "blake3":
        return {NO_KEY_ID: PUBLIC_SECRET}
    return {key_id(secret): secret for secret in secrets}


def digest(suite: str, data: bytes | memoryview) -> bytes:
    """32 bytes over a document."""
    if suite in OVER_SHA256:
        return hashlib.sha256(data).digest()
    return blake3.blake3(data).digest()


def subkey(suite: str, secret: bytes, purpose: str) -> bytes:
    """The key of one purpose, `header` or `slice`."""
    text = f"kvsafe 1 subkey {suite} {purpose}".encode("ascii")
    if suite in OVER_SHA256:
        extracted = _hmac(bytes(32), secret)
        return _hmac(extracted, text, b"\x01")
    return blake3.blake3(text, key=secret).digest()


def tag(suite: str, key: bytes, *parts: bytes | memoryview) -> bytes:
    """32 bytes over the parts, one after the other."""
    if suite in OVER_SHA256:
        return _hmac(key, *parts)
    keyed = suite == "blake3-keyed"
    state = blake3.blake3(key=key) if keyed else blake3.blake3(key)
    for part in parts:
        state.update(part)
    return state.digest()


def slice_tag(suite: str, key: bytes, context: bytes, content: bytes | memoryview) -> bytes:
    """32 bytes over a slice."""
    if suite != "aes256-gmac":
        return tag(suite, key, context, content)
    return _hmac(key, b"\x02", context, _gmac(_hmac(key, b"\x01", context), content))


def _gmac(key: bytes, content: bytes | memoryview) -> bytes:
    state = Cipher(AES(key), GCM(bytes(12))).encryptor()
    for start in range(0, len(content), PIECE):
        state.authenticate_additional_data(content[start : start + PIECE])
    state.finalize()
    return state.tag

# SPDX-License-Identifier: Apache-2.0
"""Secrets, their ids and the subkeys derived from them.

A secret is never used as a tag key itself: every use has a subkey of its own purpose, so that a
header tag can never pass for a slice tag. Two kinds of secret exist:

* a *seal key* (`SealKey`) tags chunks (purposes `header`, `slice`); it rotates, and the older ones
  stay readable while they are in the ring;
* the *name secret* names objects and tags our own state files (purposes `name`, `state`); it does
  not rotate, because a new one would make every stored object unfindable and every state file
  foreign.
"""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal, NoReturn, get_args

from blake3 import blake3
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SuiteName = Literal["aes256-gmac", "blake3-keyed", "hmac-sha256", "blake3"]
SealPurpose = Literal["header", "slice"]
StablePurpose = Literal["name", "state"]
Purpose = Literal["header", "slice", "name", "state"]

DEFAULT_SUITE: Final[SuiteName] = "aes256-gmac"
"""See spec/decisions/0010 for why."""

SECRET_BYTES: Final = 32
KEY_ID_BYTES: Final = 8
MAX_KEYS: Final = 64
"""Most keys one ring (and one key file) may hold."""

UNKEYED_ID: Final = bytes(KEY_ID_BYTES)
"""Key id of the unkeyed suite. No real key has it: an unkeyed chunk finds none in a keyed ring."""

_UNKEYED_SECRET: Final = hashlib.sha256(b"kvsafe 1 unkeyed: public, proves nothing").digest()
_UNKEYED_NAME_SECRET: Final = hashlib.sha256(b"kvsafe 1 unkeyed names: public").digest()
_KEYED_SUITES: Final = ("aes256-gmac", "blake3-keyed", "hmac-sha256")
_HKDF_SUITES: Final = ("aes256-gmac", "hmac-sha256")
_SEAL_PURPOSES: Final[tuple[SealPurpose, ...]] = get_args(SealPurpose)
_STABLE_PURPOSES: Final[tuple[StablePurpose, ...]] = get_args(StablePurpose)
_MIN_DISTINCT_BYTES: Final = 8


class KeyringError(ValueError):
    """Misuse of keys by our own code. The text never holds a secret."""


def key_id_of(secret: bytes) -> bytes:
    """Return the 8-byte id of `secret`: HMAC-SHA256 of a fixed text under it, cut.

    The same in every suite, so that one key file serves them all; one-way, so that an id in a
    header or a log gives nothing of the secret away.
    """
    return hmac.digest(secret, b"kvsafe 1 key id", "sha256")[:KEY_ID_BYTES]


def weakness_of(secret: bytes) -> str | None:
    """Say why `secret` is no secret (wrong length, a repeated or counted pattern), or None.

    It finds placeholders, not poor randomness: a password of 32 letters passes.
    """
    if len(secret) != SECRET_BYTES:
        return f"it has {len(secret)} bytes, not {SECRET_BYTES}"
    if len(set(secret)) < _MIN_DISTINCT_BYTES:
        return f"it has fewer than {_MIN_DISTINCT_BYTES} different bytes"
    if len({(b - a) % 256 for a, b in pairwise(secret)}) == 1:
        return "its bytes are a counted sequence"
    if key_id_of(secret) == UNKEYED_ID:
        return "its id is the reserved one of the unkeyed suite"
    return None


def derive_subkey(secret: bytes, suite: SuiteName, purpose: Purpose) -> bytes:
    """Derive the 32-byte subkey of `secret` for one purpose.

    `aes256-gmac` and `hmac-sha256` use HKDF-SHA256 (RFC 5869, no salt); the BLAKE3 suites use keyed
    BLAKE3 over the purpose. The suite is part of the context: no subkey is shared between suites.
    """
    context = f"kvsafe 1 subkey {suite} {purpose}".encode()
    if suite in _HKDF_SUITES:
        return HKDF(SHA256(), SECRET_BYTES, salt=None, info=context).derive(secret)
    return blake3(context, key=secret).digest(SECRET_BYTES)


def name_secret_from(secret: bytes) -> bytes:
    """Derive a name secret from a seal key, for sources that hold one secret only (environment).

    Names then change with the key: rotating such a key makes every stored object unfindable.
    """
    return hmac.digest(secret, b"kvsafe 1 name secret", "sha256")


@dataclass(frozen=True, slots=True, repr=False)
class SealKey:
    """A key that tags chunks: `key_id` (8 bytes, goes into headers) and `secret` (32 bytes).

    Compared by id. Raises `KeyringError` when the lengths are wrong or the id is not the secret's.
    """

    key_id: bytes
    secret: bytes = field(compare=False)

    def __post_init__(self) -> None:
        if len(self.key_id) != KEY_ID_BYTES or len(self.secret) != SECRET_BYTES:
            raise KeyringError(f"a key has {KEY_ID_BYTES} bytes of id and {SECRET_BYTES} of secret")
        unkeyed = self.key_id == UNKEYED_ID and self.secret == _UNKEYED_SECRET
        if not unkeyed and self.key_id != key_id_of(self.secret):
            raise KeyringError(f"key id {self.key_id.hex()} does not belong to its secret")

    @classmethod
    def of(cls, secret: bytes) -> "SealKey":
        """Make the key of a 32-byte secret. Raises `KeyringError` for a placeholder."""
        weakness = weakness_of(secret)
        if weakness is not None:
            raise KeyringError(f"not usable as a secret: {weakness}")
        return cls(key_id_of(secret), secret)

    def __repr__(self) -> str:
        return f"SealKey({self.key_id.hex()})"

    def __reduce__(self) -> NoReturn:
        raise KeyringError("a key is not pickled: each process reads the key file itself")


class Keyring:
    """The active key, the older ones that stay readable, and the name secret.

    Immutable. Every subkey is derived once, here, so that the hot path is one look-up.
    """

    __slots__ = ("_active", "_keys", "_seal_subkeys", "_stable_subkeys", "_suite")

    def __init__(
        self,
        suite: SuiteName,
        active: SealKey,
        *,
        name_secret: bytes,
        older: Iterable[SealKey] = (),
    ) -> None:
        """Raises `KeyringError` for a mix of keyed and unkeyed, twice the same key, or too many."""
        keys = (active, *older)
        self._suite: SuiteName = suite
        self._active = active
        self._keys = {key.key_id: key for key in keys}
        _check_ring(suite, keys, len(self._keys), name_secret)
        self._seal_subkeys = {
            (key.key_id, purpose): derive_subkey(key.secret, suite, purpose)
            for key in keys
            for purpose in _SEAL_PURPOSES
        }
        self._stable_subkeys = {
            purpose: derive_subkey(name_secret, suite, purpose) for purpose in _STABLE_PURPOSES
        }

    @classmethod
    def unkeyed(cls) -> "Keyring":
        """The ring of suite `blake3`: public constants. Finds accidents, stops nobody."""
        key = SealKey(UNKEYED_ID, _UNKEYED_SECRET)
        return cls("blake3", key, name_secret=_UNKEYED_NAME_SECRET)

    @property
    def suite(self) -> SuiteName:
        """The suite that all subkeys of this ring are for."""
        return self._suite

    @property
    def active(self) -> SealKey:
        """The key that new chunks are sealed with."""
        return self._active

    @property
    def key_ids(self) -> tuple[bytes, ...]:
        """Ids of all keys, the active one first."""
        return tuple(self._keys)

    @property
    def name_secret(self) -> bytes:
        """The 32-byte key for object names; the same before and after a rotation.

        It is the `name` subkey, not the stored secret, which leaves this class in no form.
        """
        return self._stable_subkeys["name"]

    @property
    def state_secret(self) -> bytes:
        """The 32-byte key for tags over our own state files; survives rotation as well."""
        return self._stable_subkeys["state"]

    def get(self, key_id: bytes) -> SealKey | None:
        """The key with this id, or None. Ids come from foreign headers: any bytes are fine."""
        return self._keys.get(key_id)

    def subkey(self, key: SealKey, purpose: SealPurpose) -> bytes:
        """The 32-byte subkey of a key of this ring. Raises `KeyringError` for a foreign key."""
        try:
            return self._seal_subkeys[key.key_id, purpose]
        except KeyError:
            raise KeyringError(f"no {purpose!r} subkey for {key!r} in this ring") from None

    def __repr__(self) -> str:
        ids = ", ".join(key_id.hex() for key_id in self._keys)
        return f"Keyring({self._suite}, active first: {ids})"

    def __reduce__(self) -> NoReturn:
        raise KeyringError("a ring is not pickled: each process reads the key file itself")


def _check_ring(
    suite: SuiteName, keys: tuple[SealKey, ...], distinct: int, name_secret: bytes
) -> None:
    if suite not in get_args(SuiteName):
        raise KeyringError(f"unknown suite {suite!r}")
    if distinct != len(keys):
        raise KeyringError("the same key twice in one ring")
    if len(keys) > MAX_KEYS:
        raise KeyringError(f"{len(keys)} keys in one ring, at most {MAX_KEYS}")
    if len(name_secret) != SECRET_BYTES:
        raise KeyringError(f"the name secret must have {SECRET_BYTES} bytes")
    for key in keys:
        if (key.key_id != UNKEYED_ID) is not (suite in _KEYED_SUITES):
            raise KeyringError(f"{key!r} does not fit suite {suite!r}: keyed and unkeyed never mix")

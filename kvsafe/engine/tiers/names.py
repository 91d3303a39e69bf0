# SPDX-License-Identifier: Apache-2.0
"""Object names: what a tier may know a chunk by.

A tier's listing must not confirm a guessed prompt, so a name is a keyed tag and not the
block hash. The identity goes into the name as well: chunks of two models, or of one model
before and after a changed setting, lie side by side, and changing back finds the old ones.
The header still says everything; a name is only where to look.
"""

from dataclasses import dataclass

from kvsafe.engine.rows.epochs import PRIVATE_EPOCH
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.refusal import Refusal
from kvsafe.seal.suites import Suite

GROUP_BYTES = 4
"""An offload key ends with its group index; names keep it, because tiers file by it."""

_CACHE_LIMIT = 65536
_LABEL = b"kvsafe 1 object name"


def object_name(suite: Suite, name_secret: bytes, identity_digest: bytes, key: bytes) -> bytes:
    """The name of a chunk, as long as its key, ending with the same group index."""
    tag = suite.tag_parts(name_secret, (_LABEL, identity_digest, key))
    length = len(key) - GROUP_BYTES
    return tag[:length].ljust(length, b"\0") + key[length:]


@dataclass(frozen=True, slots=True)
class ForeignNames:
    """Names under another identity that was used with this state folder, and its refusal."""

    suite: Suite
    name_secret: bytes
    identity_digest: bytes
    refusal: Refusal

    def name(self, key: bytes) -> bytes:
        """The name that an engine of that identity gives the chunk."""
        return object_name(self.suite, self.name_secret, self.identity_digest, key)


class ObjectNames:
    """Names for one engine, cached; `foreign` holds the other identities worth asking for."""

    def __init__(
        self,
        suite: Suite,
        keyring: Keyring,
        identity_digest: bytes,
        foreign: tuple[ForeignNames, ...] = (),
    ) -> None:
        self._suite = suite
        self._secret = keyring.name_secret
        self._identity_digest = identity_digest
        self._cache: dict[bytes, bytes] = {}
        self._base = identity_digest
        self.foreign = foreign

    def follow(self, epoch: int) -> None:
        """In a private epoch, names are this launch's alone as well: nobody else's are met."""
        private = epoch.to_bytes(8, "little") if epoch & PRIVATE_EPOCH else b""
        self._identity_digest = self._base + private
        self._cache.clear()

    def name(self, key: bytes) -> bytes:
        """The object name of an offload key."""
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= _CACHE_LIMIT:
                self._cache.clear()
            found = object_name(self._suite, self._secret, self._identity_digest, key)
            self._cache[key] = found
        return found

# SPDX-License-Identifier: Apache-2.0
"""The chunks on a peers' server towards the proofs of this engine: keys, and refused ones."""

from collections import OrderedDict
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey

from kvsafe.engine.journal import logger
from kvsafe.engine.lmcache.names import ChunkNames
from kvsafe.engine.lmcache.rows import RowMover
from kvsafe.engine.tiers.names import ObjectNames
from kvsafe.engine.tiers.objects import NOT_THE_OBJECTS_FAULT, NoteObject
from kvsafe.seal.refusal import Refusal, RefusalKind

_REMEMBERED = 65536


class OwnKeys(ObjectNames):
    """Names for a tier that makes its own from the requests' tokens: the keys as they are."""

    def __init__(self, names: ObjectNames) -> None:
        self._names = names
        self.foreign = ()

    def follow(self, epoch: int) -> None:
        """The names behind follow by themselves."""

    def name(self, key: bytes) -> bytes:
        """The key."""
        return key


class PeerObjects:
    """The chunks of a peers' server as `ProvingTier` handles refused ones."""

    def __init__(self, mover: RowMover, *, remove: bool) -> None:
        self._mover = mover
        self._remove = remove
        self._places: OrderedDict[OffloadKey, ChunkNames] = OrderedDict()
        self.bad: OrderedDict[bytes, None] = OrderedDict()
        self.on_refusal: NoteObject | None = None
        self._epochs_told = False

    def place(self, key: OffloadKey, names: ChunkNames) -> None:
        """Note where a chunk comes from that is about to be opened."""
        self._places[key] = names
        _forget_oldest(self._places)

    def spoil(self, names: ChunkNames) -> None:
        """What lies there is refused: the next store of this chunk writes it anew."""
        self.bad[names.label] = None
        _forget_oldest(self.bad)

    def exists(self, name: OffloadKey) -> bool:
        """Not asked: no other identity's chunks are looked for here."""
        return False

    def quarantine(self, name: OffloadKey, refusal: Refusal) -> bool:
        """Remove what was refused, where the server can, or have it written anew."""
        self._tell_of_epochs(refusal)
        names = self._places.get(name)
        if names is None or refusal.kind in NOT_THE_OBJECTS_FAULT:
            return False
        self.spoil(names)
        # Only of wrong bytes the chunk is guilty; other peers may read it as well.
        chunk = refusal.kind is RefusalKind.PAYLOAD_TAG
        return self._remove and self._mover.remove(names, chunk=chunk)

    def _tell_of_epochs(self, refusal: Refusal) -> None:
        """Say once what to do about chunks of another epoch: every one of them is refused."""
        kinds = (RefusalKind.EPOCH_REVOKED, RefusalKind.EPOCH_UNKNOWN)
        if self._epochs_told or refusal.kind not in kinds:
            return
        self._epochs_told = True
        logger.warning(
            "kvsafe: a chunk on the peers' server was sealed in epoch %s, this engine is in %s. "
            "After a reset that is as it should be. Otherwise engines that share this server keep "
            "epochs of their own, and none can use the chunks of another: give all of them one "
            "epoch_file (spec/lmcache.md)",
            refusal.found,
            refusal.expected,
        )


def _forget_oldest(held: OrderedDict[Any, Any]) -> None:
    while len(held) > _REMEMBERED:
        held.popitem(last=False)

# SPDX-License-Identifier: Apache-2.0
"""The present epoch of this process, backed by the epoch file.

A reset usually comes with new weights: an update in memory that the files do not show. What
this launch seals after it belongs to weights that no other launch may have, nor this one after
a restart from the files. So a reset raises the persistent epoch for everybody else, and this
launch goes on in a private epoch of its own, a random number with the top bit set, which is
never written down: its chunks are found and accepted by this launch alone.
"""

import secrets
import time
from collections.abc import Callable

from kvsafe.engine.journal import logger
from kvsafe.seal.epoch import EpochError, EpochFile

PRIVATE_EPOCH = 1 << 63
"""Set in every private epoch; persistent ones stay below it."""

_POLL_S = 1.0


class EpochKeeper:
    """Holds the present epoch; a raise is persisted before it counts as done.

    Attributes:
        epoch: the number that chunks are sealed and opened with now.
        persistent: the number in the epoch file.
        certain: False after a raise that could not be persisted, or when the file no longer
            reads: a number that a restart would not know must neither seal nor serve.
    """

    def __init__(
        self,
        file: EpochFile,
        announce: Callable[[int], None],
        *,
        weights_survive_reset: bool = False,
    ) -> None:
        """`announce` tells everyone in this engine every new number.

        `weights_survive_reset`: resets only empty the cache, so no private epoch is needed.
        """
        self._file = file
        self._announce = announce
        self._weights_survive_reset = weights_survive_reset
        self._private = False
        self._next_poll = 0.0
        self.persistent = file.read()
        self.epoch = self.persistent
        self.certain = True
        announce(self.epoch)

    def raise_epoch(self, reason: str) -> bool:
        """Revoke everything sealed so far. False if the new number could not be persisted."""
        try:
            found = self._file.raise_epoch(reason)
        except EpochError as exc:
            self._doubt(exc)
            return False
        self.certain = True
        self._private = not self._weights_survive_reset
        self._move(found)
        logger.info("kvsafe: epoch is now %d (%s)", found, reason)
        return True

    def poll(self) -> None:
        """See, about once a second, whether another process has raised the epoch."""
        now = time.monotonic()
        if now < self._next_poll or not self.certain:
            return
        self._next_poll = now + _POLL_S
        try:
            found = self._file.poll()
        except EpochError as exc:
            self._doubt(exc)
            return
        if found != self.persistent:
            logger.info("kvsafe: another process raised the epoch to %d", found)
            self._move(found)

    def _move(self, persistent: int) -> None:
        self.persistent = persistent
        self.epoch = PRIVATE_EPOCH | secrets.randbits(62) if self._private else persistent
        self._announce(self.epoch)

    def _doubt(self, exc: EpochError) -> None:
        self.certain = False
        logger.error(
            "kvsafe: the epoch is not certain, nothing is offered or stored until a reset "
            "succeeds: %s",
            exc,
        )

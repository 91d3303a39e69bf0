# SPDX-License-Identifier: Apache-2.0
"""The present epoch of this process, backed by the epoch file."""

import time
from collections.abc import Callable

from kvsafe.engine.journal import logger
from kvsafe.seal.epoch import EpochError, EpochFile

_POLL_S = 1.0


class EpochKeeper:
    """Holds the present epoch; a raise is persisted before it counts as done.

    Attributes:
        epoch: the present number.
        certain: False after a raise that could not be persisted, or when the file no longer
            reads: a number that a restart would not know must neither seal nor serve.
    """

    def __init__(self, file: EpochFile, announce: Callable[[int], None]) -> None:
        """`announce` tells the other processes of this engine every new number."""
        self._file = file
        self._announce = announce
        self._next_poll = 0.0
        self.epoch = file.read()
        self.certain = True
        announce(self.epoch)

    def raise_epoch(self, reason: str) -> bool:
        """Revoke everything sealed so far. False if the new number could not be persisted."""
        try:
            self.epoch = self._file.raise_epoch(reason)
        except EpochError as exc:
            self._doubt(exc)
            return False
        self.certain = True
        self._announce(self.epoch)
        logger.info("kvsafe: epoch is now %d (%s)", self.epoch, reason)
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
        if found != self.epoch:
            logger.info("kvsafe: another process raised the epoch to %d", found)
            self.epoch = found
            self._announce(found)

    def _doubt(self, exc: EpochError) -> None:
        self.certain = False
        logger.error(
            "kvsafe: the epoch is not certain, nothing is offered or stored until a reset "
            "succeeds: %s",
            exc,
        )

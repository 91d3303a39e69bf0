# SPDX-License-Identifier: Apache-2.0
"""Log lines of kvsafe: numbers and key prefixes, never tokens or KV."""

import logging
import time

from kvsafe.seal.refusal import Refusal

logger = logging.getLogger("kvsafe")

_WINDOW_S = 10.0
_PER_WINDOW = 20


def key_prefix(key: bytes) -> str:
    """The part of a key that may be logged: enough to find a chunk, not to name a prompt."""
    return key[:6].hex()


class RefusalJournal:
    """Logs refusals, a bounded number per window so that an attack cannot fill a disk."""

    def __init__(self) -> None:
        self._since = 0.0
        self._lines = 0
        self._dropped = 0

    def note(self, refusal: Refusal, key: bytes, tier: str) -> None:
        """Log one refusal, or count it as dropped when the window is full."""
        now = time.monotonic()
        if now - self._since > _WINDOW_S:
            if self._dropped:
                logger.warning("kvsafe: %d more refusals were not logged", self._dropped)
            self._since, self._lines, self._dropped = now, 0, 0
        if self._lines >= _PER_WINDOW:
            self._dropped += 1
            return
        self._lines += 1
        logger.warning("kvsafe: tier %s, chunk %s: %s", tier, key_prefix(key), refusal)


def adopt_vllm_handlers() -> None:
    """Let kvsafe's lines go where vLLM's go, unless the operator set up something else."""
    if logger.handlers:
        return
    vllm_logger = logging.getLogger("vllm")
    for handler in vllm_logger.handlers:
        logger.addHandler(handler)
    if vllm_logger.handlers:
        logger.setLevel(vllm_logger.level or logging.INFO)
        logger.propagate = False

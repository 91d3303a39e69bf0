# SPDX-License-Identifier: Apache-2.0
"""Log lines of kvsafe: numbers and key prefixes, never tokens or KV."""

import logging
import time
from collections.abc import Callable

from kvsafe.seal.refusal import Refusal

logger = logging.getLogger("kvsafe")

_WINDOW_S = 10.0
_PER_WINDOW = 20


class RefusalJournal:
    """Logs refusals, a bounded number per window so that an attack cannot fill a disk.

    A chunk is logged by the prefix of its object name, which is a keyed tag and what its file
    is called: the prefix of a key is a block hash, and would confirm a guessed prompt to whoever
    reads the log.
    """

    def __init__(self, name_of: Callable[[bytes], bytes]) -> None:
        self._name_of = name_of
        self._since = 0.0
        self._lines = 0
        self._dropped = 0

    def note(self, refusal: Refusal, key: bytes, tier: str) -> None:
        """Log one refusal of the chunk with this key (empty: of no chunk in particular)."""
        self.note_name(refusal, self._name_of(key) if key else b"", tier)

    def note_name(self, refusal: Refusal, name: bytes, tier: str) -> None:
        """Log one refusal by object name, or count it as dropped when the window is full."""
        now = time.monotonic()
        if now - self._since > _WINDOW_S:
            if self._dropped:
                logger.warning("kvsafe: %d more refusals were not logged", self._dropped)
            self._since, self._lines, self._dropped = now, 0, 0
        if self._lines >= _PER_WINDOW:
            self._dropped += 1
            return
        self._lines += 1
        logger.warning("kvsafe: tier %s, chunk %s: %s", tier, name[:6].hex() or "-", refusal)


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

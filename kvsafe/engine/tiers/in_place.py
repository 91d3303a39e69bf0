# SPDX-License-Identifier: Apache-2.0
"""Rows of our own disk tier, opened in the thread that has just read them.

A row that was read a moment ago is still in the processor's cache, and handing it to another
thread costs as much as opening a small one. So `kvsafe-fs` has each row opened where it was read,
in the thread's own buffer, by the code that opens every promotion, then copies it into its place,
and says so. Only its own class is asked to: of any other tier nobody knows what it does to a row
after it has said so, and its rows are opened when its job has ended. What was not accepted here is
opened then as well.
"""

from collections.abc import Callable, Mapping

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvsafe.engine.fs.tier import KVSafeFsTier
from kvsafe.engine.journal import logger
from kvsafe.engine.tiers.promotion import Promotion
from kvsafe.seal.refusal import Refusal

OpenBytes = Callable[[OffloadKey, memoryview], Refusal | None]


class InPlace:
    """Opens for the promotions of one tier. Used by the tier's threads."""

    def __init__(self, promotions: Mapping[int, Promotion], open_bytes: OpenBytes) -> None:
        self._promotions = promotions
        self._open_bytes = open_bytes

    def open(self, job: int, place: int, row: int, data: memoryview) -> bool:
        """Whether this is what the promotion waits for at this place, in this row."""
        promotion = self._promotions.get(job)
        if promotion is None:  # given up: nobody waits for it
            return False
        try:
            key = promotion.order[place]
            if promotion.keys[key] != row or self._open_bytes(key, data) is not None:
                return False
            promotion.right.add(key)
            return True
        except Exception as exc:  # it is opened again when the job has ended, and refused there
            logger.error("kvsafe: a row was not opened in place: %s", type(exc).__name__)
            return False

    def filled(self, job: int, places: list[int]) -> None:
        """Bytes that were right have been copied into their rows."""
        promotion = self._promotions.get(job)
        if promotion is not None:
            filled = {promotion.order[place] for place in places}
            promotion.opened |= filled & promotion.right


def open_in_place(
    tier: SecondaryTierManager, promotions: Mapping[int, Promotion], open_bytes: OpenBytes
) -> None:
    """Have rows of `promotions` opened by `tier`'s threads, if it is ours."""
    if type(tier) is KVSafeFsTier:
        tier.in_place = InPlace(promotions, open_bytes)

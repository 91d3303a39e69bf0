# SPDX-License-Identifier: Apache-2.0
"""Rows of our own disk tier, opened in the thread that has just read them.

A row that was read a moment ago is still in the processor's cache, and handing it to another
thread costs as much as opening a small one. So `kvsafe-fs` has rows opened where they were read,
in the thread's own buffers, all of a batch together (`Openings`), then copies them into their
places, and says so. Only its own class is asked to: of any other tier nobody knows what it does to
a row after it has said so, and its rows are opened when its job has ended. What was not accepted
here is opened then as well.
"""

from collections.abc import Mapping

from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvsafe.engine.fs.tier import KVSafeFsTier
from kvsafe.engine.journal import logger
from kvsafe.engine.tiers.openings import Openings
from kvsafe.engine.tiers.promotion import Promotion


class InPlace:
    """Opens for the promotions of one tier. Used by the tier's threads."""

    def __init__(self, promotions: Mapping[int, Promotion], openings: Openings) -> None:
        self._promotions = promotions
        self._openings = openings

    def open(
        self, job: int, places: list[int], rows: list[int], data: list[memoryview]
    ) -> list[int]:
        """The places where this is what the promotion waits for, in the row that it waits for."""
        promotion = self._promotions.get(job)
        if promotion is None:  # given up: nobody waits for it
            return []
        try:
            return self._right(promotion, places, rows, data)
        except Exception as exc:  # they are opened again when the job has ended, and refused there
            logger.error("kvsafe: rows were not opened in place: %s", type(exc).__name__)
            return []

    def _right(
        self, promotion: Promotion, places: list[int], rows: list[int], data: list[memoryview]
    ) -> list[int]:
        order = promotion.order
        asked = [
            (place, order[place], bytes_read)
            for place, row, bytes_read in zip(places, rows, data, strict=True)
            if promotion.keys[order[place]] == row
        ]
        right = self._openings.right([key for _, key, _ in asked], [one for _, _, one in asked])
        good = [(place, key) for (place, key, _), well in zip(asked, right, strict=True) if well]
        promotion.right.update(key for _, key in good)
        return [place for place, _ in good]

    def filled(self, job: int, places: list[int]) -> None:
        """Bytes that were right have been copied into their rows."""
        promotion = self._promotions.get(job)
        if promotion is not None:
            filled = {promotion.order[place] for place in places}
            promotion.opened |= filled & promotion.right


def open_in_place(
    tier: SecondaryTierManager, promotions: Mapping[int, Promotion], openings: Openings
) -> None:
    """Have rows of `promotions` opened by `tier`'s threads, if it is ours."""
    if type(tier) is KVSafeFsTier:
        tier.in_place = InPlace(promotions, openings)

# SPDX-License-Identifier: Apache-2.0
"""Rows of our own disk tier, opened in the thread that has just filled them.

A row that was read a moment ago is still in the processor's cache, and handing it to another
thread costs as much as opening a small one. So `kvsafe-fs` says when it has filled a row, and
the row is opened there and then, by the code that opens every promotion. Only its own class is
asked to: of any other tier nobody knows what it does to a row after it has said so, and its rows
are opened when its job has ended. What was not accepted here is opened then as well.
"""

from collections.abc import Callable, Mapping

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvsafe.engine.fs.tier import KVSafeFsTier
from kvsafe.engine.journal import logger
from kvsafe.engine.tiers.promotion import Promotion
from kvsafe.seal.refusal import Refusal


def open_in_place(
    tier: SecondaryTierManager,
    promotions: Mapping[int, Promotion],
    open_row: Callable[[OffloadKey, int], Refusal | None],
) -> None:
    """Have rows of `promotions` opened by `tier`'s threads, if it is ours."""
    if type(tier) is not KVSafeFsTier:
        return

    def filled(job: int, place: int) -> None:
        promotion = promotions.get(job)
        if promotion is None:  # given up: nobody waits for it
            return
        key = promotion.order[place]
        try:
            if open_row(key, promotion.keys[key]) is None:
                promotion.opened.add(key)
        except Exception as exc:  # it is opened again when the job has ended, and refused there
            logger.error("kvsafe: a row was not opened in place: %s", type(exc).__name__)

    tier.on_filled = filled

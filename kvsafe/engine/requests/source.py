# SPDX-License-Identifier: Apache-2.0
"""At the source: a block is stored under a key only if nothing says that it holds something else.

vLLM's block pool knows the content of full blocks by hash. And its scheduler half keeps the block
table of a request right for chunks that were not offered yet; when it offers older ones again, as
it does with the last window of a request that has ended, their entries can name blocks that were
given up long ago.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.v1.kv_offload.base import OffloadKey

from kvsafe.engine.rows.placer import Placer
from kvsafe.engine.rows.transfer import SlotBlocks
from kvsafe.seal.refusal import Refusal, RefusalKind


class SourceCheck:
    """Judges the blocks of one scheduler half's stores."""

    def __init__(
        self,
        config: SchedulerOffloadConfig,
        requests: Mapping[str, RequestOffloadState],
        placer: Placer,
        windowed: tuple[int, ...],
    ) -> None:
        """`windowed`: the groups that give up blocks while a request runs."""
        self._config = config
        self._requests = requests
        self._placer = placer
        self._windowed = windowed
        self._offered: dict[str, tuple[int, ...]] = {}

    def note_offers(self, requests: Iterable[str]) -> None:
        """Before vLLM chooses what to store: how far each of these was offered already."""
        if not self._windowed:
            return
        self._offered = {
            req_id: tuple(state.next_stored_chunk_idx for state in status.group_states)
            for req_id in requests
            if (status := self._requests.get(req_id)) is not None
        }

    def judge(self, pool: Any, req_id: str, key: OffloadKey, blocks: SlotBlocks) -> Refusal | None:
        """Why the chunk of `key` must not be stored from these blocks, or None."""
        status = self._requests.get(req_id)
        found = self._placer.find_chunk(req_id, key)
        if pool is None or status is None or found is None:
            return None
        index, chunk = found
        if index not in self._placer.hashed_groups:
            return None
        config = self._config.kv_group_configs[index]
        per_block = config.tokens_per_block // self._config.tokens_per_hash
        again = index in self._windowed and chunk < self._offered_before(req_id, index)
        for slot, block in blocks:
            at = (chunk * self._config.blocks_per_chunk + slot + 1) * per_block - 1
            refusal = compare_source(
                pool, block, status.req.block_hashes, at, group=config.group_idx, sure=again
            )
            if refusal is not None:
                return refusal
        return None

    def _offered_before(self, req_id: str, index: int) -> int:
        offered = self._offered.get(req_id)
        return 0 if offered is None else offered[index]


def compare_source(
    pool: Any,
    block: int,
    block_hashes: Sequence[bytes],
    at: int,
    *,
    group: int = 0,
    sure: bool = False,
) -> Refusal | None:
    """Whether a block holds block `at` of a request, as far as the pool knows.

    `sure`: what the pool does not know is refused too.
    """
    held = pool.blocks[block]
    known = held.block_hash
    if (known is None or at >= len(block_hashes)) and not sure:
        return None
    expected = block_hashes[at] + group.to_bytes(4, "big") if at < len(block_hashes) else b""
    if known == expected or expected in pool.cached_block_hashes_by_block.get(block, ()):
        return None
    return Refusal.of(
        RefusalKind.SOURCE_HASH, f"block[{block}]", "the block of the key", "another block"
    )

# SPDX-License-Identifier: Apache-2.0
"""Sliding windows: blocks that a request has given up, and chunks that hold only a part.

vLLM frees a block when the window has passed it, and tells nobody; a chunk of several blocks
whose first ones were free when it was stored has holes. Here is what follows from that: which
blocks of a load must have been written, and which entries of a block table still mean anything.
"""

from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.v1.kv_cache_interface import SlidingWindowSpec


def windowed_groups(config: SchedulerOffloadConfig) -> tuple[int, ...]:
    """Indices of the groups that give up blocks while a request runs."""
    return tuple(
        index
        for index, group in enumerate(config.kv_group_configs)
        if group.sliding_window_size_in_chunks is not None
    )


def first_kept_token(group: GroupOffloadConfig, computed: int) -> int:
    """The first token whose block is kept once `computed` tokens are there."""
    spec: Any = group.kv_cache_spec
    if not isinstance(spec, SlidingWindowSpec):
        return 0
    return max(0, computed - int(spec.sliding_window) + 1 - int(spec.extra_retained_tokens))


def wanted_slots(
    group: GroupOffloadConfig, blocks_per_chunk: int, local: int, total: int
) -> Iterator[tuple[int, range]]:
    """(chunk, slots in it) that a load from `local` to `total` tokens reads of a group."""
    size = group.tokens_per_block
    first = max(first_kept_token(group, total) // size, -(-local // size))
    last = -(-total // size)
    for chunk in range(first // blocks_per_chunk, -(-last // blocks_per_chunk)):
        base = chunk * blocks_per_chunk
        yield chunk, range(max(first - base, 0), min(last - base, blocks_per_chunk))


def give_up_stored_blocks(status: RequestOffloadState, windowed: tuple[int, ...]) -> None:
    """Before a request's chunks are offered again from the first one on.

    vLLM looks after the entries of chunks that were not yet offered. Those before them may name
    blocks that were given up and belong to others by now; they become holes.
    """
    for index in windowed:
        state = status.group_states[index]
        offered = state.next_stored_chunk_idx * status.config.blocks_per_chunk
        for place in range(min(offered, len(state.block_ids))):
            state.block_ids[place] = 0

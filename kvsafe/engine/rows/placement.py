# SPDX-License-Identifier: Apache-2.0
"""Placement: which device block goes with which slot of which row, said outright.

vLLM describes a transfer by a flat list of block ids, sizes per group and one first index
per group. That is enough for a run without holes and not for one with holes: blocks that a
sliding window has dropped, or chunks in the middle that are stored already. Here the exact
pairs are derived from what the scheduler half knows and compared with the flat list; when
they do not agree the transfer is withheld instead of guessed.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvsafe.engine.rows.transfer import SlotBlocks
from kvsafe.seal.refusal import Refusal, RefusalKind


class FlatBlocks(NamedTuple):
    """vLLM's form of one side of a transfer.

    Attributes:
        block_ids: device blocks, group after group.
        group_sizes: how many of them belong to each group.
        block_indices: index, in the request, of each group's first block.
    """

    block_ids: Sequence[int]
    group_sizes: Sequence[int]
    block_indices: Sequence[int]

    def runs(self) -> Iterator[tuple[int, int, Sequence[int]]]:
        """(group, index of the first block, blocks) for every group with blocks."""
        start = 0
        sizes = zip(self.group_sizes, self.block_indices, strict=True)
        for group, (size, index) in enumerate(sizes):
            if size:
                yield group, index, self.block_ids[start : start + size]
            start += size


def place_run(flat: FlatBlocks, blocks_per_chunk: int) -> list[tuple[int, SlotBlocks]]:
    """Place a transfer without holes: (group, slots and blocks) per chunk, in key order."""
    placed: list[tuple[int, SlotBlocks]] = []
    for group, index, blocks in flat.runs():
        chunk: list[tuple[int, int]] = []
        for offset, block in enumerate(blocks):
            slot = (index + offset) % blocks_per_chunk
            if slot == 0 and chunk:
                placed.append((group, tuple(chunk)))
                chunk = []
            chunk.append((slot, block))
        placed.append((group, tuple(chunk)))
    return placed


def run_chunks(flat: FlatBlocks, blocks_per_chunk: int) -> list[tuple[int, int]]:
    """(group, index of the chunk in the request) of each chunk that `place_run` places."""
    return [
        (group, chunk)
        for group, index, blocks in flat.runs()
        for chunk in range(
            index // blocks_per_chunk, (index + len(blocks) - 1) // blocks_per_chunk + 1
        )
    ]


def place_single_blocks(flat: FlatBlocks, blocks_per_chunk: int) -> list[tuple[int, SlotBlocks]]:
    """Place a transfer of one block per key, as vLLM hands over state at boundaries."""
    return [
        (group, (((index + offset) % blocks_per_chunk, block),))
        for group, index, blocks in flat.runs()
        for offset, block in enumerate(blocks)
    ]


def chunk_blocks(block_ids: Sequence[int], chunk: int, blocks_per_chunk: int) -> SlotBlocks:
    """Slots and blocks of one chunk of a request; block 0 marks a slot that is not there."""
    start = chunk * blocks_per_chunk
    window = block_ids[start : start + blocks_per_chunk]
    return tuple((slot, block) for slot, block in enumerate(window) if block != 0)


def disagreement(what: str, expected: object, found: object) -> Refusal:
    """A transfer whose two descriptions do not say the same."""
    return Refusal.of(RefusalKind.COPY_PLAN, what, expected, found)

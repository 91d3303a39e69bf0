# SPDX-License-Identifier: Apache-2.0
"""Accelerator memory in which every block holds whose KV it is, and a model that looks."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fuzz.world.content import Numbers, Script
from fuzz.world.outcome import WrongWorld
from fuzz.world.plan import BLOCK_TOKENS, Setting

NUMBER_BYTES = 8
PAGE_BYTES = BLOCK_TOKENS * NUMBER_BYTES


class Device:
    """Blocks of `BLOCK_TOKENS` numbers each; all groups share the blocks, as in vLLM.

    Attributes:
        tensor: int8, shape (blocks, PAGE_BYTES): what a worker registers.
        numbers: int64, shape (blocks, BLOCK_TOKENS): the same memory.
    """

    def __init__(self, blocks: int) -> None:
        self.numbers: Numbers = np.zeros((blocks, BLOCK_TOKENS), dtype=np.int64)
        flat = torch.from_numpy(self.numbers.reshape(-1)).view(torch.int8)
        self.tensor = flat.view(blocks, PAGE_BYTES)

    def span(self, table: Sequence[int], first: int, last: int) -> Numbers:
        """The numbers that a block table holds for positions `first` to `last`, not included."""
        begin, end = first // BLOCK_TOKENS, -(-last // BLOCK_TOKENS)
        held = self.numbers[list(table[begin:end])].reshape(-1)
        offset = first - begin * BLOCK_TOKENS
        return held[offset : offset + last - first]


class Model:
    """What a model runner knows and does: block tables per request, and a forward pass.

    It learns about requests from the scheduler's output alone.
    """

    def __init__(self, device: Device, setting: Setting, counts: Counter[str]) -> None:
        self.device = device
        self.weights = 0
        self._windows = setting.windows
        self._counts = counts
        self.tables: dict[str, list[list[int]]] = {}

    def learn(self, output: Any) -> None:
        """Take over finished, new, resumed and running requests of one step."""
        for req_id in output.finished_req_ids:
            self.tables.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for req_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                self.tables[req_id] = [list(group) for group in ids]
            elif ids is not None:
                for table, new_ids in zip(self.tables[req_id], ids, strict=True):
                    table.extend(new_ids)
        for copy in output.kv_cache_block_copies or ():
            self.device.numbers[copy.dst_block_id] = self.device.numbers[copy.src_block_id]

    def starts(self, output: Any) -> dict[str, int]:
        """Where each request of this step begins to compute."""
        cached = output.scheduled_cached_reqs
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return begins

    def forward(self, output: Any, scripts: dict[str, Script]) -> None:
        """Compute every scheduled token: look at all that it attends to, then write."""
        begins = self.starts(output)
        for req_id, count in output.num_scheduled_tokens.items():
            self._counts["computed"] += count
            begin, script = begins[req_id], scripts[req_id]
            for group, window in enumerate(self._windows):
                self._look(req_id, script, group, window, begin)
            for group in range(len(self._windows)):
                self._write(self.tables[req_id][group], script, group, begin, begin + count)

    def _look(self, req_id: str, script: Script, group: int, window: int, begin: int) -> None:
        first = max(0, begin - window + 1) if window else 0
        if first >= begin:
            return
        table = self.tables[req_id][group]
        held = self.device.span(table, first, begin)
        demanded = script.numbers(group, self.weights)[first:begin]
        if len(held) != len(demanded):
            raise WrongWorld("wrong-compute", f"{req_id} group {group}: no blocks up to {begin}")
        wrong = np.flatnonzero(held != demanded)
        if len(wrong):
            at = first + int(wrong[0])
            block = table[at // BLOCK_TOKENS]
            raise WrongWorld(
                "wrong-compute",
                f"{req_id} group {group} window {window}: computes from {begin} on what block "
                f"{block} holds at position {at}, which is not this request's KV",
            )

    def _write(
        self, table: Sequence[int], script: Script, group: int, begin: int, end: int
    ) -> None:
        numbers = script.numbers(group, self.weights)
        for position in range(begin, end):
            block = table[position // BLOCK_TOKENS]
            self.device.numbers[block, position % BLOCK_TOKENS] = numbers[position]

# SPDX-License-Identifier: Apache-2.0
"""Everything at once: random requests, evictions, damage, I/O errors, aborts and resets.

Whatever happens to files and rows, every answer is what a cold run gave, the engine lives,
and all blocks come back.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.engine.cases import Bench, Fresh, Stored
from tests.engine.test_disk_damage import flip, resize, zero

pytestmark = pytest.mark.engine

ROUNDS = 50


class Chaos:
    """One random run over a shared engine."""

    def __init__(self, bench: Bench, known: list[Stored], seed: int) -> None:
        self.engine = bench.engine
        self.known = known
        self.draw = random.Random(seed)
        self.wrong: list[str] = []
        self.history: list[str] = []

    def run(self) -> None:
        """So many deeds; what went wrong is collected with what led to it."""
        deeds: list[tuple[Callable[[], None], int]] = [
            (self.ask, 8), (self.drop_device, 4), (self.drop_host, 4), (self.damage_file, 4),
            (self.damage_row, 3), (self.remove_file, 2), (self.fail_read, 1), (self.abort, 2),
            (self.reset, 1),
        ]  # fmt: skip
        functions, weights = zip(*deeds, strict=True)
        for _ in range(ROUNDS):
            [deed] = self.draw.choices(functions, weights)
            self.history.append(deed.__name__)
            deed()

    def ask(self) -> None:
        chosen = self.draw.sample(self.known, self.draw.randint(1, len(self.known)))
        answers = self.engine.ask_all([item.prompt for item in chosen])
        for item, answer in zip(chosen, answers, strict=True):
            if answer.tokens != item.cold.tokens or answer.finish != "length":
                self.wrong.append(f"{answer} after {self.history[-12:]}")

    def drop_device(self) -> None:
        self.engine.settle()
        self.engine.drop_device()

    def drop_host(self) -> None:
        self.engine.settle()
        self.engine.drop_host()

    def damage_file(self) -> None:
        files = [path for path in self._item().paths if path.is_file()]
        if not files:
            return
        path, size = self.draw.choice(files), files[0].stat().st_size
        kind = self.draw.choice(["flip", "flip", "zero", "short", "long"])
        if kind == "flip":
            flip(path, self.draw.randrange(path.stat().st_size), self.draw.randrange(8))
        elif kind == "zero":
            zero(path, self.draw.randrange(size // 4096) * 4096)
        else:
            resize(path, -1 if kind == "short" else 4096)

    def damage_row(self) -> None:
        item = self._item()
        rows = self.engine.do("resident", prompt=item.prompt)
        resident = [chunk for chunk, row in enumerate(rows) if row is not None]
        if resident:
            at = self.draw.randrange(item.bench.numbers["row_bytes"])
            chunk = self.draw.choice(resident)
            self.engine.do("damage_row", prompt=item.prompt, chunk=chunk, at=at)

    def remove_file(self) -> None:
        self.draw.choice(self._item().paths).unlink(missing_ok=True)

    def fail_read(self) -> None:
        self.engine.do("fail_reads", times=1)

    def abort(self) -> None:
        name = self.engine.do("submit", prompt=self._item().prompt, count=30)
        ended = self.engine.do("step", count=self.draw.randint(0, 4))
        if not ended:
            self.engine.do("abort", name=name)

    def reset(self) -> None:
        # vLLM itself raises when an aborted request's load still holds blocks.
        self.engine.settle()
        if self.engine.do("reset") is not True:
            self.wrong.append("a reset was not made")

    def _item(self) -> Stored:
        return self.draw.choice(self.known)


@pytest.mark.parametrize("bench", ["qwen3", "gemma3", "qwen3-2-arc"], indirect=True)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_answer_is_ever_wrong(bench: Bench, fresh: Fresh, seed: int) -> None:
    known = [bench.stored(fresh, chunks) for chunks in (1, 2, 3)]
    assert all(item.paths for item in known)
    bench.engine.drop_device()
    free = bench.engine.do("free_blocks")
    before = bench.engine.metrics()
    chaos = Chaos(bench, known, seed)
    chaos.run()
    assert chaos.wrong == []
    bench.engine.do("restore")
    added = bench.engine.metrics().since(before)
    # The run was worth something: chunks were refused, and others were served all the same.
    assert sum(added.refusals().values()) > 0
    assert added.total("chunks_served_total") > 0
    bench.engine.drop_device()
    assert bench.engine.do("free_blocks") == free
    bench.stored(fresh).expect_whole(lower=False)

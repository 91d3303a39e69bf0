# SPDX-License-Identifier: Apache-2.0
"""What tests on a shared engine have in common: a bench, a stored prompt, and what is healthy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engine import Done, Engine, Metrics, Place

Fresh = Callable[[int], list[int]]
CHUNKS = 3


@dataclass
class Bench:
    """A shared engine with its folders and numbers."""

    name: str
    engine: Engine
    place: Place
    numbers: dict[str, Any]
    alive: bool = True

    @property
    def chunk(self) -> int:
        """Tokens of the largest chunk."""
        return int(max(self.numbers["chunk_tokens"]))

    @property
    def header(self) -> int:
        """Bytes of a header."""
        return int(self.numbers["header_bytes"])

    def stored(self, fresh: Fresh, chunks: int = CHUNKS) -> Stored:
        """Ask a new prompt of so many chunks (and a few tokens) and wait until it is stored."""
        prompt = fresh(chunks * self.chunk + 5)
        cold = self.engine.stored(prompt)
        paths = [path for path in self.engine.paths(prompt) if path.exists()]
        return Stored(self, prompt, cold, paths, chunks * self.chunk)


@dataclass
class Stored:
    """A prompt whose chunks are on disk, with what a cold run gave."""

    bench: Bench
    prompt: list[int]
    cold: Done
    paths: list[Path]
    whole: int

    def again(self, lower: bool = True) -> Done:
        """Ask again with nothing on the accelerator (`lower`: nor in host rows)."""
        engine = self.bench.engine
        if lower:
            engine.drop_host()
        else:
            engine.drop_device()
        return engine.ask(self.prompt)

    def expect_whole(self, lower: bool = True) -> None:
        """Every chunk is served and the tokens are right: the positive control."""
        before = self.bench.engine.metrics()
        done = self.again(lower)
        added = self.bench.engine.metrics().since(before)
        assert (done.tokens, done.cached) == (self.cold.tokens, self.whole)
        assert added.total("chunks_served_total") > 0
        assert added.refusals() == {}


def refused(earlier: Metrics, engine: Engine) -> dict[int, int]:
    """Refusals that were counted since `earlier`, by number."""
    return {k: v for k, v in engine.metrics().since(earlier).refusals().items() if v}


def same_tokens(done: Sequence[Done], cold: Sequence[Done]) -> bool:
    """Whether all answers are what the cold runs gave."""
    return [item.tokens for item in done] == [item.tokens for item in cold]

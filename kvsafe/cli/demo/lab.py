# SPDX-License-Identifier: Apache-2.0
"""What all parts of the demo share: the folders, the prompt, servers, and bounded waits."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsafe.cli.demo.chunkfile import ChunkFile, chunk_files, look_at
from kvsafe.cli.demo.client import Answer
from kvsafe.cli.demo.report import Report
from kvsafe.cli.demo.screen import Screen
from kvsafe.cli.demo.server import Launch, Server, running
from kvsafe.seal.keyfile import load_or_create
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.refusal import Refusal

__all__ = ["ANSWER_TOKENS", "PROMPT_TOKENS", "Lab", "StepError"]

PROMPT_TOKENS = 2600
ANSWER_TOKENS = 16
WARM_UP_TOKENS = 8
FIRST_ID, PAST_IDS = 3, 512
"""Token ids that the tiny tokenizer has, special ones left out."""
HOST_ROWS = "48MiB"
SETTLE_S = 30.0
POLL_S = 0.2


class StepError(Exception):
    """A part of the story that could not be told to its end."""


@dataclass
class Lab:
    """The demo's folder and everything that outlives one server.

    `cold` and `chunk` are what the first server left: its answer and the file that was shown.
    `log` belongs to the last server, `telling_log` to the first one of which a check failed.
    """

    folder: Path
    model: Path
    screen: Screen
    report: Report = field(default_factory=Report)
    cold: Answer = field(default_factory=Answer)
    chunk: ChunkFile | None = None
    log: Path | None = None
    telling_log: Path | None = None

    @property
    def store(self) -> Path:
        """The disk tier's folder."""
        return self.folder / "store"

    @property
    def prompt(self) -> list[int]:
        """The long prompt: token ids from a fixed seed."""
        draw = random.Random(7)  # noqa: S311 - a prompt, not a secret
        return [draw.randrange(FIRST_ID, PAST_IDS) for _ in range(PROMPT_TOKENS)]

    @property
    def chunks(self) -> int:
        """Whole chunks in the prompt, once a chunk has been seen."""
        return 0 if self.chunk is None else PROMPT_TOKENS // self.chunk.tokens

    def keyring(self) -> Keyring:
        """The keys that the engine made on its first start."""
        return load_or_create(self.folder / "state" / "keys.json")

    def transfer(self, policy: str) -> dict[str, Any]:
        """The one setting that an operator gives: `--kv-transfer-config`."""
        return {
            "kv_connector": "KVSafeConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": HOST_ROWS,
                "state_dir": str(self.folder / "state"),
                "secondary_tiers": [{"type": "fs", "root_dir": str(self.store)}],
            },
        }

    @contextlib.contextmanager
    def server(
        self,
        name: str,
        policy: str = "recompute",
        overrides: Mapping[str, Any] | None = None,
    ) -> Iterator[Server]:
        """A ready server; its log is `logs/<name>.log`. Raises `ServerError`."""
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        self.log = logs / f"{name}.log"
        launch = Launch(
            self.model, self.transfer(policy), self.folder / "scratch", self.log, overrides
        )
        with running(launch) as server:
            seconds = server.wait_ready(self.screen.wait)
            self.screen.say(f"the server is ready after {seconds:.1f} s")
            # Else the first request's own costs would count as the prompt's.
            server.client.ask(self.prompt[:WARM_UP_TOKENS], 1)
            yield server

    def complete(self, server: Server) -> Answer:
        """Send the long prompt and tell what came. Raises `ClientError`."""
        answer = server.client.stream(self.prompt, ANSWER_TOKENS)
        say = self.screen.say
        say(f"{answer.prompt_tokens} prompt tokens, {answer.cached_tokens} of them from the cache")
        say(f"time to first token {answer.first_token_s:.2f} s")
        say(f"tokens {' '.join(map(str, answer.tokens))}")
        return answer

    def same(self, answer: Answer) -> bool:
        """Whether these are the tokens that were computed without any cache."""
        return bool(answer.tokens) and answer.tokens == self.cold.tokens

    def check(self, step: str, expected: str, seen: str, ok: bool) -> None:
        """Note a check in the report, and say so."""
        self.report.add(step, expected, seen, ok)
        if not ok and self.telling_log is None:
            self.telling_log = self.log
        self.screen.say(f"ok     {seen}" if ok else f"FAILED {seen}; expected: {expected}")

    def settle(self, done: Callable[[], bool], what: str) -> bool:
        """Wait until `done`, for a bounded time; returns whether it came to that."""
        start = time.monotonic()
        while not done():
            elapsed = time.monotonic() - start
            if elapsed > SETTLE_S:
                return False
            self.screen.wait(what, elapsed)
            time.sleep(POLL_S)
        return True

    def all_on_disk(self) -> bool:
        """Wait until every whole chunk of the prompt lies on disk; returns whether it does."""
        waiting = "waiting until the chunks are on disk"
        return self.settle(lambda: len(chunk_files(self.store)) >= self.chunks, waiting)

    def authentic(self) -> list[ChunkFile]:
        """Every chunk on disk, by name. Raises `StepError` when a file is no authentic chunk."""
        keyring = self.keyring()
        chunks: list[ChunkFile] = []
        for path in chunk_files(self.store):
            found = look_at(path, keyring)
            if isinstance(found, Refusal):
                raise StepError(f"{path.name}: {found}")
            chunks.append(found)
        return chunks

# SPDX-License-Identifier: Apache-2.0
"""What all parts of the interop proof share: the model, the prompt, engines of three kinds."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.lmcache.peers.servers import ROOT, peer_python

__all__ = ["CHUNK", "PROMPT", "Engine", "EngineFailed", "Lab", "Said"]

CHUNK = 256
PROMPT = [(7 * i + 3) % 500 + 2 for i in range(600)]
"""Two chunks and a rest: 512 tokens can be hits."""

MODEL = "tiny-qwen3"
_START_S = 900.0
_HEALTHY_S = 3.0
_ANSWER_S = 600.0
_CPU_CONNECTOR = "conformance.lmcache.peers.cpu_connector"


class EngineFailed(RuntimeError):
    """An engine did not start, raised, or is gone; the text is its own."""


@dataclass(frozen=True)
class Said:
    """What came of one prompt."""

    tokens: tuple[int, ...]
    cached: int
    finish: str
    seconds: float


@dataclass
class Engine:
    """One engine process; one at a time fits the memory of a small machine.

    An empty value in `env` takes the variable away.
    """

    python: Path
    folder: Path
    env: dict[str, str]
    counters: dict[str, float] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def start(self, settings: dict[str, Any]) -> None:
        """Build the engine; raises `EngineFailed`."""
        self._log = self.folder / "engine.log"
        merged = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", **self.env}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.python), "-m", "conformance.lmcache.peers.engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env={name: value for name, value in merged.items() if value},
                bufsize=0,
                start_new_session=True,
            )
        self._ask({"settings": settings}, _START_S)

    def say(self, *prompts: list[int], max_tokens: int = 16, linger_s: float = 0.0) -> list[Said]:
        """Generate for each prompt, one after another, then make idle steps for `linger_s`."""
        question = {"prompts": prompts, "max_tokens": max_tokens, "linger_s": linger_s}
        answer = self._ask(question, _ANSWER_S)
        self.counters = answer["counters"]
        return [
            Said(tuple(one["tokens"]), one["cached"], one["finish"], one["seconds"])
            for one in answer["done"]
        ]

    def counted(self, name: str) -> float:
        """Sum over all labels of the counters whose name holds `name`."""
        return sum(value for key, value in self.counters.items() if name in key)

    def log(self) -> str:
        """Everything that the engine has logged."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End it: first in order, then for certain, with the processes that it has started."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def _ask(self, question: dict[str, Any], wait_s: float) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EngineFailed("the engine is not running")
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            answer = json.loads(self._line(process, time.monotonic() + wait_s))
        except (OSError, EOFError, ValueError) as error:
            raise EngineFailed(f"{error!r}\n{self.log()[-2000:]}") from error
        if "error" in answer:
            raise EngineFailed(f"{answer['error']}\n{self.log()[-2000:]}")
        return dict(answer)

    def _line(self, process: subprocess.Popen[bytes], end: float) -> bytes:
        line = bytearray()
        if process.stdout is None:
            raise EOFError("the engine has no output")
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise TimeoutError("no answer in time")
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise EOFError("the engine is gone")
            line += part
        return bytes(line)


class Lab:
    """A folder with the model under a short relative name, and engines that run in it."""

    def __init__(self, root: Path, version: str = "0.5.6") -> None:
        self.root, self.version = root, version

    @classmethod
    @contextlib.contextmanager
    def open(cls, version: str = "0.5.6") -> Iterator[Lab]:
        """A lab in a temporary folder; the model is built once and kept in .cache."""
        from kvsafe.cli import tinymodel

        model = tinymodel.qwen3(ROOT / ".cache" / "interop-models")
        root = Path(tempfile.mkdtemp(prefix="kvsafe-interop-"))
        try:
            # LMCache's keys hold the model's path as it was given: a short one, without @.
            (root / MODEL).symlink_to(model.resolve())
            yield cls(root, version)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    @contextlib.contextmanager
    def plain(self) -> Iterator[Engine]:
        """vLLM without a connector."""
        with self._engine(Path(sys.executable), {}, None) as engine:
            yield engine

    @contextlib.contextmanager
    def lmcache(self, address: tuple[str, int], **env: str) -> Iterator[Engine]:
        """vLLM with LMCacheConnectorV1 on an lm:// server; nothing is kept in its own memory."""
        settings = {
            "LMCACHE_REMOTE_URL": f"lm://{address[0]}:{address[1]}",
            "LMCACHE_REMOTE_SERDE": "naive",
            "LMCACHE_LOCAL_CPU": "False",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.5",
            "LMCACHE_CHUNK_SIZE": str(CHUNK),
            # Its first look at the server may come before its connection stands; until the next
            # one (30 s by default) it neither reads nor writes.
            "LMCACHE_EXTRA_CONFIG": json.dumps({"ping_interval": 0.5}),
            **env,
        }
        transfer = {
            "kv_connector": "CpuLMCacheConnector",
            "kv_connector_module_path": _CPU_CONNECTOR,
            "kv_role": "kv_both",
        }
        with self._engine(peer_python(self.version), settings, transfer) as engine:
            engine.say(linger_s=_HEALTHY_S)
            yield engine

    @contextlib.contextmanager
    def lmcache_mp(self, port: int) -> Iterator[Engine]:
        """vLLM with LMCacheMPConnector on a multiprocess server of LMCache's."""
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
                "lmcache.mp.mq_timeout": 60,
            },
        }
        # In one process with the front end, LMCache is imported too early for vLLM's CPU worker.
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with self._engine(peer_python(self.version), env, transfer) as engine:
            yield engine

    @contextlib.contextmanager
    def kvsafe(self, url: str, name: str, keys: str = "keys.json", **tier: Any) -> Iterator[Engine]:
        """vLLM with kvsafe and its LMCache tier; `name` is the state folder, `keys` the secrets.

        Engines with the same secrets have the same epoch file, whatever their state folders.
        """
        extra = {
            "cpu_bytes_to_use": "64MiB",
            "blocks_per_chunk": CHUNK // 32,
            "state_dir": str(self.root / name),
            "key_file": str(self.root / keys),
            "epoch_file": str(self.root / f"epochs of {keys}" / "epoch-lab.json"),
            "weights_survive_reset": True,
            "secondary_tiers": [{"type": "kvsafe-lmcache", "url": url, **tier}],
        }
        transfer = {
            "kv_connector": "KVSafeConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        with self._engine(Path(sys.executable), {}, transfer) as engine:
            yield engine

    @contextlib.contextmanager
    def _engine(
        self, python: Path, env: dict[str, str], transfer: dict[str, Any] | None
    ) -> Iterator[Engine]:
        settings: dict[str, Any] = {
            "model": MODEL,
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "block_size": 32,
        }
        if transfer is not None:
            settings["kv_transfer_config"] = transfer
        engine = Engine(python, self.root, env)
        try:
            engine.start(settings)
            yield engine
        finally:
            engine.close()

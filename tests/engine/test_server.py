# SPDX-License-Identifier: Apache-2.0
"""vLLM's own API server, as an operator runs it: metrics, kill -9, restart, reset."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import models
from tests.support.engine import ENVIRONMENT, READY_S, ROOT, Place, kill_group, prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUESTION = prompt(601, 400)
WHOLE = 384


class Server:
    """One API server process with its engine process."""

    def __init__(self, place: Place, log: Path) -> None:
        self.log = log
        self._url = f"http://127.0.0.1:{_free_port()}"
        environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        environment["PYTHONPATH"] = str(ROOT)
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(models.qwen3()), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", self._url.rpartition(":")[2],
            "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048",
            "--enable-prompt-tokens-details",
            "--kv-transfer-config", json.dumps(place.settings()),
        ]  # fmt: skip
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, cwd=place.root, env=environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.get("/health")
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(self.log.read_text(errors="replace")[-4000:])
            time.sleep(0.2)

    def get(self, path: str, data: dict[str, Any] | None = None, method: str = "GET") -> str:
        """The body of an answer."""
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self._url + path, body, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def ask(self, question: list[int]) -> tuple[str, int]:
        """Text and cached tokens of a completion."""
        values = {"model": "tiny", "prompt": question, "max_tokens": 8, "temperature": 0}
        answer = json.loads(self.get("/v1/completions", {**values, "ignore_eos": True}, "POST"))
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["text"], int(details.get("cached_tokens") or 0)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.get("/metrics").splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith(f"{name}{{"))

    def stored(self, question: list[int], chunks: int) -> str:
        """Ask until so many chunks were reported stored (a bounded number of times)."""
        text, _ = self.ask(question)
        for _ in range(100):
            if self.metric("kvsafe:chunks_stored_total") >= chunks:
                return text
            self.ask([5, 6, 7])
        raise RuntimeError("the chunks were never stored")

    def kill(self) -> None:
        """SIGKILL for everything this server has started."""
        kill_group(self._process.pid)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(place: Place, name: str) -> Iterator[Server]:
    """A server for the length of a block; it always ends by SIGKILL."""
    place.root.mkdir(exist_ok=True)
    server = Server(place, place.root / name)
    try:
        yield server
    finally:
        server.kill()


def test_kill_minus_nine_restart_and_reset(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with serving(place, "first.log") as server:
        text = server.stored(QUESTION, 3)
        assert server.get("/reset_prefix_cache", method="POST") is not None
        assert server.ask(QUESTION) == (text, WHOLE)
        assert server.metric("kvsafe:chunks_served_total") == 3
    assert len(place.files()) == 3
    with serving(place, "second.log") as server:
        assert server.ask(QUESTION) == (text, WHOLE)
        server.ask([5, 6, 7])
        assert server.metric("kvsafe:chunks_opened_total") == 6
        assert server.metric("kvsafe:refusals_total") == 0
        epoch = server.metric("kvsafe:epoch")
        server.get(
            "/reset_prefix_cache?reset_running_requests=true&reset_external=true", {}, "POST"
        )
        assert server.ask(QUESTION) == (text, 0)
        server.ask([5, 6, 7])
        assert server.metric("kvsafe:epoch") == epoch + 1
        assert server.metric("kvsafe:refusals_total") == 3
    log = (place.root / "second.log").read_text()
    assert f"kvsafe: epoch is now {int(epoch) + 1}" in log
    assert "refusal 601" in log

# SPDX-License-Identifier: Apache-2.0
"""One vLLM server as a child process: started, watched until it is ready, always stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsafe.cli.demo.client import HOST, Client

__all__ = ["Launch", "Server", "ServerError", "running"]

MODEL_NAME = "demo"
START_S = 300.0
"""Longest start, in seconds: the first one on a machine also compiles vLLM's Python files."""
STOP_S = 20.0
STOP_EARLY_S = 2.0
"""A server that is still starting has nothing to finish, and vLLM does not listen then."""
AFTERMATH_S = 5.0
POLL_S = 0.2
LOG_LIMIT = 8 << 20

STAGES = (
    ("Starting vLLM server", "the server opens its port"),
    ("secondary tier(s)", "kvsafe has its rows and its disk tier"),
    ("kvsafe: reading weights", "kvsafe reads the weights, to know them again"),
    ("Starting to load model", "the engine loads the model"),
    ("Initializing a V1 LLM engine", "the engine process is up"),
    ("Resolved architecture", "vLLM has read the model's configuration"),
)

Wait = Callable[[str, float], None]


class ServerError(Exception):
    """A server that could not be started, or that ended by itself."""


@dataclass(frozen=True)
class Launch:
    """How to start one server: where its files are and what is special about this one."""

    model: Path
    transfer: Mapping[str, Any]
    scratch: Path
    log: Path
    overrides: Mapping[str, Any] | None = None

    def command(self, port: int) -> list[str]:
        """The command line of a server on this loopback port."""
        settings: dict[str, str] = {
            "--model": str(self.model),
            "--served-model-name": MODEL_NAME,
            "--host": HOST,
            "--port": str(port),
            "--dtype": "float32",
            "--max-model-len": "4096",
            "--max-num-seqs": "2",
            "--kv-transfer-config": json.dumps(self.transfer),
        }
        if self.overrides is not None:
            settings["--hf-overrides"] = json.dumps(self.overrides)
        module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
        return [*module, *(part for pair in settings.items() for part in pair), *flags]

    def environment(self) -> dict[str, str]:
        """The server's variables: this process's, without settings of vLLM that would interfere."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        threads = str(min(8, len(os.sched_getaffinity(0))))
        return {
            **kept,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # The worker inside the engine's process: a third less to import at every start.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.scratch),
        }


class Server:
    """A running server process, in a process group of its own."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process = process
        self._log = log
        self._ready = False
        self.client = Client(port, MODEL_NAME)

    @property
    def log(self) -> str:
        """What the server has logged so far (at most the last 8 MiB)."""
        with self._log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_LIMIT))
            return file.read(LOG_LIMIT).decode("utf-8", "replace")

    @property
    def alive(self) -> bool:
        """Whether the process runs and says that its engine is healthy."""
        return self._process.poll() is None and self.client.healthy()

    def wait_ready(self, wait: Wait) -> float:
        """Wait until requests can be sent; returns the seconds since the call.

        `wait` is told, a few times per second, what the server is doing. Raises `ServerError`.
        """
        start = time.monotonic()
        while not self.client.healthy():
            elapsed = time.monotonic() - start
            if (code := self._process.poll()) is not None:
                raise ServerError(f"the server ended with code {code} while it was starting")
            if elapsed > START_S:
                raise ServerError(f"the server was not ready after {START_S:.0f} s")
            wait(_stage(self.log), elapsed)
            time.sleep(POLL_S)
        self._ready = True
        return time.monotonic() - start

    def stop(self) -> None:
        """End the server and everything that it started: SIGTERM, and SIGKILL if that is too slow.

        Does its work also when it is interrupted.
        """
        try:
            self._process.terminate()
            self._process.wait(STOP_S if self._ready else STOP_EARLY_S)
            self._wait_for_group()
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._wait_for_group()

    def _wait_for_group(self) -> None:
        """Give the server's children a moment to end."""
        deadline = time.monotonic() + AFTERMATH_S
        while _group_runs(self._process.pid) and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)


@contextlib.contextmanager
def running(launch: Launch) -> Iterator[Server]:
    """A server for the length of a `with` block; not yet ready when the block begins."""
    launch.scratch.mkdir(exist_ok=True)
    port = _free_port()
    with launch.log.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own arguments
            launch.command(port),
            env=launch.environment(),
            cwd=launch.scratch,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A Ctrl-C is for the demo, which then stops the server in order.
            start_new_session=True,
        )
    server = Server(process, port, launch.log)
    try:
        yield server
    finally:
        server.stop()


def _group_runs(group: int) -> bool:
    """Whether a process of this group still runs.

    Read from `/proc`: a signal also reaches the ended ones that nobody has collected yet.
    """
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, _, found, *_ = path.read_text().rpartition(")")[2].split()
            if found == str(group) and state != "Z":
                return True
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _stage(log: str) -> str:
    """What a starting server is doing, by the last thing that its log tells."""
    for mark, stage in STAGES:
        if mark in log:
            return stage
    return "starting vLLM (importing it takes a while)"

# SPDX-License-Identifier: Apache-2.0
"""Real engines in processes of their own, driven over a socket with JSON lines.

Importing vLLM takes longer than starting a tiny engine, so one nursery process imports it
once and forks a child per engine. A child can be restarted, killed with SIGKILL or left to
crash without touching the tests, and two can live side by side. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]
READY_S = 120.0
ANSWER_S = 180.0
MIB = 1 << 20

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}


class EngineFailed(RuntimeError):
    """The engine did not start, or a command raised inside it; the text is its own."""


class EngineGone(RuntimeError):
    """The engine's process has ended without an answer."""


@dataclass(frozen=True)
class Done:
    """One finished request: its tokens, how many prompt tokens were cached, how it ended."""

    tokens: tuple[int, ...]
    cached: int
    finish: str
    steps: int


@dataclass
class Place:
    """The folders of one store: what a restart keeps."""

    root: Path
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        """The folder of the fs tier."""
        return self.root / "store"

    @property
    def state(self) -> Path:
        """kvsafe's state folder."""
        return self.root / "state"

    def settings(self, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
        """`kv_transfer_config` for an engine over these folders."""
        chosen: dict[str, Any] = {
            "cpu_bytes_to_use": "64MiB",
            "state_dir": str(self.state),
            "secondary_tiers": [{"type": "fs", "root_dir": str(self.store)}],
            # Resets only empty the cache here, so that old files are met again by name.
            "weights_survive_reset": True,
            **self.extra,
            **extra,
        }
        return {
            "kv_connector": "KVSafeConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {k: v for k, v in chosen.items() if v is not None},
        }

    def files(self) -> list[Path]:
        """Every chunk file of the fs tier, quarantine left out."""
        found = self.store.rglob("*.bin")
        return sorted(path for path in found if "kvsafe-quarantine" not in path.parts)

    def quarantined(self) -> list[Path]:
        """What has been moved aside."""
        return sorted((self.store / "kvsafe-quarantine").glob("*"))


class Engine:
    """One engine in its own process."""

    def __init__(self, link: socket.socket, log: Path) -> None:
        self._link = link
        self._lines = link.makefile("r", encoding="utf-8")
        self.log_path = log
        self.pid = int(self._answer(READY_S)["pid"])
        self.started = False

    def start(self, model: Path, env: dict[str, str] | None = None, **settings: Any) -> Engine:
        """Build `vllm.LLM`; raises `EngineFailed` with the engine's own words."""
        chosen = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            **settings,
        }
        self.do("start", env=env or {}, settings=chosen)
        self.started = True
        return self

    def send(self, op: str, **values: Any) -> None:
        """Send a command and do not wait."""
        self._link.sendall(json.dumps({"op": op, **values}).encode() + b"\n")

    def do(self, op: str, wait_s: float = ANSWER_S, **values: Any) -> Any:
        """Send a command, return its answer."""
        try:
            self.send(op, **values)
        except OSError as exc:
            raise EngineGone(self._tail()) from exc
        return self._answer(wait_s).get("value")

    def _answer(self, wait_s: float) -> dict[str, Any]:
        self._link.settimeout(wait_s)
        try:
            line = self._lines.readline()
        except (ConnectionError, TimeoutError) as exc:
            raise EngineGone(f"{type(exc).__name__}\n{self._tail()}") from exc
        if not line:
            raise EngineGone(self._tail())
        answer = cast("dict[str, Any]", json.loads(line))
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-30:])

    def log(self) -> str:
        """What the engine has written to its standard output and error so far."""
        return self.log_path.read_text(errors="replace")

    # Requests

    def ask(self, prompt: Sequence[int], count: int = 4, **values: Any) -> Done:
        """Run one request to its end."""
        [done] = self.ask_all([prompt], count, **values)
        return done

    def ask_all(
        self, prompts: Sequence[Sequence[int]], count: int = 4, **values: Any
    ) -> list[Done]:
        """Run requests together to their ends."""
        answers = self.do("ask", prompts=[list(p) for p in prompts], count=count, **values)
        return [Done(tuple(a["tokens"]), a["cached"], a["finish"], a["steps"]) for a in answers]

    def settle(self) -> None:
        """Step until no transfer and no tier has work left; fails when that does not come."""
        self.do("settle")

    def stored(self, prompt: Sequence[int], count: int = 4, **values: Any) -> Done:
        """Run a request and wait until its chunks are in every tier."""
        done = self.ask(prompt, count, **values)
        self.settle()
        return done

    def drop_device(self) -> None:
        """Empty the accelerator's prefix cache."""
        if self.do("drop_device") is not True:
            raise EngineFailed("the prefix cache was not reset")

    def drop_host(self) -> None:
        """Take every chunk out of the host rows (it stays in lower tiers)."""
        self.drop_device()
        self.do("drop_host")

    def paths(self, prompt: Sequence[int], **values: Any) -> list[Path]:
        """The tier's file of every chunk of a prompt that was asked before, group by group."""
        return [Path(path) for path in self.do("paths", prompt=list(prompt), **values)]

    def metrics(self) -> Metrics:
        """The kvsafe: metrics as the engine exports them now."""
        return Metrics({name: float(value) for name, value in self.do("metrics").items()})

    # Ends

    def stop(self) -> None:
        """Shut down in order and end the process."""
        left = _shared_memory(self.pid)
        with contextlib.suppress(EngineGone, EngineFailed):
            self.do("stop", wait_s=30.0)
        self.kill()
        for path in left:
            path.unlink(missing_ok=True)

    def kill(self) -> None:
        """SIGKILL for the process and all that it started; returns when it is gone."""
        kill_group(self.pid)
        with contextlib.suppress(OSError):
            self._link.settimeout(30.0)
            while self._link.recv(65536):
                pass
        self._lines.close()
        self._link.close()


class Metrics(dict[str, float]):
    """Samples of the kvsafe: metrics, `name{label=value,...}` to value, with the totals."""

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of `kvsafe:<name>` that carry these labels."""
        wanted = [f"{key}={value}" for key, value in labels.items()]
        found = 0.0
        for sample, value in self.items():
            family, _, rest = sample.partition("{")
            parts = rest.rstrip("}").split(",")
            if family == f"kvsafe:{name}" and all(want in parts for want in wanted):
                found += value
        return found

    def refusals(self) -> dict[int, int]:
        """How often each refusal number was counted."""
        found: dict[int, int] = {}
        for sample, value in self.items():
            if sample.startswith("kvsafe:refusals_total{") and value:
                number = int(sample.partition("number=")[2].split(",")[0].rstrip("}"))
                found[number] = found.get(number, 0) + int(value)
        return found

    def since(self, earlier: Metrics) -> Metrics:
        """What was added after `earlier`."""
        return Metrics({k: v - earlier.get(k, 0.0) for k, v in self.items()})


class Nursery:
    """The process that has imported vLLM and forks engines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._address = str(folder / "nursery.sock")
        self._log = folder / "nursery.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.inside", self._address, str(folder)],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def engine(self) -> Engine:
        """Fork a process for an engine; nothing is started in it yet."""
        self._count += 1
        log = self._folder / f"engine-{self._count}.log"
        link = self._connect()
        link.sendall(json.dumps({"log": str(log)}).encode() + b"\n")
        return Engine(link, log)

    @contextlib.contextmanager
    def running(self, model: Path, **settings: Any) -> Iterator[Engine]:
        """An engine for the length of a block; it is killed if it does not stop."""
        engine = self.engine()
        try:
            yield engine.start(model, **settings)
        finally:
            engine.stop()

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + READY_S
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                link.connect(self._address)
                return link
            except OSError:
                link.close()
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise EngineFailed(self._log.read_text(errors="replace")) from None
                time.sleep(0.1)

    def close(self) -> None:
        """End the nursery; engines end when their links close."""
        self._process.kill()
        self._process.wait()


def kill_group(group: int) -> None:
    """SIGKILL for a process group, and away with the shared memory that vLLM leaves then.

    kvsafe's own region is not touched: that it goes by itself is what some tests show.
    """
    left = _shared_memory(group)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    for path in left:
        path.unlink(missing_ok=True)


def _shared_memory(group: int) -> set[Path]:
    """Files in shared memory that a process of this group has mapped."""
    found: set[Path] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(folder.name)) != group:
                continue
            lines = (folder / "maps").read_text().splitlines()
            found |= {Path(line.split(None, 5)[5]) for line in lines if "/dev/shm/" in line}
    return {path for path in found if not path.name.startswith("kvsafe-")}


def prompt(seed: int, tokens: int) -> list[int]:
    """A random prompt that no other seed begins with."""
    draw = random.Random(seed)
    return [draw.randrange(10, 500) for _ in range(tokens)]

# SPDX-License-Identifier: Apache-2.0
"""Real servers as child processes: LMCache's lm:// server, Redis. Each on a free loopback port."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["ROOT", "NotHere", "lm_server", "mp_server", "peer_python", "redis_server"]

ROOT = Path(__file__).resolve().parents[3]
_READY_S = 300.0


class NotHere(Exception):
    """Something that is needed is not on this machine; the text says what and how to get it."""


def peer_python(version: str = "0.5.6") -> Path:
    """The interpreter of an environment that `conformance/lmcache/setup` has made."""
    python = ROOT / ".cache" / f"lmcache-{version}" / "bin" / "python"
    if not python.exists():
        raise NotHere(f"no LMCache {version} here: run conformance/lmcache/setup {version}")
    return python


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@contextlib.contextmanager
def lm_server(version: str = "0.5.6") -> Iterator[tuple[str, int]]:
    """LMCache's own lm:// server; yields host and port."""
    port = free_port()
    python = str(peer_python(version))
    with _running([python, "-m", "lmcache.v1.server", "127.0.0.1", str(port)], port) as address:
        yield address


@contextlib.contextmanager
def redis_server() -> Iterator[tuple[str, int]]:
    """A Redis without persistence; yields host and port."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise NotHere("no redis-server here: apt-get install redis-server")
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with _running([program, *options], port) as address:
        yield address


@contextlib.contextmanager
def mp_server(redis: tuple[str, int], version: str = "0.5.6") -> Iterator[int]:
    """LMCache's multiprocess server with a Redis behind it; yields its port."""
    port = free_port()
    adapter = {"type": "resp", "host": redis[0], "port": redis[1], "num_workers": 2}
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-host": "127.0.0.1",
        "--http-port": free_port(),
        "--l1-size-gb": 0.25,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",
        "--l2-adapter": json.dumps(adapter),
    }
    words = [str(word) for pair in options.items() for word in pair]
    program = peer_python(version).parent / "lmcache"
    with _running([str(program), "server", *words, "--disable-metrics"], port):
        yield port


@contextlib.contextmanager
def _running(command: Sequence[str], port: int) -> Iterator[tuple[str, int]]:
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment)
    try:
        _wait_until_it_listens(process, port)
        yield "127.0.0.1", port
    finally:
        process.kill()
        process.wait()


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + _READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise NotHere(f"a server ended at once with status {process.returncode}")
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.1)
    raise NotHere("a server did not listen in time")

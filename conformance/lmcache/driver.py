# SPDX-License-Identifier: Apache-2.0
"""The client under test as the suite sees it: a child process that answers JSON lines in time."""

from __future__ import annotations

import base64
import contextlib
import json
import select
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.lmcache.wire import Meta

__all__ = ["Driver", "DriverFailed"]

_START_S = 300.0
_LINE = 64 << 20


class DriverFailed(Exception):
    """The driver cannot be used at all: it does not start or speaks another language."""


class Driver:
    """One driver process. A call that does not end is an outcome, and costs the process."""

    def __init__(self, command: str | Sequence[str], patience_s: float) -> None:
        self._command = shlex.split(command) if isinstance(command, str) else [*command]
        self._patience_s = patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = bytearray()

    def open(self, wire: str, host: str, port: int) -> tuple[str, dict[str, Any]]:
        """Start the process if there is none and hand it the address."""
        first = self._process is None
        if first:
            self._start()
        wait_s = _START_S if first else self._patience_s
        return self._ask({"op": "open", "wire": wire, "host": host, "port": port}, wait_s)

    def call(
        self, op: str, key: str, meta: Meta, data: bytes | None = None
    ) -> tuple[str, dict[str, Any]]:
        """One question: the outcome's word ("hung" and "died" are ours) and the whole answer."""
        shape = {"length": meta.length, "fmt": meta.fmt, "dtype": meta.dtype}
        question: dict[str, Any] = {"op": op, "key": key, "meta": {**shape, "shape": meta.shape}}
        if data is not None:
            question["data"] = base64.b64encode(data).decode()
        return self._ask(question, self._patience_s)

    def peak(self) -> int | None:
        """Most memory that the process ever had, in bytes; None where the system does not tell."""
        if self._process is None:
            return None
        status = Path(f"/proc/{self._process.pid}/status")
        with contextlib.suppress(OSError):
            for line in status.read_text(encoding="utf-8").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
        return None

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.kill()
        self._process.wait()
        self._process = None

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        except OSError as error:
            raise DriverFailed(f"{self._command[0]}: {error}") from error
        self._pending.clear()

    def _ask(self, question: dict[str, Any], wait_s: float) -> tuple[str, dict[str, Any]]:
        if self._process is None:
            return "died", {}
        end = time.monotonic() + wait_s
        try:
            line = self._exchange(self._process, json.dumps(question).encode() + b"\n", end)
        except TimeoutError:
            self.close()
            return "hung", {}
        except OSError:
            self.close()
            return "died", {}
        try:
            answer = json.loads(line)
            return str(answer["outcome"]), answer
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise DriverFailed(f"the driver answered {line[:80]!r}") from error

    def _exchange(self, process: subprocess.Popen[bytes], question: bytes, end: float) -> bytes:
        if process.stdin is None or process.stdout is None:
            raise BrokenPipeError
        process.stdin.write(question)
        while b"\n" not in self._pending and len(self._pending) < _LINE:
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise TimeoutError
            part = process.stdout.read(1 << 20)
            if not part:
                raise BrokenPipeError
            self._pending += part
        line, _, rest = bytes(self._pending).partition(b"\n")
        self._pending = bytearray(rest)
        return line

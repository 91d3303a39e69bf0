# SPDX-License-Identifier: Apache-2.0
"""Real processes that hold a region: each does what it is told on its stdin, and can be killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvsafe.host import RegionShape

ROOT = Path(__file__).resolve().parents[2]

_CHILD = r"""
import json, os, subprocess, sys
from pathlib import Path
from kvsafe.host import HostRegion, RegionShape
from kvsafe.host.lease import region_gate, sweep_dead_regions

folder = Path(sys.argv[1])
region = None
gate = None

def act(order):
    global region, gate
    what = order.pop("do")
    if what == "open":
        shape = RegionShape(*order["shape"])
        region = HostRegion.open(order["launch"], shape, folder)
        return region.created
    if what == "write":
        region.row(order["row"])[:] = bytes([order["value"]]) * region.shape.row_bytes
    if what == "read":
        return region.row(order["row"])[0]
    if what == "register":
        region.register_worker(order["rank"], bytes.fromhex(order["document"]))
    if what == "allocate":
        return region.ledger.allocate(order["row"])
    if what == "generation":
        return region.ledger.generation(order["row"])
    if what == "announce":
        region.announce_epoch(order["epoch"])
    if what == "epoch":
        return region.epoch
    if what == "forget":
        region.forget_name()
    if what == "close":
        region.close()
    if what == "sweep":
        with region_gate(folder):
            return sweep_dead_regions(folder)
    if what == "gate":
        gate = region_gate(folder)
        gate.__enter__()
    if what == "fork":
        if order["exec"]:
            return subprocess.Popen(["sleep", "60"]).pid
        pid = os.fork()
        if pid == 0:
            import time
            os.closerange(0, 3)
            time.sleep(60)
        return pid

print("ready", flush=True)
for line in sys.stdin:
    try:
        answer = {"value": act(json.loads(line))}
    except Exception as exc:
        answer = {"error": type(exc).__name__ + ": " + str(exc)}
    print(json.dumps(answer), flush=True)
"""


class ChildError(RuntimeError):
    """What the child raised, by name."""


class Child:
    """One process of an engine, told what to do line by line."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, what: str, **order: Any) -> None:
        """Say what to do, without waiting for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **order}) + "\n")
        self.process.stdin.flush()

    def do(self, what: str, **order: Any) -> Any:
        """Do one thing and return its value. Raises `ChildError` with what the child raised."""
        self.tell(what, **order)
        return self.answer()

    def answer(self) -> Any:
        """What came of the oldest order. Raises `ChildError` with what the child raised."""
        answer = json.loads(self._line())
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer["value"]

    def open(self, launch: str, shape: RegionShape) -> bool:
        """Open the region of a launch; True if this process made it."""
        made = self.do(
            "open", launch=launch, shape=[shape.num_rows, shape.row_bytes, shape.workers]
        )
        return bool(made)

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Kill it if it lives, and close its pipes."""
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def regions(folder: Path) -> list[str]:
    """Names of the region files in `folder`."""
    return sorted(name for name in os.listdir(folder) if name.endswith(".rows"))

# SPDX-License-Identifier: Apache-2.0
"""A child server is watched while it starts, and nothing of it is left afterwards.

A few lines of Python stand in for vLLM: they answer /health, and start a child of their own.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvsafe.cli.demo import server as module
from kvsafe.cli.demo.server import Launch, ServerError, running

HEALTHY = """
import http.server, pathlib, signal, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
child = subprocess.Popen([sys.executable, "-c", STUBBORN + "import time; time.sleep(600)"])
pathlib.Path("child").write_text(str(child.pid))
exec(STUBBORN)
print("Starting vLLM server", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


@dataclass(frozen=True)
class Standin(Launch):
    """A launch of some other program."""

    program: str = ""

    def command(self, port: int) -> list[str]:
        """The program with the port as its argument."""
        return [sys.executable, "-c", self.program, str(port)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not give the stand-ins, which never end by themselves, the time that vLLM gets."""
    monkeypatch.setattr(module, "STOP_S", 0.5)
    monkeypatch.setattr(module, "AFTERMATH_S", 0.5)


def _launch(folder: Path, program: str) -> Standin:
    return Standin(folder, {}, folder / "scratch", folder / "log", program=program)


def _ended(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return status == "Z"


@pytest.mark.parametrize("stubborn", ["", DEAF])
def test_a_server_and_its_child_are_gone_after_the_block(tmp_path: Path, stubborn: str) -> None:
    program = f"STUBBORN = {stubborn!r}\n{HEALTHY}"
    with running(_launch(tmp_path, program)) as server:
        server.wait_ready(lambda what, elapsed: None)
        assert server.alive
        assert "Starting vLLM server" in server.log
        child = int((tmp_path / "scratch" / "child").read_text())
        assert not _ended(child)
    assert _ended(child)
    assert server.client.healthy() is False


def test_an_interrupt_stops_the_server(tmp_path: Path) -> None:
    program = f"STUBBORN = ''\n{HEALTHY}"
    with pytest.raises(KeyboardInterrupt), running(_launch(tmp_path, program)) as server:
        server.wait_ready(lambda what, elapsed: None)
        raise KeyboardInterrupt
    assert not server.client.healthy()


def test_a_server_that_ends_while_starting_is_an_error(tmp_path: Path) -> None:
    program = "print('no such model'); raise SystemExit(3)"
    with running(_launch(tmp_path, program)) as server:
        with pytest.raises(ServerError, match="code 3"):
            server.wait_ready(lambda what, elapsed: None)
        assert "no such model" in server.log


def test_a_server_that_never_gets_ready_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_S", 0.5)
    said: list[str] = []
    program = "import time; print('Starting to load model', flush=True); time.sleep(600)"
    with running(_launch(tmp_path, program)) as server, pytest.raises(ServerError, match="0 s"):
        server.wait_ready(lambda what, elapsed: said.append(what))
    assert said


def test_the_stage_is_the_last_thing_the_log_tells() -> None:
    assert "importing" in module._stage("")
    log = "Resolved architecture: X\nInitializing a V1 LLM engine\n"
    assert module._stage(log) == "the engine process is up"
    assert "tier" in module._stage(log + "kvsafe: 5 rows of 3 bytes, 1 secondary tier(s)\n")


def test_the_command_is_loopback_only_and_says_what_was_asked(tmp_path: Path) -> None:
    transfer = {"kv_connector": "KVSafeConnector"}
    plain = Launch(tmp_path, transfer, tmp_path, tmp_path / "log").command(4321)
    assert plain[plain.index("--host") + 1] == "127.0.0.1"
    assert plain[plain.index("--port") + 1] == "4321"
    assert json.loads(plain[plain.index("--kv-transfer-config") + 1]) == transfer
    assert "--hf-overrides" not in plain
    other = Launch(tmp_path, transfer, tmp_path, tmp_path / "log", {"a": 1}).command(4321)
    assert json.loads(other[other.index("--hf-overrides") + 1]) == {"a": 1}


def test_settings_of_vllm_in_the_environment_do_not_reach_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "would lock the demo out")
    monkeypatch.setenv("SOMETHING_ELSE", "stays")
    found = Launch(tmp_path, {}, tmp_path, tmp_path / "log").environment()
    assert "VLLM_API_KEY" not in found and found["SOMETHING_ELSE"] == "stays"
    assert found["HF_HUB_OFFLINE"] == "1" and found["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert os.environ["VLLM_API_KEY"] == "would lock the demo out"

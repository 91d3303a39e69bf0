# SPDX-License-Identifier: Apache-2.0
"""The program of the nursery and of the engine processes that it forks.

    python -m tests.engine.inside SOCKET FOLDER

The nursery imports vLLM once and forks for every connection. A child reads one command per
line, runs the operation of that name and answers with one line. See `tests.support.engine`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.engine import operations
from tests.engine.state import State


def main(address: str) -> None:
    """Serve forks until the socket's folder is gone or the process is killed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    import_engine()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.bind(address)
    listener.listen(16)
    parent = os.getppid()
    listener.settimeout(5.0)
    while os.getppid() == parent:
        try:
            link, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            run_child(link)
        link.close()


def import_engine() -> None:
    """Everything an engine will import, so that a fork has it already."""
    import vllm
    import vllm.model_executor.models.deepseek_v2
    import vllm.model_executor.models.gemma3
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker

    import kvsafe.engine.connector  # noqa: F401

    _ = vllm.LLM


def run_child(link: socket.socket) -> None:
    """Answer commands until the link closes; never returns."""
    link.settimeout(None)
    lines = link.makefile("r", encoding="utf-8")
    log = os.open(Path(json.loads(lines.readline())["log"]), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    state = State()
    answer(link, {"pid": os.getpid()})
    for line in lines:
        command = json.loads(line)
        name = command.pop("op")
        try:
            value = operations.OPERATIONS[name](state, **command)
        except BaseException as exc:
            traceback.print_exc()
            answer(link, {"error": chain(exc)})
        else:
            answer(link, {"value": value})
        if name == "stop":
            break
    os._exit(0)


def answer(link: socket.socket, value: dict[str, Any]) -> None:
    """One line back."""
    link.sendall(json.dumps(value).encode() + b"\n")


def chain(exc: BaseException) -> str:
    """The text of an exception and of what caused it."""
    texts: list[str] = []
    found: BaseException | None = exc
    while found is not None and len(texts) < 10:
        texts.append(f"{type(found).__name__}: {found}")
        found = found.__cause__ or found.__context__
    return "\n".join(texts)


if __name__ == "__main__":
    main(sys.argv[1])

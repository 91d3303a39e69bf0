# SPDX-License-Identifier: Apache-2.0
"""`kvsafe demo`: the whole story on a real vLLM server with a model made on the spot.

Needs no network and no accelerator. Everything it makes lies in one temporary folder, which is
gone at the end; after a failure the servers' logs stay.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kvsafe.cli import UsageError
from kvsafe.cli.demo.client import ClientError
from kvsafe.cli.demo.lab import PROMPT_TOKENS, Lab, StepError
from kvsafe.cli.demo.screen import Screen
from kvsafe.cli.demo.server import ServerError
from kvsafe.cli.demo.story import PARTS, Part
from kvsafe.cli.demo.widemodel import DEMO_SHAPE, wide_qwen3
from kvsafe.seal.keyfile import KeyFileError

__all__ = ["add_arguments", "run"]

NEEDED_BYTES = 1 << 30
TAIL_LINES = 30
NOISE = re.compile(r"Route: |nanobind|^ - (leaked|\.\.\. skipped)|/health HTTP")
"""Lines of a server's log that are many and tell nothing about a failure."""
INTERRUPTED = 130
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TROUBLE = (ServerError, ClientError, StepError, KeyFileError, OSError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `kvsafe demo`."""
    parser.add_argument(
        "--json", action="store_true", help="the table as JSON on stdout, the story on stderr"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder with all files")


def run(args: argparse.Namespace) -> int:
    """Tell the story; 0 if every step held, 1 if one did not, 130 if it was interrupted.

    Raises `UsageError` when this machine cannot run it.
    """
    _check_machine()
    screen = Screen(sys.stderr if args.json else sys.stdout)
    start = time.monotonic()
    try:
        with _termination_interrupts(), _folder(args.keep, screen) as folder:
            lab = _tell(folder, screen)
            logs = None if lab.report.ok else _keep_logs(lab, args.keep)
    except KeyboardInterrupt:
        screen.say("interrupted: the server was stopped")
        return INTERRUPTED
    seconds = time.monotonic() - start
    if args.json:
        sys.stdout.write(lab.report.as_json(seconds=round(seconds, 1), logs=logs))
    else:
        screen.raw(f"\n{lab.report.as_text()}\n")
    held = "every step held" if lab.report.ok else "NOT every step held"
    screen.raw(f"{held}; {seconds:.0f} s\n")
    return lab.report.exit_code


def _check_machine() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("vLLM is not installed here: pip install 'kvsafe[cpu]'")
    if not any(point.name == "kvsafe" for point in entry_points(group="vllm.general_plugins")):
        raise UsageError("kvsafe is not installed here, vLLM would not find it: pip install -e .")
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < NEEDED_BYTES:
        raise UsageError(f"{tempfile.gettempdir()} has {free >> 20} MiB free, 1024 are needed")


def _tell(folder: Path, screen: Screen) -> Lab:
    """All parts in order; a part that cannot be told ends the story."""
    lab = Lab(folder, folder, screen)
    _introduce(lab)
    for place, part in enumerate(PARTS, 1):
        screen.heading(f"{place}/{len(PARTS)}  {part.heading}")
        try:
            part.tell(lab)
        except TROUBLE as error:
            lab.check(part.name, "this part runs to its end", str(error), False)
            _skip(lab, PARTS[place:])
            break
    return lab


def _introduce(lab: Lab) -> None:
    screen, shape = lab.screen, DEMO_SHAPE
    screen.heading("kvsafe demo: KV-cache offload that proves every chunk before it is used")
    screen.say(f"making a Qwen3 with {shape.parameters / 1e6:.0f} million random weights ...")
    lab.model = wide_qwen3(lab.folder, shape)
    screen.say(f"its KV: {shape.kv_bytes_per_token:,} bytes per token in float32")
    screen.say(f"the prompt: {PROMPT_TOKENS} random tokens, always the same")
    screen.say("every server: vLLM's OpenAI-compatible one, and the one setting for kvsafe:")
    screen.say()
    setting = json.dumps(lab.transfer("recompute"), indent=2)
    for line in f"--kv-transfer-config '{setting}'".splitlines():
        screen.say(f"  {line}")


def _skip(lab: Lab, parts: tuple[Part, ...]) -> None:
    for part in parts:
        lab.report.add(part.name, "this part runs to its end", "not run", False)


def _keep_logs(lab: Lab, keep: bool) -> str | None:
    """After a failure: show the end of that server's log; returns where all logs stay."""
    log = lab.telling_log
    if log is None or not log.exists():
        return None
    kept = log.parent
    if not keep:
        kept = Path(tempfile.mkdtemp(prefix="kvsafe-demo-logs-"))
        shutil.copytree(log.parent, kept, dirs_exist_ok=True)
    lines = log.read_text("utf-8", "replace").splitlines()
    lab.screen.heading(f"the end of {log.name} (all logs are in {kept})")
    for line in [line for line in lines if not NOISE.search(line)][-TAIL_LINES:]:
        lab.screen.say(line)
    return str(kept)


@contextlib.contextmanager
def _folder(keep: bool, screen: Screen) -> Iterator[Path]:
    """The demo's folder; removed at the end unless it is to be kept."""
    folder = Path(tempfile.mkdtemp(prefix="kvsafe-demo-"))
    try:
        yield folder
    finally:
        if keep:
            screen.raw(f"\nkept: {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """Let every ending unwind like Ctrl-C does, so that the server is stopped.

    SIGINT too: a shell starts background jobs with it ignored, and Python then keeps it so.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

# SPDX-License-Identifier: Apache-2.0
"""The command line's frame: what is asked for, what is imported for it, and the exit codes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvsafe import __version__
from kvsafe.cli import ExitCode, UsageError, main


def _install(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true")

    module = SimpleNamespace(add_arguments=add_arguments, run=run)
    monkeypatch.setitem(sys.modules, "kvsafe.cli.trial", module)
    command = main.Command("trial", "kvsafe.cli.trial", "a command of this test")
    monkeypatch.setattr(main, "COMMANDS", (*main.COMMANDS, command))


@pytest.mark.parametrize("code", list(ExitCode))
def test_the_code_of_a_command_is_handed_on(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    _install(monkeypatch, lambda args: code)
    assert main.main(["trial"]) == code


def test_options_after_the_command_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, lambda args: ExitCode.FOUND if args.json else ExitCode.FINE)
    assert main.main(["trial"]) == 0
    assert main.main(["trial", "--json"]) == 1


def test_a_wrong_request_is_2_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise UsageError("no such folder")

    _install(monkeypatch, run)
    assert main.main(["trial"]) == 2
    assert capsys.readouterr().err == "kvsafe trial: no such folder\n"


def test_a_command_that_is_stopped_says_so_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    _install(monkeypatch, run)
    assert main.main(["trial"]) == 1
    assert capsys.readouterr().err == "\nkvsafe trial: stopped\n"


def test_a_reader_that_has_heard_enough_is_no_trace() -> None:
    """`kvsafe ... | head`: more than a pipe holds, and nobody reads it."""
    script = (
        "import sys\n"
        "from kvsafe.cli import main\n"
        "from kvsafe.cli.main import Command\n"
        "import types\n"
        "trial = types.ModuleType('trial')\n"
        "trial.add_arguments = lambda parser: None\n"
        "trial.run = lambda args: [print('x' * 99) for _ in range(9999)] and 0\n"
        "sys.modules['trial'] = trial\n"
        "main.COMMANDS = (Command('trial', 'trial', ''),)\n"
        "sys.exit(main.main(['trial']))\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("argv", [["nonsense"], ["--nonsense"], ["trial", "--nonsense"]])
def test_what_is_unknown_leaves_with_2(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    _install(monkeypatch, lambda args: ExitCode.FINE)
    with pytest.raises(SystemExit) as left:
        main.main(argv)
    assert left.value.code == 2


def test_no_command_prints_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    listing = capsys.readouterr().err
    assert all(entry.name in listing and entry.summary in listing for entry in main.COMMANDS)


def test_a_missing_module_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = main.Command("absent", "kvsafe.cli.absent", "not there")
    monkeypatch.setattr(main, "COMMANDS", (absent,))
    assert main.main(["absent"]) == 2
    assert "kvsafe.cli.absent" in capsys.readouterr().err


def test_the_version_is_shown_without_a_heavy_import() -> None:
    script = (
        "import sys\n"
        "from kvsafe.cli.main import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as left: print(left.code, *{'torch', 'vllm'} & set(sys.modules))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split("\n")[:2] == [f"kvsafe {__version__}", "0"]

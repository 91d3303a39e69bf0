# SPDX-License-Identifier: Apache-2.0
"""Entry point of `kvsafe`: picks the command, imports only its module, returns the exit code.

A command module offers `add_arguments(parser)` and `run(args) -> int`. A new command is a new
line in `COMMANDS` and a module; nothing heavy is imported until the command runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from kvsafe import __version__
from kvsafe.cli import ExitCode, UsageError

__all__ = ["COMMANDS", "Command", "CommandModule", "main"]


class CommandModule(Protocol):
    """What the module of a command offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's own options on `parser`."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work; returns an `ExitCode`, raises `UsageError` for a wrong request."""


@dataclass(frozen=True)
class Command:
    """One subcommand: its name, where its module is, and one line of help."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command(
        "demo", "kvsafe.cli.demo", "show the whole story on a real vLLM engine on this machine"
    ),
    Command("doctor", "kvsafe.cli.doctor", "check this machine and configuration before serving"),
    Command("inspect", "kvsafe.cli.inspect", "what is this chunk, or what does this folder hold"),
    Command("verify", "kvsafe.cli.verify", "open every chunk of a tier's folder"),
    Command("purge", "kvsafe.cli.purge", "remove chunks by age, namespace, epoch, key or identity"),
    Command("fuzz", "kvsafe.cli.fuzz", "try hostile inputs on everything that reads them"),
    Command("model", "kvsafe.cli.model", "walk the lifecycle's state machine and its faults"),
    Command("conformance", "kvsafe.cli.conformance", "trials for tiers, ours and other people's"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvsafe` with `argv` (default: the process's own arguments); returns the exit code.

    0 fine, 1 the command found something or was stopped, 2 used wrongly. `--help`, `--version` and
    argparse's own complaints leave through SystemExit with the same meaning.
    """
    top = _top_parser()
    args = top.parse_args(argv)
    if args.command is None:
        top.print_help(sys.stderr)
        return ExitCode.MISUSED
    command = next(entry for entry in COMMANDS if entry.name == args.command)
    try:
        code = _run(command, args.rest)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"kvsafe {command.name}: {error}", file=sys.stderr)
        return ExitCode.MISUSED
    except KeyboardInterrupt:
        print(f"\nkvsafe {command.name}: stopped", file=sys.stderr)
        return ExitCode.FOUND
    except BrokenPipeError:
        # Whoever read the output has heard enough; nothing is left to say it to, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FOUND


def _top_parser() -> argparse.ArgumentParser:
    width = max(len(entry.name) for entry in COMMANDS)
    listing = "\n".join(f"  {entry.name:<{width}}  {entry.summary}" for entry in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="kvsafe",
        description="Prove every KV-cache chunk before it is copied back.",
        epilog=f"commands:\n{listing}\n\nexit codes: 0 fine, 1 found something, 2 used wrongly",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvsafe {__version__}")
    names = [entry.name for entry in COMMANDS]
    parser.add_argument("command", nargs="?", choices=names, metavar="command")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _run(command: Command, rest: Sequence[str]) -> int:
    module = _load(command)
    parser = argparse.ArgumentParser(prog=f"kvsafe {command.name}", description=command.summary)
    module.add_arguments(parser)
    return module.run(parser.parse_args(rest))


def _load(command: Command) -> CommandModule:
    try:
        return cast(CommandModule, importlib.import_module(command.module))
    except ModuleNotFoundError as error:
        hint = "install vLLM beside kvsafe, for example: pip install 'kvsafe[cpu]'"
        if error.name == command.module:
            hint = "this installation does not contain the command"
        raise UsageError(f"module {error.name} is missing; {hint}") from error


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""`kvsafe conformance SUITE ...`: trials that run on our parts and on other people's.

The suites live in `conformance/` of a checkout and not in the wheel; each module offers what
a command module offers (`add_arguments`, `run`), and is imported only when it is asked for.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from kvsafe.cli import UsageError

__all__ = ["SUITES", "add_arguments", "run"]

SUITES = {
    "lmcache": "conformance.lmcache.server_suite",
    "lmcache-client": "conformance.lmcache.client_suite",
    "tier": "conformance.tier.command",
}
"""Suites by name, and where their modules are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The suite's name, and everything behind it for the suite."""
    parser.add_argument("suite", choices=sorted(SUITES), help="which trials: %(choices)s")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="see `SUITE --help`")


def run(args: argparse.Namespace) -> int:
    """What the suite returns: 0 fine, 1 something failed."""
    suite = _load(args.suite)
    parser = argparse.ArgumentParser(prog=f"kvsafe conformance {args.suite}")
    suite.add_arguments(parser)
    try:
        return int(suite.run(parser.parse_args(args.rest)))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _load(name: str) -> Any:
    module = SUITES[name]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        hint = "run it from a checkout of kvsafe: the trials are not in the wheel"
        if error.name is None or not error.name.startswith("conformance"):
            hint = f"the suite needs {error.name}"
        raise UsageError(f"module {error.name} is missing; {hint}") from error

# SPDX-License-Identifier: Apache-2.0
"""`kvsafe conformance SUITE ...`: trials that run on our parts and on other people's.

The suites live in `conformance/` of a checkout and not in the wheel; each module offers what
a command module offers (`add_arguments`, `run`), and is imported only when it is asked for.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvsafe.cli import UsageError
from kvsafe.cli.checkout import load_from_checkout

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
    suite: Any = load_from_checkout(SUITES[args.suite])
    parser = argparse.ArgumentParser(prog=f"kvsafe conformance {args.suite}")
    suite.add_arguments(parser)
    try:
        return int(suite.run(parser.parse_args(args.rest)))
    except ValueError as error:
        raise UsageError(str(error)) from error

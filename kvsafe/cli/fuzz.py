# SPDX-License-Identifier: Apache-2.0
"""`kvsafe fuzz`: the fuzz targets of the source checkout, and the faults that they have to find.

The targets are not part of an installation: they live beside it in the checkout, under `fuzz/`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvsafe.cli.checkout import load_from_checkout

__all__ = ["add_arguments", "run"]

_ENGINES = ("auto", "atheris", "hypothesis", "seeded")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `kvsafe fuzz`."""
    parser.add_argument(
        "target",
        nargs="?",
        default="all",
        help="a target, all (default), list (what the targets do), or canaries (the seeded "
        "faults, and after how many executions each was found)",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="per target (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same inputs (default 1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--runs", type=int, default=0, help="stop a target after so many")
    parser.add_argument(
        "--corpus", type=Path, help="folder with one folder of inputs per target; read and added to"
    )
    parser.add_argument(
        "--engine",
        choices=_ENGINES,
        default="auto",
        help="what makes the inputs (default: Atheris where it is installed, else Hypothesis)",
    )
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="run this one input of a target"
    )
    parser.add_argument("--canary", default="", metavar="NAME", help="with this seeded fault on")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """0 nothing was found, 1 something was (or a canary was not), 2 used wrongly."""
    code: int = load_from_checkout("fuzz.command").run(args)
    return code

# SPDX-License-Identifier: Apache-2.0
"""Run CrossHair over the contracts: `python -m fuzz.contracts [--timeout S] [--write]`.

Exit 0 when nothing was refuted but what is false on purpose, 1 otherwise. `--write` renews
`spec/contracts.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fuzz.contracts.check import MODULES, Verdict, check, complaints
from fuzz.contracts.page import write_page


def main() -> int:
    """Check, print a table, complain."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.contracts", description=__doc__)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds per contract")
    parser.add_argument("--write", action="store_true", help="renew spec/contracts.md")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    args = parser.parse_args()
    verdicts: list[Verdict] = []
    for module in MODULES:
        if not args.json:
            print(f"{module} ...", file=sys.stderr, flush=True)
        verdicts += check(module, args.timeout)
    if args.json:
        print(json.dumps([verdict._asdict() for verdict in verdicts], indent=1))
    else:
        for one in verdicts:
            print(f"{one.module:<12} {one.contract:<46} {one.outcome}  {one.example}".rstrip())
    if args.write:
        write_page(Path("spec/contracts.md"), verdicts, args.timeout)
    found = complaints(verdicts)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

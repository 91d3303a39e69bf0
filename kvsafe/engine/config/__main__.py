# SPDX-License-Identifier: Apache-2.0
"""Print the page of options, or write it: `python -m kvsafe.engine.config --write PATH`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvsafe.engine.config.page import options_markdown


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: 0 fine, 2 used wrongly. A path that cannot be written raises `OSError`."""
    parser = argparse.ArgumentParser(prog="python -m kvsafe.engine.config")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--markdown", action="store_true", help="print the page of options")
    what.add_argument("--write", type=Path, metavar="PATH", help="write the page to this file")
    options = parser.parse_args(arguments)
    if options.write is None:
        sys.stdout.write(options_markdown())
    else:
        options.write.write_text(options_markdown(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Choose the inputs of the repository: `python -m fuzz.gather TARGET [FOLDER ...]`.

Of all inputs given, and those kept before, the shortest that reach everything that is reached.
Inputs behind the line `# found` are kept as they are: each of them has found something once.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fuzz.corpus import HOME, in_folder, stored
from fuzz.execute import check
from fuzz.targets import make
from fuzz.tracing import Lines

LIMIT = 32 << 10
"""Most bytes of hex that one target may have."""
FOUND = "# found"


def gather(name: str, folders: list[Path]) -> list[bytes]:
    """A small set of inputs that covers what all of them cover, the shortest first."""
    given = {data for folder in folders for data in in_folder(folder)}
    target, lines, kept, size = make(name), Lines(), [], 0
    try:
        for data in sorted({*given, *stored(name)}, key=lambda data: (len(data), data)):
            with lines.watch():
                finding = check(target, data)
            if finding is not None:
                print(f"left out, it finds something: {finding}", file=sys.stderr)
            elif lines.fresh and size + 2 * len(data) < LIMIT:
                kept.append(data)
                size += 2 * len(data) + 1
    finally:
        target.close()
    return kept


def write(name: str, kept: list[bytes]) -> Path:
    """Write the inputs of a target; those that found something stay where they are."""
    path = HOME / f"{name}.hex"
    old = path.read_text(encoding="ascii") if path.exists() else ""
    _, mark, tail = old.partition(FOUND)
    lines = "".join(f"{data.hex()}\n" for data in kept if data)
    head = f"# Inputs of the fuzz target '{name}': {len(kept)} that reach new code.\n"
    path.write_text(head + lines + mark + tail, encoding="ascii")
    return path


def main(arguments: list[str]) -> int:
    """The command."""
    name, folders = arguments[0], [Path(folder) for folder in arguments[1:]]
    kept = gather(name, folders)
    print(f"{write(name, kept).name}: {len(kept)} inputs")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Inputs that are kept: those of the repository, one line of hex each, and folders of files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).parent / "corpus"
_LONGEST = 1 << 16


def stored(name: str) -> list[bytes]:
    """The inputs of the repository for a target: what reached new code, and what found something.

    `corpus/NAME.hex` has one input per line; `#` begins a comment that says where it is from.
    """
    path = HOME / f"{name}.hex"
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return [bytes.fromhex(line) for line in lines if line and not line.startswith("#")]


def in_folder(folder: Path) -> Iterator[bytes]:
    """The inputs in a folder of files, the shortest first."""
    if folder.is_dir():
        paths = [path for path in folder.iterdir() if path.is_file()]
        for path in sorted(paths, key=lambda path: (path.stat().st_size, path.name)):
            yield path.read_bytes()[:_LONGEST]


def keep(folder: Path, data: bytes) -> Path:
    """Write an input into a folder, under a name made of its content."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:16]
    if not path.exists():
        path.write_bytes(data)
    return path

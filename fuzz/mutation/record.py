# SPDX-License-Identifier: Apache-2.0
"""The record of a hunt: one JSON line per fault, written at once, so that a run can go on later.

A fault is told by its file, its texts and its number among faults of the same texts, not by its
line: an edit elsewhere in the file leaves it the same fault.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from fuzz.mutation.cover import ROOT
from fuzz.mutation.hunt import Fate
from fuzz.mutation.operators import Mutant, mutants


class Named(NamedTuple):
    """A fault of a file and its name, which an edit elsewhere does not change."""

    name: str
    file: str
    mutant: Mutant


def faults_of(folder: str) -> list[Named]:
    """All faults of `kvsafe/<folder>`, by file and line."""
    found = []
    for path in sorted((ROOT / "kvsafe" / folder).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        seen: Counter[str] = Counter()
        for mutant in mutants(path.read_text()):
            text = f"{file} {mutant.name} {mutant.before} -> {mutant.after}"
            seen[text] += 1
            found.append(Named(f"{text} #{seen[text]}", file, mutant))
    return found


def choose(faults: list[Named], sample: int, seed: int) -> list[Named]:
    """`sample` of them (0: all), by a hash of seed and name: few edits change few choices."""
    if not sample or sample >= len(faults):
        return faults

    def rank(fault: Named) -> bytes:
        return hashlib.sha256(f"{seed} {fault.name}".encode()).digest()

    picked = set(sorted(faults, key=rank)[:sample])
    return [fault for fault in faults if fault in picked]


def mark_of(file: str) -> str:
    """A short digest of a source file."""
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]


def keep(path: Path, folder: str, name: str, fate: Fate) -> None:
    """Append one fate."""
    mutant = fate.mutant
    record = {
        "folder": folder,
        "name": name,
        "file": fate.file,
        "mark": mark_of(fate.file),
        "line": mutant.line,
        "kind": mutant.name,
        "before": mutant.before,
        "after": mutant.after,
        "outcome": fate.outcome,
        "tests": fate.tests,
        "seconds": round(fate.seconds, 1),
        "noticed_by": fate.noticed_by,
    }
    with path.open("a") as out:
        out.write(json.dumps(record) + "\n")


def known(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of each fault whose file is still the same, by name."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    marks = {file: mark_of(file) for file in {one["file"] for one in records}}
    return {one["name"]: one for one in records if one["mark"] == marks[one["file"]]}

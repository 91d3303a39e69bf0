# SPDX-License-Identifier: Apache-2.0
"""Cases as folders: the name is the verdict and the case, README.md the reason.

`case.json` says which attack of `attacks.py`, with which options, and which promise of a tier
it puts to the test.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.tier.subject import Seen

CASES = Path(__file__).parent / "cases"
FULFILLED = {"hit": (Seen.HIT,), "miss": (Seen.MISS, Seen.REFUSED)}
BASIC = frozenset({"round trip"})
"""What every tier promises by its interface: what goes in comes out."""


@dataclass(frozen=True)
class Case:
    """One case: `verdict` is hit or miss, what an honest tier that promised it answers."""

    name: str
    verdict: str
    promise: str
    attack: str
    options: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Case:
        """From its folder. Raises `ValueError` when it is not one."""
        document = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        verdict, _, _ = folder.name.partition("-")
        if verdict not in FULFILLED or set(document) != {"promise", "attack", "options"}:
            raise ValueError(f"{folder.name} is no case")
        return cls(folder.name, verdict, **document)

    @property
    def about(self) -> str:
        """Its name without the verdict, in words."""
        return self.name.partition("-")[2].replace("-", " ")

    def fulfilled(self, seen: Seen) -> bool:
        """Whether this is what the verdict demands."""
        return seen in FULFILLED[self.verdict]


def cases(names: Iterable[str] = ()) -> list[Case]:
    """All cases in order, or those named. Raises `ValueError` for a name that is none."""
    wanted = set(names)
    found = [Case.read(one) for one in sorted(CASES.iterdir()) if (one / "case.json").exists()]
    if unknown := wanted - {case.name for case in found}:
        raise ValueError(f"no case {sorted(unknown)[0]!r}")
    return [case for case in found if not wanted or case.name in wanted]


def promises() -> frozenset[str]:
    """Every promise that a case puts to the test."""
    return frozenset(case.promise for case in cases())

# SPDX-License-Identifier: Apache-2.0
"""Cases are folders: `case.json` is what is done, `README.md` the verdict and the reason for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LEVELS", "Case", "load"]

HOME = Path(__file__).resolve().parent / "cases"
LEVELS = ("wire", "guard", "proof", "note")
"""wire: every peer relies on it. guard: without it a peer can be hurt. proof: content that only a
reader with seals can judge. note: only written down."""


@dataclass(frozen=True)
class Case:
    """One case: its folder's name, its level, one line of title, and its content."""

    name: str
    level: str
    title: str
    body: dict[str, Any]


def load(kind: str) -> list[Case]:
    """All cases of `kind`, by level and name: "lm", "resp", "lm-client" or "resp-client".

    Raises ValueError for a broken one.
    """
    found = [_read(path) for path in (HOME / kind).iterdir() if path.is_dir()]
    return sorted(found, key=lambda case: (LEVELS.index(case.level), case.name))


def _read(folder: Path) -> Case:
    try:
        body = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        reason = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"case {folder.name}: {error}") from error
    level, title = body.pop("level", None), reason.splitlines()[0].removeprefix("# ")
    if level not in LEVELS or "**Verdict**" not in reason or "**Reason**" not in reason:
        raise ValueError(f"case {folder.name}: level, verdict or reason is missing")
    return Case(folder.name, level, title, body)

# SPDX-License-Identifier: Apache-2.0
"""What `interop --record` found, kept per version of LMCache and part, for the published table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["keep", "section"]

FILE = Path(__file__).resolve().parent / "interop.json"

Kept = dict[str, dict[str, Any]]


def keep(version: str, part: str, lines: Iterable[Mapping[str, Any]], file: Path = FILE) -> None:
    """Replace what is known of one part with these lines: `promise`, `held`, `seen` of each."""
    held = _load(file)
    today = datetime.now(UTC).date().isoformat()
    named = [{name: line[name] for name in ("promise", "held", "seen")} for line in lines]
    held.setdefault(version, {})[part] = {"date": today, "lines": named}
    ordered = {known: dict(sorted(held[known].items())) for known in sorted(held, reverse=True)}
    file.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def section(file: Path = FILE) -> list[str]:
    """The part of the page about real engines, line by line; nothing where nothing is known."""
    held = _load(file)
    if not held:
        return []
    return [
        "",
        "## Real engines",
        "",
        "Written by `python -m conformance.lmcache.interop --record`: vLLM with LMCache's own",
        "connectors and vLLM with kvsafe, one engine at a time, a tiny model, greedy tokens",
        "compared with those of an engine without a connector. What the parts are is said in",
        "`conformance/lmcache/README.md`.",
        "",
        f"| part | promise | {' | '.join(f'LMCache {version}' for version in held)} |",
        f"|---|---|{'---|' * len(held)}",
        *_rows(held),
        "",
        *(f"- {line}" for line in _notes(held)),
    ]


def _load(file: Path) -> Kept:
    loaded: Kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return loaded


def _rows(held: Kept) -> Iterator[str]:
    seen: dict[tuple[str, str], dict[str, str]] = {}
    for version, parts in held.items():
        for part, entry in parts.items():
            for line in entry["lines"]:
                word = "held" if line["held"] else f"not: {line['seen']}"
                seen.setdefault((part, line["promise"]), {})[version] = word
    for (part, promise), words in sorted(seen.items(), key=lambda item: item[0][0]):
        cells = (words.get(version, "") for version in held)
        yield f"| {part} | {promise} | {' | '.join(cells)} |"


def _notes(held: Kept) -> Iterator[str]:
    for version, parts in held.items():
        dates = ", ".join(f"{part} {entry['date']}" for part, entry in parts.items())
        yield f"LMCache {version}: {dates}."

# SPDX-License-Identifier: Apache-2.0
"""All chunks of a folder opened, several at a time; memory does not grow with their number."""

from __future__ import annotations

import errno
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvsafe.cli.inspect.advice import Advice
from kvsafe.cli.inspect.chunk import refusal_document
from kvsafe.cli.inspect.reading import Depth, Examined, Reader
from kvsafe.cli.inspect.screen import amount
from kvsafe.cli.inspect.summary import refusal_lines
from kvsafe.cli.inspect.tree import Entry, Role, Tree, shown
from kvsafe.cli.verify.aside import MOVED
from kvsafe.cli.verify.resume import Memory
from kvsafe.seal.refusal import RefusalKind

__all__ = ["Tally", "examine_all", "examine_one"]

LISTED = 10_000
"""Most refused files that are kept by name for the JSON document."""

_AHEAD = 4


@dataclass(slots=True)
class Tally:
    """What came of a run."""

    words: Counter[str] = field(default_factory=Counter)
    refused: Counter[RefusalKind] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    unchecked: Counter[str] = field(default_factory=Counter)
    aside: Counter[str] = field(default_factory=Counter)
    advice: Advice = field(default_factory=Advice)
    listed: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0
    skipped: int = 0
    finished: bool = False

    @property
    def files(self) -> int:
        """Files looked at, in this run."""
        return sum(self.words.values())

    @property
    def fine(self) -> bool:
        """Whether everything was looked at and nothing was refused."""
        return self.finished and not self.refused and not self.unread

    def add(self, entry: Entry, found: Examined, moved: str) -> None:
        """Count one file; `moved` says what became of a refused one."""
        self.words[found.word] += 1
        verdict = found.verdict
        if verdict is None:
            self.unread.update([] if found.gone else [found.trouble])
            return
        self.size += found.info.st_size if found.info is not None else 0
        self.unchecked.update(verdict.unchecked)
        if moved != MOVED:
            self.advice.add(verdict)
        if verdict.refusal is None:
            return
        self.refused[verdict.refusal.kind] += 1
        self.aside.update([moved] if moved else [])
        if len(self.listed) < LISTED:
            self.listed.append(
                {"path": entry.text, **refusal_document(verdict.refusal), "aside": moved}
            )

    def document(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "finished": self.finished,
            "files": self.files,
            "bytes": self.size,
            "skipped": self.skipped,
            **{word: self.words[word] for word in ("good", "stale", "refused", "unread", "gone")},
            "refused_by_number": {str(k.value): n for k, n in sorted(self.refused.items())},
            "unread_by_reason": dict(self.unread),
            "unchecked": dict(self.unchecked),
            "aside": dict(self.aside),
            "refused_files": self.listed,
            "refused_files_left_out": sum(self.refused.values()) - len(self.listed),
        }

    def lines(self) -> Iterator[str]:
        """The summary for people."""
        skipped = f", {self.skipped:,} skipped: good before" if self.skipped else ""
        yield f"{self.files:,} files, {amount(self.size)}{skipped}"
        if not self.files and not self.skipped:
            yield "there is no chunk file yet"
        for word, meaning in _WORDS.items():
            if self.words[word]:
                yield f"  {self.words[word]:>8,} {meaning}"
        yield from refusal_lines(self.refused)
        yield from (f"{count} {shown(text)}" for text, count in self.aside.items())
        yield from (f"{count} not read: {shown(text)}" for text, count in self.unread.items())
        yield from (f"not checked in {n}: {text}" for text, n in self.unchecked.items())
        if not self.finished:
            yield "stopped before the end"


_WORDS = {
    "good": "good",
    "stale": "whole, but of another epoch (601, 602)",
    "refused": "refused",
    "unread": "not read",
    "gone": "gone meanwhile: evicted by an engine",
}


def examine_one(tree: Tree, reader: Reader, entry: Entry) -> Examined:
    """Open one chunk file; whatever it is, a value comes back."""
    try:
        with tree.folder(entry.parts[:-1]) as folder:
            return reader.examine(folder, entry.parts, Depth.WHOLE)
    except OSError as exc:
        gone = exc.errno in (errno.ENOENT, errno.ENOTDIR)
        return Examined(entry.info, trouble=exc.strerror or "error", gone=gone)


def examine_all(
    tree: Tree,
    reader: Reader,
    jobs: int,
    memory: Memory | None,
    tally: Tally,
    done: Callable[[Entry, Examined], None],
) -> None:
    """Examine every chunk with `jobs` threads; `done` is called here, in order of the listing.

    What `memory` knows is skipped. Ends early with KeyboardInterrupt, and then waits only for
    the files that are being read.
    """
    window: deque[tuple[Entry, Future[Examined]]] = deque()
    with ThreadPoolExecutor(jobs, thread_name_prefix="kvsafe-verify") as pool:
        try:
            for entry in tree.entries():
                if entry.role is not Role.CHUNK:
                    continue
                if memory is not None and memory.knows("/".join(entry.parts), entry.info):
                    tally.skipped += 1
                    continue
                window.append((entry, pool.submit(examine_one, tree, reader, entry)))
                if len(window) >= _AHEAD * jobs:
                    _take(window, memory, done)
            while window:
                _take(window, memory, done)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _take(
    window: deque[tuple[Entry, Future[Examined]]],
    memory: Memory | None,
    done: Callable[[Entry, Examined], None],
) -> None:
    entry, future = window.popleft()
    found = future.result()
    done(entry, found)
    if memory is not None and found.word == "good" and found.info is not None:
        memory.note("/".join(entry.parts), found.info)

# SPDX-License-Identifier: Apache-2.0
"""`kvsafe purge DIR`: remove chunks by age, namespace, epoch, key id or identity.

Shows what would go; `--yes` removes it. Needs no key: it goes by what headers say, since
whoever could write a false header there could have removed the file. See `spec/commands.md`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvsafe.cli import ExitCode
from kvsafe.cli.inspect.judge import Judge
from kvsafe.cli.inspect.keys import Epochs, Keys
from kvsafe.cli.inspect.reading import Depth, Examined, Reader
from kvsafe.cli.inspect.screen import Bar, amount, print_json, say
from kvsafe.cli.inspect.summary import Summary
from kvsafe.cli.inspect.tree import Entry, Role, Tree, need_chunks, need_root, shown
from kvsafe.cli.purge.choice import Choice, add_choice_arguments, choice_of
from kvsafe.cli.purge.removal import Remover, open_remover
from kvsafe.seal.suites import Suite

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `kvsafe purge`."""
    parser.add_argument("dir", metavar="DIR", help="a tier's root_dir")
    add_choice_arguments(parser)
    parser.add_argument("--quarantine", action="store_true", help="the quarantine, not the chunks")
    parser.add_argument("--yes", action="store_true", help="remove; without it nothing is touched")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


@dataclass(slots=True)
class Purge:
    """What a run chose, removed and left."""

    chosen: Summary = field(default_factory=Summary)
    unreadable: int = 0
    kept: int = 0
    left_unreadable: int = 0
    elsewhere: int = 0
    removed: int = 0
    removed_bytes: int = 0
    changed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    unseen: Counter[str] = field(default_factory=Counter)
    account: str = ""
    finished: bool = False
    looked: int = 0

    def choose(self, found: Examined) -> None:
        """Count a file that is to go."""
        self.chosen.add(found)
        self.unreadable += found.verdict is None or found.verdict.outline is None

    def leave(self, entry: Entry, found: Examined, choice: Choice) -> None:
        """Count a file that stays."""
        readable = found.verdict is not None and found.verdict.outline is not None
        if readable or found.gone or entry.role is Role.QUARANTINED or choice.unreadable:
            self.kept += 1
        else:
            self.left_unreadable += 1

    @property
    def fine(self) -> bool:
        """Whether every file was looked at, and what was to go is gone."""
        return self.finished and not self.failed and not self.unseen

    def document(self, really: bool) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "removing": really,
            "finished": self.finished,
            "chosen": self.chosen.files,
            "chosen_bytes": self.chosen.size,
            "chosen_unreadable": self.unreadable,
            "chosen_by_sort": self.chosen.document()["chunks"],
            "kept": self.kept,
            "left_unreadable": self.left_unreadable,
            "left_elsewhere": self.elsewhere,
            "removed": self.removed,
            "removed_bytes": self.removed_bytes,
            "changed_meanwhile": self.changed,
            "failed": dict(self.failed),
            "not_looked_at": dict(self.unseen),
            "account": self.account,
        }

    def lines(self, really: bool) -> Iterator[str]:
        """The result for people."""
        if self.chosen.sorts:
            yield from self.chosen.table()
        if self.unreadable:
            yield f"{self.unreadable:,} without a readable header"
        verb = "to remove" if not really else "chosen"
        yield f"{self.chosen.files:,} files, {amount(self.chosen.size)} {verb}; {self.kept:,} stay"
        if self.left_unreadable:
            yield f"{self.left_unreadable:,} have no readable header and stay (see --unreadable)"
        if self.elsewhere:
            yield f"{self.elsewhere:,} lie where the tier keeps nothing and stay"
        yield from (f"not looked at: {text}" for text in self.unseen)
        if not really:
            yield "nothing was removed: add --yes to remove them" if self.chosen.files else ""
            return
        yield f"{self.removed:,} files, {amount(self.removed_bytes)} removed"
        if self.changed:
            yield f"{self.changed:,} were gone or written anew meanwhile"
        yield from (f"{count} not removed: {text}" for text, count in self.failed.items())
        yield self.account
        if not self.finished:
            yield "stopped before the end"


def run(args: argparse.Namespace) -> int:
    """0 if all that was chosen is gone (or was only shown), 1 if something was in the way."""
    choice = choice_of(args)
    with Tree(args.dir) as tree:
        need_root(tree)
        remover = open_remover(tree, really=args.yes)
        purge = Purge()
        try:
            # An interrupt is an ordinary end: the account is settled and the result told.
            with contextlib.suppress(KeyboardInterrupt):
                _purge(args, choice, tree, remover, purge)
                purge.finished = True
        finally:
            purge.account = remover.close()
        need_chunks(tree, purge.looked)
        purge.unseen.update(tree.troubles)
        path = shown(tree.path)
    if args.json:
        print_json({"path": path, **purge.document(args.yes)})
    else:
        say(line for line in purge.lines(args.yes) if line)
    return ExitCode.FINE if purge.fine else ExitCode.FOUND


def _purge(
    args: argparse.Namespace, choice: Choice, tree: Tree, remover: Remover, purge: Purge
) -> None:
    keys = Keys({}, tuple(Suite))
    reader = Reader(Judge(keys, Epochs(None, keys)))
    wanted = Role.QUARANTINED if args.quarantine else Role.CHUNK
    bar = Bar()
    for entry in tree.entries():
        purge.looked += entry.role in (Role.CHUNK, Role.QUARANTINED)
        if entry.role is not wanted:
            continue
        bar.show("purging", purge.looked, 0, purge.removed_bytes)
        if not remover.owns(entry):
            purge.elsewhere += 1
            continue
        found = _look(tree, reader, entry)
        if not choice.meets(entry, found):
            purge.leave(entry, found, choice)
            continue
        purge.choose(found)
        if args.yes:
            _remove(remover, entry, found, purge)
    bar.clear()


def _look(tree: Tree, reader: Reader, entry: Entry) -> Examined:
    try:
        with tree.folder(entry.parts[:-1]) as folder:
            return reader.examine(folder, entry.parts, Depth.HEADER)
    except OSError as exc:
        return Examined(entry.info, trouble=exc.strerror or "error")


def _remove(remover: Remover, entry: Entry, found: Examined, purge: Purge) -> None:
    try:
        gone = remover.remove(entry, found)
    except OSError as exc:
        purge.failed[exc.strerror or "error"] += 1
        return
    if not gone:
        purge.changed += 1
        return
    purge.removed += 1
    purge.removed_bytes += found.info.st_size if found.info is not None else 0

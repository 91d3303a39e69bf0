# SPDX-License-Identifier: Apache-2.0
"""`kvsafe verify DIR`: open every chunk of a tier's folder, while engines may go on serving.

Reads only: no lease, no temporary, no time of access is touched. `--quarantine` moves what is
refused aside. See `spec/commands.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import os

from kvsafe.cli import ExitCode, UsageError
from kvsafe.cli.inspect import add_row_argument, row_limit, say_keys
from kvsafe.cli.inspect.judge import Judge
from kvsafe.cli.inspect.keys import (
    KEYED,
    Keys,
    add_key_arguments,
    epochs_of,
    read_keys,
)
from kvsafe.cli.inspect.reading import Examined, Reader
from kvsafe.cli.inspect.screen import Bar, print_json, say
from kvsafe.cli.inspect.tree import Entry, Role, Tree, need_chunks, need_root, shown
from kvsafe.cli.verify.aside import open_aside
from kvsafe.cli.verify.resume import Memory
from kvsafe.cli.verify.work import Tally, examine_all

__all__ = ["add_arguments", "run"]

SAID = 200
"""Most refused files that are shown one by one."""
MAX_JOBS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `kvsafe verify`."""
    parser.add_argument("dir", metavar="DIR", help="a tier's root_dir")
    parser.add_argument("--jobs", type=int, default=0, help="threads (default: one per CPU)")
    parser.add_argument("--quarantine", action="store_true", help="move refused files aside")
    parser.add_argument(
        "--resume", metavar="FILE", help="remember what was good; skip it next time"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    add_row_argument(parser)
    add_key_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 if every chunk is whole, 1 if one is refused or was not read, or the run was stopped."""
    jobs = args.jobs or len(os.sched_getaffinity(0))
    if not 1 <= jobs <= MAX_JOBS:
        raise UsageError(f"--jobs {args.jobs}: 1 to {MAX_JOBS}")
    keys = read_keys(args, os.environ, KEYED)
    _need_keys(keys, args.no_key)
    epochs = epochs_of(args, os.environ, keys)
    with contextlib.ExitStack() as stack:
        tree = stack.enter_context(Tree(args.dir))
        need_root(tree)
        limit = row_limit(args.max_row)
        reader = Reader(Judge(keys, epochs), owner=tree.owner, max_row_bytes=limit)
        memory = None
        if args.resume:
            memory = stack.enter_context(Memory(args.resume, tree.path, keys))
        tally = _verify(args, tree, reader, jobs, memory)
        need_chunks(tree, tally.files + tally.skipped)
    if args.json:
        advice = {"what_to_do": tally.advice.texts(args.dir)}
        print_json({"path": shown(tree.path), **tally.document(), **advice})
    else:
        say(tally.lines())
        say(tally.advice.lines(args.dir))
    say_keys(keys, epochs, quiet=True)
    return ExitCode.FINE if tally.fine else ExitCode.FOUND


def _need_keys(keys: Keys, without: bool) -> None:
    if not keys.complete and without:
        raise UsageError("needs the key, so not --no-key; without it there is kvsafe inspect DIR")
    if not keys.complete:
        raise UsageError(
            "no key was found, and without it a chunk cannot be opened: name --state-dir, "
            "--key-file or --key-env, or --suite blake3 for an unkeyed store"
        )


def _verify(
    args: argparse.Namespace, tree: Tree, reader: Reader, jobs: int, memory: Memory | None
) -> Tally:
    tally, bar = Tally(), Bar()
    total = _count(tree) if bar.live else 0
    with contextlib.ExitStack() as stack:
        aside = open_aside(tree) if args.quarantine else None
        if aside is not None:
            stack.callback(aside.close)

        def done(entry: Entry, found: Examined) -> None:
            moved = (
                aside.move(entry, found) if aside is not None and found.word == "refused" else ""
            )
            tally.add(entry, found, moved)
            if found.word in ("refused", "unread") and not args.json:
                bar.clear()
                _tell(entry, found, moved, tally)
            bar.show("verifying", tally.files + tally.skipped, total, tally.size)

        # An interrupt is an ordinary end of a long run: say what is known so far.
        with contextlib.suppress(KeyboardInterrupt):
            examine_all(tree, reader, jobs, memory, tally, done)
            tally.finished = True
    bar.clear()
    tally.unread.update(tree.troubles)
    return tally


def _count(tree: Tree) -> int:
    """How many files there are now, for the bar."""
    total = sum(entry.role is Role.CHUNK for entry in tree.entries())
    tree.troubles.clear()
    return total


def _tell(entry: Entry, found: Examined, moved: str, tally: Tally) -> None:
    told = tally.words["refused"] + tally.words["unread"]
    if told > SAID:
        if told == SAID + 1:
            say(["more are only counted (--json lists them)"])
        return
    refusal = None if found.verdict is None else found.verdict.refusal
    if refusal is None:
        say([f"not read  {entry.text}: {found.trouble}"])
        return
    what = f"{refusal.field}: expected {refusal.expected}, found {refusal.found}"
    say([f"{refusal.number:>5}  {entry.text}: {what}" + (f" ({moved})" if moved else "")])

# SPDX-License-Identifier: Apache-2.0
"""`kvsafe inspect FILE|DIR`: what is this chunk, or what does this folder hold?

Needs no engine, and with less in the answer no key. See `spec/commands.md`.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from pathlib import Path

from kvsafe.cli import ExitCode, UsageError
from kvsafe.cli.inspect.chunk import chunk_document, chunk_lines
from kvsafe.cli.inspect.judge import Judge
from kvsafe.cli.inspect.keys import Epochs, Keys, add_key_arguments, epochs_of, read_keys
from kvsafe.cli.inspect.reading import MAX_ROW_BYTES, Depth, Reader
from kvsafe.cli.inspect.screen import Bar, print_json, say
from kvsafe.cli.inspect.summary import Summary
from kvsafe.cli.inspect.tree import Role, Tree, need_chunks, shown
from kvsafe.seal.suites import Suite

__all__ = ["add_arguments", "add_row_argument", "row_limit", "run", "say_keys"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `kvsafe inspect`."""
    parser.add_argument("path", metavar="FILE|DIR", help="a chunk file, or a tier's root_dir")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    add_row_argument(parser)
    add_key_arguments(parser)


def add_row_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the bound on one file."""
    parser.add_argument(
        "--max-row", metavar="SIZE", default=str(MAX_ROW_BYTES),
        help="longest file that is read (default 512MiB); longer ones are reported, not read",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """0 if nothing is refused, 1 if something is, or could not be read."""
    keys = read_keys(args, os.environ, tuple(Suite))
    epochs = epochs_of(args, os.environ, keys)
    judge, limit = Judge(keys, epochs), row_limit(args.max_row)
    try:
        info = os.lstat(args.path)
        is_folder = stat.S_ISDIR(info.st_mode) or Path(args.path).is_dir()
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(f"{shown(args.path)}: {reason}; name a chunk file or a folder") from None
    code = (_folder if is_folder else _file)(args, judge, limit)
    say_keys(keys, epochs, args.json)
    return code


def row_limit(text: str) -> int:
    """The bound on one file in bytes: a number, or a text such as `512MiB`."""
    from kvsafe.engine.config import ConfigError, parse_size

    try:
        return parse_size(int(text) if text.isascii() and text.isdigit() else text)
    except ConfigError as exc:
        raise UsageError(f"--max-row: {exc.problems[0]}") from None


def _file(args: argparse.Namespace, judge: Judge, limit: int) -> int:
    path = os.path.abspath(args.path)
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        reader = Reader(judge, max_row_bytes=limit)
        found = reader.examine(folder, path.split("/")[-2:], Depth.WHOLE)
    finally:
        os.close(folder)
    if args.json:
        print_json(chunk_document(shown(args.path), found))
    else:
        say(chunk_lines(shown(args.path), found))
    return ExitCode.FOUND if found.word in ("refused", "unread", "gone") else ExitCode.FINE


def _folder(args: argparse.Namespace, judge: Judge, limit: int) -> int:
    summary, bar = Summary(), Bar()
    with Tree(args.path) as tree:
        reader = Reader(judge, owner=tree.owner, max_row_bytes=limit)
        for entry in tree.entries():
            if entry.role is not Role.CHUNK:
                summary.others[entry.role] += 1
                summary.other_bytes += entry.info.st_size
                continue
            bar.show("looking at", summary.files, 0, summary.size)
            try:
                with tree.folder(entry.parts[:-1]) as folder:
                    summary.add(reader.examine(folder, entry.parts, Depth.HEADER))
            except OSError as exc:
                summary.unread[exc.strerror or "error"] += 1
        need_chunks(tree, summary.files + summary.others[Role.QUARANTINED])
        summary.unread.update(tree.troubles)
        inside = tree.inside
        kind = "a kvsafe-fs store" if tree.kvsafe_fs else "files"
    bar.clear()
    if args.json:
        advice = {"what_to_do": summary.advice.texts(args.path)}
        print_json({"path": shown(args.path), "kind": kind, **summary.document(), **advice})
    else:
        say([f"{shown(args.path)}: {kind}, {summary.files:,} chunk files, headers only", ""])
        say(summary.lines())
        say(summary.advice.lines(args.path))
    if inside:
        print(
            f"note: a part of the kvsafe-fs store {shown(inside)}: owner, mode and links of files "
            "count only where that is named",
            file=sys.stderr,
        )
    return ExitCode.FOUND if summary.found_something else ExitCode.FINE


def say_keys(keys: Keys, epochs: Epochs, quiet: bool) -> None:
    """Notes on stderr: without which key, and which epoch file could not be read."""
    for trouble in epochs.troubles:
        print(f"note: {shown(trouble)}", file=sys.stderr)
    if not keys.source and not quiet:
        print(
            "note: no key was read, so nothing keyed could be proven: name --state-dir, "
            "--key-file or --key-env",
            file=sys.stderr,
        )

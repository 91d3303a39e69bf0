# SPDX-License-Identifier: Apache-2.0
"""`kvsafe conformance lmcache lm://HOST:PORT` and `... resp://HOST:PORT`: judge a server.

The cases write under a model name that is new in every run, so a server that holds data keeps it
and is not confused by an earlier run. Some chunks of a few KiB stay behind: lm:// cannot delete.
"""

from __future__ import annotations

import argparse
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from conformance.lmcache import cases
from conformance.lmcache.lm_talk import LmTalk
from conformance.lmcache.report import Result, add_report_arguments, deliver
from conformance.lmcache.resp_talk import RespTalk
from conformance.lmcache.talk import Talk
from kvsafe.cli import UsageError

__all__ = ["add_arguments", "examine", "run"]

WIRES: dict[str, type[Talk]] = {"lm": LmTalk, "resp": RespTalk}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("server", metavar="URL", help="lm://HOST:PORT or resp://HOST:PORT")
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Examine the server; 0 all well, 1 a case failed, `UsageError` when it cannot be reached."""
    wire, address = parse_url(args.server)
    chosen = choose(wire, args.case)
    try:
        socket.create_connection(address, timeout=args.patience).close()
    except OSError as error:
        raise UsageError(f"{args.server} cannot be reached: {error}") from error
    results = list(examine(wire, address, args.patience, chosen))
    return deliver(args.server, results, args)


def parse_url(url: str) -> tuple[str, tuple[str, int]]:
    """Wire and address of a URL; raises `UsageError` for another form."""
    try:
        parts = urlsplit(url)
        wire, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from error
    if wire not in WIRES or not host or not port or parts.path not in ("", "/"):
        raise UsageError(f"{url} is not lm://HOST:PORT or resp://HOST:PORT")
    return wire, (host, port)


def choose(kind: str, names: Sequence[str] | None) -> list[cases.Case]:
    """The cases of a kind, or those named; raises `UsageError` for an unknown name."""
    known = cases.load(kind)
    unknown = set(names or ()) - {case.name for case in known}
    if unknown:
        raise UsageError(f"no such case: {', '.join(sorted(unknown))}")
    return [case for case in known if not names or case.name in names]


def examine(
    wire: str, address: tuple[str, int], patience_s: float, chosen: Sequence[cases.Case]
) -> Iterator[Result]:
    """Play the cases one after another, each on connections and a model name of its own."""
    for number, case in enumerate(chosen):
        model = f"conf-{secrets.token_hex(4)}-{number}"
        talk = WIRES[wire](address, patience_s, model)
        began = time.monotonic()
        try:
            found = _play(talk, case)
        finally:
            talk.close()
        verdict = "note" if case.level == "note" else "fail" if found else "pass"
        yield Result(
            case.name, case.level, case.title, verdict, found or "", time.monotonic() - began
        )


def _play(talk: Talk, case: cases.Case) -> str | None:
    """What was wrong at the first wrong step; for a note, what its last step gave."""
    outcome = ""
    for number, step in enumerate(case.body["steps"], 1):
        outcome = talk.play(step)
        want = step.get("want")
        if case.level != "note" and want is not None and outcome not in want:
            return f"step {number}, {step['do']}: {outcome}, not {' or '.join(want)}"
    if case.level == "note":
        return outcome
    return "bytes that nobody asked for" if talk.stray() else None

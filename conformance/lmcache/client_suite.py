# SPDX-License-Identifier: Apache-2.0
"""`kvsafe conformance lmcache-client --listen HOST:PORT`: play servers of all tempers to a client.

With `--driver COMMAND` the suite starts a small program that uses the client under test (see
`drivers/loop.py`), asks it for chunks and judges what it makes of each lie. With `--temper NAME`
it only plays that server until it is interrupted, and then says what it was asked.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conformance.lmcache import cases
from conformance.lmcache.driver import Driver, DriverFailed
from conformance.lmcache.hostile import HostileServer
from conformance.lmcache.hostile_resp import RESP_TEMPERS, HostileRedis
from conformance.lmcache.report import Result, add_report_arguments, deliver
from conformance.lmcache.server_suite import choose
from conformance.lmcache.tempers import TEMPERS
from conformance.lmcache.wire import CHUNK, Command, Meta, pattern
from kvsafe.cli import UsageError

__all__ = ["add_arguments", "examine", "run"]

METAS = {"chunk": CHUNK, "large": CHUNK.but(length=16 << 20, shape=(2, 4, 4096, 256))}
SEEDS = {"A": 1, "B": 2, "C": 3}
_OLD = 9
_GROWTH = 256 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--wire", choices=("lm", "resp"), default="lm")
    parser.add_argument("--driver", metavar="COMMAND", help="a program that uses the client")
    parser.add_argument("--temper", metavar="NAME", help="play this server only, to any client")
    parser.add_argument("--seconds", type=float, default=None, help="with --temper: for how long")
    parser.add_argument("--list", action="store_true", help="print the tempers and what they do")
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Play; 0 all well, 1 the client failed a case, `UsageError` for a wrong request."""
    tempers: Mapping[str, Any] = TEMPERS if args.wire == "lm" else RESP_TEMPERS
    if args.list:
        print("\n".join(f"{name:<20} {temper.summary}" for name, temper in tempers.items()))
        return 0
    if (args.driver is None) == (args.temper is None):
        raise UsageError("give either --driver COMMAND or --temper NAME")
    address = _address(args.listen)
    if args.driver is None:
        return _play_alone(args, tempers, address)
    driver = Driver(args.driver, args.patience)
    try:
        chosen = choose(f"{args.wire}-client", args.case)
        results = list(examine(args.wire, address, driver, chosen))
    except DriverFailed as error:
        raise UsageError(str(error)) from error
    finally:
        driver.close()
    return deliver(f"client {args.driver}", results, args)


def examine(
    wire: str, address: tuple[str, int], driver: Driver, chosen: Sequence[cases.Case]
) -> Iterator[Result]:
    """Play the cases one after another to the client behind `driver`."""
    for case in chosen:
        began = time.monotonic()
        with _server(wire, case.body["temper"], address) as server:
            found = _Session(wire, server, driver).play(case)
        verdict = "fail" if found else "pass"
        yield Result(case.name, case.level, case.title, verdict, found, time.monotonic() - began)


def _server(wire: str, temper: str, address: tuple[str, int]) -> HostileServer | HostileRedis:
    if wire == "lm":
        return HostileServer(temper, *address)
    return HostileRedis(temper, *address)


class _Session:
    """One case: a server with two chunks in it, and the client's answers."""

    def __init__(self, wire: str, server: HostileServer | HostileRedis, driver: Driver) -> None:
        self._wire, self._server, self._driver = wire, server, driver
        self._peak: int | None = None
        if isinstance(server, HostileServer):
            server.keep(self._key("A"), CHUNK, pattern(CHUNK.length, _OLD))
            for name in ("A", "B"):
                server.keep(self._key(name), CHUNK, pattern(CHUNK.length, SEEDS[name]))
        else:
            for name in ("A", "B"):
                server.keep(self._key(name), pattern(CHUNK.length, SEEDS[name]))

    def play(self, case: cases.Case) -> str:
        """What was wrong at the first wrong step, "" if nothing was."""
        opened, answer = self._driver.open(self._wire, self._server.host, self._server.port)
        if opened != "open" and not case.body.get("may_not_open", False):
            return f"open: {opened} {answer.get('note', '')}"
        self._peak = self._driver.peak()
        lied = False
        for step in case.body["steps"]:
            word, note = self._step(step)
            if word not in step.get("want", [word]):
                after = "afterwards, from an honest server, " if lied and self._honest() else ""
                return f"{after}{step['do']}: {word}{f' ({note})' if note else ''}"
            lied = lied or (step["do"] != "become" and not self._honest())
        return ""

    def _honest(self) -> bool:
        return self._server.temper.name == "good"

    def _step(self, step: Mapping[str, Any]) -> tuple[str, str]:
        if step["do"] == "become":
            self._server.play(step["temper"])
            return "done", ""
        if step["do"] == "memory":
            return self._memory(), ""
        for attempt in range(step.get("tries", 1)):
            if attempt:
                time.sleep(0.25)
            word, note = self._call(step)
            # After these there is no process that could be asked again.
            if word in (*step.get("want", [word]), "hung", "died"):
                break
        return word, note

    def _call(self, step: Mapping[str, Any]) -> tuple[str, str]:
        meta: Meta = METAS[step.get("meta", "chunk")]
        seed = SEEDS.get(step["key"], 0)
        data = pattern(meta.length, seed) if step["do"] == "store" else None
        word, answer = self._driver.call(step["do"], self._key(step["key"]), meta, data)
        note = str(answer.get("note", ""))
        if word == "hit" and base64.b64decode(answer.get("data", "")) != pattern(meta.length, seed):
            return "wrong", "handed on bytes that are not the chunk's"
        return word, note

    def _memory(self) -> str:
        now = self._driver.peak()
        if now is None or self._peak is None:
            return "unknown"
        return "small" if now - self._peak < _GROWTH else f"grew by {(now - self._peak) >> 20} MiB"

    def _key(self, name: str) -> str:
        digest = hashlib.sha256(name.encode()).hexdigest()
        if self._wire == "lm":
            return f"conformance@1@0@1{digest[:15]}@bfloat16"
        return f"conformance@01000100@0@{digest}"


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text} is not HOST:PORT")
    return host, int(port)


def _play_alone(
    args: argparse.Namespace, tempers: Mapping[str, Any], address: tuple[str, int]
) -> int:
    if args.temper not in tempers:
        raise UsageError(f"no temper {args.temper}; --list names them")
    with _server(args.wire, args.temper, address) as server:
        print(f"{args.wire}://{server.host}:{server.port} plays {args.temper}", flush=True)
        end = None if args.seconds is None else time.monotonic() + args.seconds
        with contextlib.suppress(KeyboardInterrupt):
            while end is None or time.monotonic() < end:
                time.sleep(0.2)
        print(f"{server.connections} connections; asked: {_asked(server)}")
    return 0


def _asked(server: HostileServer | HostileRedis) -> str:
    if isinstance(server, HostileServer):
        names = {command.value: command.name for command in Command}
        counts = Counter(names.get(r.command, str(r.command)) for r in server.seen)
    else:
        counts = Counter(words[0][:16].decode("latin-1").upper() for words in server.seen)
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "nothing"

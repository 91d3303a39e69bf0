# SPDX-License-Identifier: Apache-2.0
"""The suite for clients passes a careful client and finds each careless one."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pytest

from conformance.lmcache import cases, client_suite
from conformance.lmcache.driver import Driver, DriverFailed
from conformance.lmcache.hostile import TEMPERS
from conformance.lmcache.hostile_resp import RESP_TEMPERS
from conformance.lmcache.report import Result
from conformance.lmcache.server_suite import choose
from kvsafe.cli import UsageError

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = ("127.0.0.1", 0)
PATIENCE_S = 30.0
LONG = bool(os.environ.get("KVSAFE_LONG"))
"""With `KVSAFE_LONG=1` more tempers."""

# A client in a few lines: believes every header, allocates by shape, waits for ever.
CARELESS = """
import base64, json, math, socket, struct, sys
sys.path.insert(0, {root!r})
from conformance.lmcache.wire import Command, Reply, Request, WIDTHS, Meta
link, old = None, bytearray(1 << 16)

def whole(n):
    data = b""
    while len(data) < n:
        part = link.recv(n - len(data))
        if not part:
            raise ConnectionError
        data += part
    return data

def fetch(key):
    link.sendall(Request(Command.GET, key).pack())
    reply = Reply.unpack(whole(36))
    if reply.code != 200:
        return {{"outcome": "miss"}}
    size = math.prod(reply.meta.shape) * WIDTHS.get(reply.meta.dtype, 1)
    got = whole(reply.meta.length)
    old[: len(got)] = got
    return {{"outcome": "hit", "data": base64.b64encode(bytes(old[:size])).decode()}}

for line in sys.stdin:
    q = json.loads(line)
    try:
        if q["op"] == "open":
            link = socket.create_connection((q["host"], q["port"]))
            answer = {{"outcome": "open"}}
        elif q["op"] == "look":
            link.sendall(Request(Command.EXIST, q["key"]).pack())
            code = Reply.unpack(whole(36)).code
            answer = {{"outcome": "yes" if code == 200 else "no"}}
        elif q["op"] == "fetch":
            answer = fetch(q["key"])
        else:
            m, data = q["meta"], base64.b64decode(q["data"])
            meta = Meta(m["length"], m["fmt"], m["dtype"], tuple(m["shape"]))
            link.sendall(Request(Command.PUT, q["key"], meta).pack() + data)
            answer = {{"outcome": "stored"}}
    except Exception as error:
        answer = {{"outcome": "error", "note": repr(error)}}
    print(json.dumps(answer), flush=True)
"""


def careless(folder: Path) -> list[str]:
    path = folder / "careless.py"
    path.write_text(CARELESS.format(root=str(ROOT)), encoding="utf-8")
    return [sys.executable, "-S", "-E", str(path)]


def examine(command: list[str], *names: str, patience_s: float = PATIENCE_S) -> dict[str, Result]:
    driver = Driver(command, patience_s)
    try:
        chosen = choose("lm-client", names)
        return {r.case: r for r in client_suite.examine("lm", ADDRESS, driver, chosen)}
    finally:
        driver.close()


def test_every_temper_is_a_case() -> None:
    for kind, tempers in (("lm-client", set(TEMPERS)), ("resp-client", set(RESP_TEMPERS))):
        loaded = cases.load(kind)
        assert {case.name for case in loaded} == tempers
        assert all(case.body["temper"] == case.name for case in loaded)


def test_a_careless_client_is_found(tmp_path: Path) -> None:
    right = ["good", "forgetful"]
    wrong = {"bit-flip", "other-dtype", "negative-dims", "short-length"}
    if LONG:
        right += ["split-header", "exist-then-miss", "unknown-location"]
        wrong |= {"other-key", "other-format", "turned-shape", "old-answer", "reset"}
    found = examine(careless(tmp_path), *right, *wrong)
    assert {name for name, r in found.items() if r.verdict == "fail"} == wrong
    assert "not the chunk's" in found["short-length"].found


def test_a_client_that_waits_for_ever_is_found_and_replaced(tmp_path: Path) -> None:
    driver = Driver(careless(tmp_path), 1.5)
    try:
        chosen = choose("lm-client", ["silent", "silent-after-header"][: 2 if LONG else 1])
        results = list(client_suite.examine("lm", ADDRESS, driver, chosen))
    finally:
        driver.close()
    assert results
    assert all(r.verdict == "fail" and "hung" in r.found for r in results)


def test_a_client_that_dies_is_an_outcome(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        'print(\'{"outcome": "open"}\', flush=True)\ninput()\ninput()\n', encoding="utf-8"
    )
    found = examine([sys.executable, "-S", "-E", str(script)], "good")
    assert "died" in found["good"].found


@pytest.mark.parametrize("line", ["hello", "[1]", "{}"])
def test_a_driver_of_another_language_is_an_error(tmp_path: Path, line: str) -> None:
    script = tmp_path / "other.py"
    script.write_text(f"print({line!r}, flush=True)\ninput()\ninput()\n", encoding="utf-8")
    with pytest.raises(DriverFailed):
        examine([sys.executable, "-S", "-E", str(script)], "good")


def test_a_driver_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DriverFailed):
        examine(["/nonexistent/driver"], "good")


def command(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    client_suite.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_with_a_driver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver = " ".join(careless(tmp_path))
    words = ("--driver", driver, "--case", "good", "--case", "bit-flip", "--json")
    assert client_suite.run(command(*words)) == 1
    document = json.loads(capsys.readouterr().out)
    assert [(r["case"], r["verdict"]) for r in document["results"]] == [
        ("good", "pass"),
        ("bit-flip", "fail"),
    ]


def test_the_command_alone(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert client_suite.run(command("--temper", "silent", "--seconds", "0.1")) == 0
    assert time.monotonic() - began < PATIENCE_S
    assert "plays silent" in capsys.readouterr().out
    assert client_suite.run(command("--wire", "resp", "--list")) == 0
    assert "huge-bulk" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--temper", "good", "--driver", "x"],
        ["--temper", "nothing"],
        ["--temper", "good", "--listen", "7000"],
        ["--driver", "/nonexistent/driver"],
        ["--driver", "true", "--case", "nothing"],
    ],
)
def test_wrong_words_are_misuse(words: list[str]) -> None:
    with pytest.raises(UsageError):
        client_suite.run(command(*words))

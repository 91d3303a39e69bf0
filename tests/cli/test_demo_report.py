# SPDX-License-Identifier: Apache-2.0
"""The demo's table and its verdict."""

from __future__ import annotations

import io
import json

from kvsafe.cli import ExitCode
from kvsafe.cli.demo.report import Report
from kvsafe.cli.demo.screen import Screen


def _report(*outcomes: bool) -> Report:
    report = Report()
    for place, ok in enumerate(outcomes):
        report.add(f"step {place}", "20 chunks served", "as expected" if ok else "19", ok)
    return report


def test_only_a_run_in_which_everything_held_is_fine() -> None:
    assert _report(True, True).exit_code == ExitCode.FINE
    assert _report(True, False, True).exit_code == ExitCode.FOUND
    assert _report().exit_code == ExitCode.FOUND


def test_the_table_marks_what_failed() -> None:
    lines = _report(True, False).as_text().splitlines()
    [held] = [line for line in lines if line.startswith("step 0")]
    [broken] = [line for line in lines if line.startswith("step 1")]
    assert held.endswith("ok")
    assert broken.endswith("FAILED") and "19" in broken


def test_long_cells_are_wrapped_and_nothing_is_lost() -> None:
    report = Report()
    seen = " ".join(f"word{number}" for number in range(60))
    report.add("damaged chunk", "refusal 1001", f"{'Z' * 100} {seen}", False)
    text = report.as_text()
    assert max(map(len, text.splitlines())) <= 80
    assert all(word in text.split() for word in seen.split())
    assert text.count("Z") == 100
    assert text.count("FAILED") == 1


def test_a_step_with_several_checks_is_named_once() -> None:
    report = Report()
    report.add("restart", "20 chunks", "20 chunks", True)
    report.add("restart", "same tokens", "same tokens", True)
    assert report.as_text().count("restart") == 1


def test_json_says_the_same() -> None:
    document = json.loads(_report(True, False).as_json(seconds=1.5))
    assert document["ok"] is False and document["seconds"] == 1.5
    assert document["steps"][1] == {
        "step": "step 1",
        "expected": "20 chunks served",
        "seen": "19",
        "ok": False,
    }


def test_a_stream_that_is_no_terminal_gets_plain_lines_once_per_stage() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    for tick in range(5):
        screen.wait("loading", tick)
    screen.wait("ready", 5)
    screen.say("done")
    assert stream.getvalue().count("loading") == 1
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_a_terminal_gets_one_line_that_is_redrawn_and_then_removed() -> None:
    stream = io.StringIO()
    screen = Screen(stream, live=True)
    for tick in range(5):
        screen.wait("loading", tick)
    screen.say("done")
    assert "\n" not in stream.getvalue().split("done")[0]
    assert stream.getvalue().endswith("\r\x1b[K   done\n")

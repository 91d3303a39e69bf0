# SPDX-License-Identifier: Apache-2.0
"""The command `kvsafe demo` with parts that are told by the test: exit codes, output, folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvsafe.cli import demo, main
from kvsafe.cli.demo.lab import Lab, StepError
from kvsafe.cli.demo.server import ServerError
from kvsafe.cli.demo.story import Part


@pytest.fixture(autouse=True)
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No model is built and all temporary folders lie in one that the test sees."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "wide_qwen3", lambda folder, shape: folder)
    monkeypatch.setattr(demo, "_check_machine", lambda: None)
    return tmp_path


def _tell(monkeypatch: pytest.MonkeyPatch, *parts: Part) -> None:
    monkeypatch.setattr(demo, "PARTS", parts)


def _held(lab: Lab) -> None:
    lab.check("first", "twenty", "twenty", True)


def _broken(lab: Lab) -> None:
    lab.check("second", "twenty", "nineteen", False)


def _stuck(lab: Lab) -> None:
    logs = lab.folder / "logs"
    logs.mkdir()
    lab.log = logs / "1.log"
    lab.log.write_text("line\n" * 100 + "the last words\n" + ' - leaked function "x"\n' * 100)
    raise ServerError("the server ended with code 3")


def test_all_held_is_0_and_the_folder_is_gone(
    monkeypatch: pytest.MonkeyPatch, scene: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _tell(monkeypatch, Part("first", "the first part", _held))
    assert main.main(["demo"]) == 0
    assert list(scene.iterdir()) == []
    shown = capsys.readouterr().out
    assert "the first part" in shown and "every step held" in shown
    assert "KVSafeConnector" in shown


def test_one_that_did_not_hold_is_1_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _tell(monkeypatch, Part("second", "b", _broken), Part("first", "a", _held))
    assert main.main(["demo"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED" in shown and "NOT every step held" in shown and "twenty" in shown


def test_a_part_that_cannot_run_ends_the_story_and_leaves_the_logs(
    monkeypatch: pytest.MonkeyPatch, scene: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _tell(monkeypatch, Part("first", "a", _stuck), Part("second", "b", _held))
    assert main.main(["demo"]) == 1
    shown = capsys.readouterr().out
    assert "code 3" in shown and "not run" in shown and "the last words" in shown
    [kept] = scene.iterdir()
    assert [path.name for path in kept.iterdir()] == ["1.log"]
    assert str(kept) in shown


def test_json_alone_is_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _tell(monkeypatch, Part("first", "the first part", _held), Part("second", "b", _broken))
    assert main.main(["demo", "--json"]) == 1
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["ok"] is False
    assert [step["ok"] for step in document["steps"]] == [True, False]
    assert "the first part" in shown.err


def test_keep_keeps_the_folder(
    monkeypatch: pytest.MonkeyPatch, scene: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _tell(monkeypatch, Part("first", "a", lambda lab: (lab.folder / "x").touch()))
    main.main(["demo", "--keep"])
    [kept] = scene.iterdir()
    assert (kept / "x").exists() and str(kept) in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_130_and_the_folder_is_gone(
    monkeypatch: pytest.MonkeyPatch, scene: Path, number: int
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    _tell(monkeypatch, Part("first", "a", lambda lab: os.kill(os.getpid(), number)))
    assert main.main(["demo"]) == 130
    assert list(scene.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_story_stops_where_no_chunk_was_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(lab: Lab) -> None:
        raise StepError("no chunk came to the disk tier")

    _tell(monkeypatch, Part("store", "a", nothing))
    assert main.main(["demo"]) == 1


@pytest.mark.parametrize("argv", [["--no-such-option"], ["surplus"]])
def test_wrong_use_is_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main.main(["demo", *argv])
    assert left.value.code == 2


def test_a_machine_without_room_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(demo, "NEEDED_BYTES", 1 << 60)
    assert main.main(["demo"]) == 2
    assert "needed" in capsys.readouterr().err


def test_the_command_imports_nothing_heavy() -> None:
    script = (
        "import sys, kvsafe.cli.demo\nprint({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "set()"

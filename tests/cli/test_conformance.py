# SPDX-License-Identifier: Apache-2.0
"""`kvsafe conformance`: every suite is named, found, and takes its own words."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import kvsafe
from kvsafe.cli.conformance import SUITES
from kvsafe.cli.main import main


def test_help_names_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["conformance", "--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0
    assert set(SUITES) == {"tier", "lmcache", "lmcache-client"}
    assert "lmcache, lmcache-client, tier" in " ".join(said.split())


@pytest.mark.parametrize(
    ("suite", "option"),
    [("tier", "--json"), ("lmcache", "lm://HOST:PORT"), ("lmcache-client", "--driver")],
)
def test_every_suite_has_its_own_help(
    suite: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["conformance", suite, "--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0
    assert f"kvsafe conformance {suite}" in said
    assert option in said


def test_an_unknown_suite_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["conformance", "lmcach"])
    assert left.value.code == 2
    assert "lmcache-client" in capsys.readouterr().err


def test_a_server_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    from conformance.lmcache.hostile_resp import HostileRedis

    for temper, code in (("good", 0), ("integer", 1)):
        with HostileRedis(temper) as server:
            url = f"resp://{server.host}:{server.port}"
            words = ("conformance", "lmcache", url, "--case", "set-get", "--json")
            assert main(words) == code
        assert len(json.loads(capsys.readouterr().out)["results"]) == 1


def test_a_server_that_is_not_there_and_a_client_without_words_are_misuse(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["conformance", "lmcache", f"lm://127.0.0.1:{port}"]) == 2
    assert main(["conformance", "lmcache-client"]) == 2
    assert "--driver" in capsys.readouterr().err


def test_the_tempers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "lmcache-client", "--wire", "resp", "--list"]) == 0
    assert "huge-bulk" in capsys.readouterr().out


def _started(words: tuple[str, ...], folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, started in a folder, with the kvsafe of `site`."""
    code = f"import sys; from kvsafe.cli.main import main; sys.exit(main({words!r}))"
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("conformance", "lmcache-client", "--wire", "resp", "--list"), "huge-bulk"),
        (("fuzz", "list"), "rows"),
    ],
)
def test_the_installed_command_finds_its_checkout(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """An installation knows `kvsafe` alone, and is started anywhere."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "kvsafe").symlink_to(Path(kvsafe.__file__).parent)
    done = _started(words, tmp_path, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def _checkout(folder: Path, said: str) -> None:
    """A folder that looks like a checkout, whose fuzz command says something."""
    for name in ("kvsafe/cli", "fuzz"):
        (folder / name).mkdir(parents=True)
    (folder / "kvsafe" / "cli" / "checkout.py").touch()
    (folder / "fuzz" / "command.py").write_text(
        f"def run(args):\n    print({said!r})\n    return 0\n"
    )


@pytest.mark.parametrize(("mode", "code"), [(0o755, 0), (0o775, 2), (0o777, 2)])
def test_a_checkout_where_others_write_is_not_run(mode: int, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    _checkout(folder, "found")
    folder.chmod(mode)
    (tmp_path / "site").mkdir()
    shutil.copytree(Path(kvsafe.__file__).parent, tmp_path / "site" / "kvsafe")
    done = _started(("fuzz", "list"), folder, tmp_path / "site")
    assert done.returncode == code, done.stderr
    assert ("found" in done.stdout) is (code == 0)


def test_without_a_checkout_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvsafe.cli.checkout.__file__", str(tmp_path / "a" / "b" / "c.py"))
    assert main(["conformance", "tier", "x:Y"]) == 2
    assert main(["fuzz", "list"]) == 2
    assert capsys.readouterr().err.count("in a checkout of kvsafe's ") == 2

# SPDX-License-Identifier: Apache-2.0
"""What an installation brings, and that the pinned environment is really pinned."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from tests.tidy.tree import ROOT

PIN = re.compile(r"^[A-Za-z0-9._-]+==[^\s;*]+(; .+)?$")
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "kvsafe"}


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _pins() -> list[str]:
    lines = (ROOT / ".ci" / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_core_needs_four_packages_and_no_engine() -> None:
    core = {_name(line) for line in _project()["dependencies"]}
    assert core == {"blake3", "cbor2", "msgspec", "cryptography"}


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    points = _project()["entry-points"]["vllm.general_plugins"]
    assert points == {"kvsafe": "kvsafe.engine.plugin:register"}


def test_every_line_of_the_list_is_one_exact_version() -> None:
    assert [line for line in _pins() if not PIN.match(line)] == []
    names = [_name(line) for line in _pins()]
    assert len(names) == len(set(names))
    assert not LEFT_OUT & set(names)


def test_the_list_holds_what_the_project_asks_for() -> None:
    extras = _project()["optional-dependencies"]
    wanted = [*_project()["dependencies"], *extras["cpu"], *extras["test"], "mypy", "ruff"]
    assert {_name(line) for line in wanted} <= {_name(line) for line in _pins()}


def test_every_folder_of_code_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "kvsafe").rglob("*.py")}
    assert [folder.name for folder in folders if not (folder / "__init__.py").exists()] == []

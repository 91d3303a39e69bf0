# SPDX-License-Identifier: Apache-2.0
"""No text file names a machine's own folders or a package registry's host."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.tidy.tree import files, texts

# The patterns are put together from halves, so that this file does not match itself.
FOLDERS = ("wo" + "rk", "ro" + "ot", "ho" + "me", "fa" + "rm", "Use" + "rs")
MACHINE_PATH = re.compile(rf"(?<![\w.}}/-])/(?:{'|'.join(FOLDERS)})/")
# `/home/user` and the like are how a README says "your folder".
EXAMPLE_PATH = re.compile(r"^/ho" + r"me/(?:user|someone|you|me|alice|bob)\b")
HOSTS = (
    "pypi." + "org",
    "python" + "hosted",
    "npm" + "js",
    "debian." + "org",
    "ana" + "conda.",
    "crates." + "io",
    "hub.docker." + "com",
    "download.pytorch." + "org",
)
# The one index that a newcomer needs: torch's CPU build is nowhere else.
ALLOWED = {(".ci/setup", HOSTS[-1])}


def breaches(place: str, text: str) -> Iterator[str]:
    """Every machine path and registry host in `text`, with its line."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in MACHINE_PATH.finditer(line):
            if not EXAMPLE_PATH.match(line[match.start() :]):
                yield f"{place}:{number}: path of a machine: {match.group()}"
        for host in HOSTS:
            if host in line.lower() and (place, host) not in ALLOWED:
                yield f"{place}:{number}: registry host: {host}"


def test_no_machine_path_and_no_registry_host() -> None:
    assert [breach for place, text in texts() for breach in breaches(place, text)] == []


def test_the_files_are_found() -> None:
    names = {path.name for path in files()}
    assert {"pyproject.toml", "Makefile", "setup", "test_text.py"} <= names


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_machine_path_is_seen(folder: str) -> None:
    assert list(breaches("spec/x.md", f"see /{folder}/somebody/x"))
    assert list(breaches("spec/x.md", f'open("/{folder}/x")'))


@pytest.mark.parametrize("host", HOSTS)
def test_a_registry_host_is_seen(host: str) -> None:
    assert list(breaches("README.md", f"pip install -i https://{host}/x"))


@pytest.mark.parametrize(
    "text", ["/var/lib/kvsafe", "a/ho" + "me/x", "/ho" + "me/user/key", "/tmp/x"]
)
def test_ordinary_paths_pass(text: str) -> None:
    assert list(breaches("README.md", text)) == []

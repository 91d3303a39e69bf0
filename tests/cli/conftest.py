# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the commands' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.shelf import Caller, Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """A state folder with key and epoch, and no tier yet."""
    return Shelf(tmp_path)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Caller:
    """`kvsafe`, with no state folder of the user who runs the tests."""
    monkeypatch.setenv("XDG_STATE_HOME", "/nonexistent/state")
    return Caller(capsys)

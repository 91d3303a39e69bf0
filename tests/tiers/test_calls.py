# SPDX-License-Identifier: Apache-2.0
"""`QuickOs` makes the very calls that `Os` makes, which is the one that faults are tried on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvsafe.tiers.calls import Os, QuickOs

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "open": (3, "name", os.O_RDONLY | os.O_DIRECT),
    "close": (3,),
    "fstat": (3,),
    "stat": (3, "name"),
    "there": (3, "name"),
    "write": (3, memoryview(b"abc"), 7),
    "read": (3, memoryview(bytearray(3)), 7),
}
FUNCTIONS = ("open", "close", "fstat", "stat", "access", "pwrite", "preadv")


def made_by(calls: Os, method: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a method asks of the system, without asking it."""
    made: list[Any] = []

    def stand_in(function: str) -> Any:
        return lambda *args, **kwargs: made.append((function, args, kwargs)) or 1  # type: ignore[func-returns-value]

    with monkeypatch.context() as patched:
        for function in FUNCTIONS:
            patched.setattr(os, function, stand_in(function))
        getattr(calls, method)(*ARGUMENTS[method])
    return made


def test_every_method_that_is_quicker_is_compared() -> None:
    own = {name for name in vars(QuickOs) if not name.startswith("_")}
    assert own == set(ARGUMENTS)


@pytest.mark.parametrize("method", ARGUMENTS)
def test_the_quick_call_is_the_same_call(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, quick = (made_by(calls, method, monkeypatch) for calls in (Os(), QuickOs()))
    assert quick == plain
    assert len(quick) == 1


def test_there_follows_no_link_and_finds_what_stands(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        for calls in (Os(), QuickOs()):
            names = ("file", "link", "nothing")
            assert [calls.there(folder, name) for name in names] == [True, True, False]
    finally:
        os.close(folder)

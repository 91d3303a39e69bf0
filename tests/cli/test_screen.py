# SPDX-License-Identifier: Apache-2.0
"""Tables, amounts and the bar of the commands."""

from __future__ import annotations

import io

import pytest

from kvsafe.cli.inspect.screen import Bar, amount, moment, say, table


def test_the_bar_is_drawn_on_a_terminal_only() -> None:
    drawn, silent = io.StringIO(), io.StringIO()
    for bar in (Bar(drawn, live=True), Bar(silent)):
        bar.show("verifying", 5, 10, 5 << 20)
        bar.show("verifying", 6, 10, 6 << 20)  # too soon to be drawn again
        bar.clear()
        bar.show("looking at", 7, 0, 7 << 20)
    assert silent.getvalue() == ""
    first, second = drawn.getvalue().split("\r\x1b[K")[1::2]
    assert first.startswith("verifying [############............] 5/10 files, 5.0 MiB, ")
    assert second.startswith("looking at 7 files, 7.0 MiB, ")


def test_amounts_and_moments() -> None:
    assert [amount(n) for n in (0, 999, 1024, 1 << 20, 150 << 20, 3 << 40)] == [
        "0 B", "999 B", "1.0 KiB", "1.0 MiB", "150 MiB", "3.0 TiB",
    ]  # fmt: skip
    assert moment(0) == "1970-01-01 00:00:00"
    assert "no date" in moment(2**64)


def test_columns_are_aligned() -> None:
    lines = table(("name", "files"), [("a", "1"), ("longer", "12345")], right="files")
    assert lines == ["name    files", "a           1", "longer  12345"]


def test_what_the_terminal_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    say(["caf\u00e9 \u2026"])
    assert raw.getvalue() == b"caf? ?\n"

# SPDX-License-Identifier: Apache-2.0
"""What the interop run keeps for the published table: the last run of a part, held or not."""

from pathlib import Path

from conformance.lmcache.record import keep, section


def line(promise: str, held: bool, seen: str) -> dict[str, object]:
    """One line as the run hands it over; the part is known already."""
    return {"part": "a", "promise": promise, "held": held, "seen": seen}


def test_a_part_that_is_run_again_replaces_what_was_kept_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    assert section(file) == []
    keep("0.5.6", "b", [line("tokens equal", True, "[1, 2]")], file)
    keep("0.5.6", "a", [line("old promise", True, "[1, 2]")], file)
    keep("0.5.6", "a", [line("tokens equal", False, "[3, 4]")], file)
    keep("0.4.7", "a", [line("tokens equal", True, "[1, 2]")], file)
    page = "\n".join(section(file))
    assert "| a | tokens equal | not: [3, 4] | held |" in page
    assert "| b | tokens equal | held |  |" in page
    assert "old promise" not in page

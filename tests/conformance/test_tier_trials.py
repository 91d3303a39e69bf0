# SPDX-License-Identifier: Apache-2.0
"""The trials for tiers find what is wrong with a careless one, and pass a careful one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest

from conformance.tier.attacks import ATTACKS
from conformance.tier.drivers.forgery import forged
from conformance.tier.folder import CASES, Case, cases, promises
from conformance.tier.kernel import supported
from conformance.tier.publish import part, replaced
from conformance.tier.runner import AT_THE_DOOR, NOT_PROMISED, judge
from conformance.tier.subject import Seen, worst
from kvsafe.seal.suites import Suite
from tests.seal.rows import World, kind_of
from tests.tidy.tree import ROOT

SECOND_DOOR = "conformance.tier.drivers.second_door:SecondDoor"
TINY = "tests.conformance.tiny_tiers"


def tried(*words: str, timeout: float = 110) -> tuple[int, dict[str, Any]]:
    """Run `kvsafe conformance tier ... --json`; exit code and document."""
    done = subprocess.run(
        [sys.executable, "-m", "kvsafe.cli.main", "conformance", "tier", *words, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.stdout, done.stderr[-2000:]
    document: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, document


def seen(document: dict[str, Any]) -> dict[str, str]:
    """What was seen in each case."""
    return {result["case"]: result["seen"] for result in document["results"]}


@pytest.mark.parametrize("folder", sorted(CASES.iterdir()), ids=lambda folder: folder.name)
def test_each_case_is_a_folder_with_a_reason(folder: Path) -> None:
    case = Case.read(folder)
    assert case.attack in ATTACKS
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {folder.name.replace('-', ' ')}")
    assert len(text.split()) > 20


def test_every_attack_has_a_case_and_every_promise_is_known() -> None:
    assert {case.attack for case in cases()} == set(ATTACKS)
    assert set(AT_THE_DOOR) <= set(ATTACKS)
    assert "round trip" in promises()


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no case 'x'"):
        cases(["x"])
    (tmp_path / "maybe-this").mkdir()
    (tmp_path / "maybe-this" / "case.json").write_text("{}")
    with pytest.raises(ValueError, match="no case"):
        Case.read(tmp_path / "maybe-this")


@pytest.mark.parametrize(
    ("verdict", "found", "promised", "expected"),
    [
        ("miss", Seen.REFUSED, True, ("refused", False)),
        ("miss", Seen.MISS, False, ("miss", False)),
        ("miss", Seen.WRONG, True, ("served wrong", True)),
        ("miss", Seen.WRONG, False, (NOT_PROMISED, False)),
        ("miss", Seen.HANG, False, (NOT_PROMISED, False)),
        ("hit", Seen.HIT, False, ("hit", False)),
        ("hit", Seen.MISS, True, ("miss", True)),
        ("hit", Seen.CRASH, True, ("crash", True)),
        ("hit", Seen.NOT_RUN, True, ("not run", False)),
    ],
)
def test_the_verdict_is_fair(
    verdict: str, found: Seen, promised: bool, expected: tuple[str, bool]
) -> None:
    case = Case("x", verdict, "bytes", "flip", {})
    assert judge(case, found, frozenset({"bytes"} if promised else ())) == expected


def test_the_worst_counts() -> None:
    assert worst(Seen.HIT, Seen.WRONG, Seen.CRASH) is Seen.WRONG
    assert worst(Seen.MISS, Seen.HIT) is Seen.HIT
    assert worst(Seen.REFUSED, Seen.LOST) is Seen.LOST


def test_a_careless_tier_fails_where_it_deserves_it(tmp_path: Path) -> None:
    names = [
        case.name
        for case in cases()
        if case.name not in ("miss-fifo", "miss-stalled-read")  # each waits for its 15 seconds
    ]
    words = [word for name in names for word in ("--case", name)]
    junit = tmp_path / "junit.xml"
    code, document = tried(f"{TINY}:Careless", *words, "--junit", str(junit))
    found = seen(document)
    assert code == 1
    served = {name for name, what in found.items() if what == "served wrong"}
    assert served >= {
        "miss-bit-flip-in-the-payload",
        "miss-bit-flip-anywhere",
        "miss-two-files-swapped",
        "miss-forged-with-unkeyed-hashes",
        "miss-file-of-another-model",
        "miss-shorter-file",
        "miss-zero-filled-file",
        "miss-symlink",
    }
    assert found["miss-longer-file"] == found["miss-file-that-all-may-write"] == "served"
    assert found["miss-directory"] == "crash"
    assert found["hit-what-was-stored"] == found["hit-after-a-restart"] == "hit"
    assert found["miss-bodies-swapped"] == "not run"
    suite = Xml.fromstring(junit.read_text(encoding="utf-8"))
    assert int(suite.attrib["failures"]) == document["failed"] == len(suite.findall(".//failure"))


def test_a_careful_tier_passes() -> None:
    # It sweeps nothing, and the trial would wait for that.
    names = [case.name for case in cases() if case.name != "hit-and-leftovers-gone"]
    code, document = tried(f"{TINY}:Careful", *[w for name in names for w in ("--case", name)])
    found = seen(document)
    assert [result for result in document["results"] if result["failed"]] == []
    assert code == 0
    door = {case.name for case in cases() if case.attack in AT_THE_DOOR}
    not_run = {name for name, what in found.items() if what == "not run"}
    assert not_run == (set() if supported() else door & set(found))


@pytest.mark.parametrize(
    ("name", "detail"), [("Crashing", "out of a tier's method"), ("Dying", "SIGABRT")]
)
def test_a_crash_is_a_verdict(name: str, detail: str) -> None:
    code, document = tried(f"{TINY}:{name}", "--case", "hit-what-was-stored")
    [result] = document["results"]
    assert (code, result["seen"]) == (1, "crash")
    assert detail in result["detail"]


@pytest.mark.parametrize(
    "words",
    [
        ["nothing.here:Tier"],
        ["json"],
        ["json:Nothing"],
        [f"{TINY}:Careful", "--case", "no-such-case"],
        [f"{TINY}:Careful", "--options", "[1]"],
        [f"{TINY}:Careful", "--promise", "the moon"],
    ],
)
def test_a_wrong_request_is_said(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvsafe.cli.main", "conformance", "tier", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(("kvsafe conformance", "usage:"))


@pytest.mark.timeout(400)
def test_kvsafe_fs_keeps_its_promises() -> None:
    """A few cases of each kind; all of them: `kvsafe conformance tier`."""
    pytest.importorskip("vllm")
    names = (
        "hit-after-a-killed-writer",
        "miss-bit-flip-anywhere",
        "miss-forged-with-unkeyed-hashes",
        "miss-file-from-before-new-weights",
    )
    code, document = tried(*[w for name in names for w in ("--case", name)], timeout=380)
    assert code == 0
    assert not {"served", "served wrong"} & set(seen(document).values())
    assert document["promises"] == sorted(promises())


@pytest.mark.timeout(400)
def test_the_second_door_keeps_its_promises() -> None:
    """vLLM's own connector and spec with a sealing tier; a few cases, as above."""
    pytest.importorskip("vllm")
    names = (
        "hit-after-a-restart",
        "miss-file-from-before-new-weights",
        "miss-file-of-another-model",
        "miss-forged-with-unkeyed-hashes",
    )
    words = [word for name in names for word in ("--case", name)]
    code, document = tried(SECOND_DOOR, *words, timeout=380)
    found = seen(document)
    assert (code, found["hit-after-a-restart"]) == (0, "hit")
    assert found["miss-file-of-another-model"] == "refused"
    assert not {"served", "served wrong", "not run"} & set(found.values())
    assert document["promises"] == sorted(promises())


def test_a_forgery_is_whole_but_for_the_key(tmp_path: Path) -> None:
    """Else the trial would show only that a clumsy forger is found out."""
    world = World()
    chunk, other = bytes(world.chunk()), b"\x5a" * world.layout.payload_bytes
    row = forged(chunk, other)
    unkeyed = World(Suite.BLAKE3)
    assert kind_of(world.open(row)).startswith("202 ")
    assert unkeyed.document == world.document
    assert kind_of(unkeyed.open(row)) == "opened"
    assert row[world.layout.header_bytes :][: len(other)] == other
    with pytest.raises(ValueError, match="no chunk"):
        forged(bytes(8192), other)
    with pytest.raises(ValueError, match="payload of"):
        forged(chunk, other + b"x")


def test_the_page_keeps_what_others_wrote() -> None:
    document = {
        "tier": "x",
        "target": "a:b",
        "versions": {"a": "1"},
        "promises": ["round trip"],
        "python": "3",
        "kernel": "6",
        "date": "2026-01-01",
        "results": [{"case": "miss-fifo", "verdict": "hang", "failed": True}],
    }
    text = part([document])
    assert "| [miss-fifo](tier/cases/miss-fifo/README.md) | **hang** |" in text
    page = f"# Title\n\nmine\n\n{part([{**document, 'tier': 'old'}])}\nafter\n"
    again = replaced(page, text)
    assert "old" not in again
    assert again.startswith("# Title\n\nmine\n") and again.endswith("after\n")
    assert replaced(again, text) == again

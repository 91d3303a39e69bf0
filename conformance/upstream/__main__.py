# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's own offload tests: `python -m conformance.upstream [stock|ours] [pytest arguments]`.

Without a name, both runs follow each other. Exit status 1 if a test fails that is not listed in
`spec/upstream-tests.md`, or one that is listed passes; `.cache/upstream/` keeps the results.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from conformance.upstream.fetch import CACHE, ROOT, fetch

FOLDERS = ("tests/v1/kv_offload", "tests/v1/kv_connector/unit/offloading_connector")
# Needs a device; a folder that is skipped as a whole otherwise.
LEFT_OUT = ("tests/v1/kv_offload/cpu/test_gpu_worker.py",)
PLUGIN = "conformance.upstream.plugin"
PAGE = ROOT / "spec" / "upstream-tests.md"
LISTED = re.compile(r"^\| `([^`]+::[^`]+)` \|", re.MULTILINE)
TIMEOUT_S = 600


def run(name: str, arguments: list[str]) -> dict[str, str]:
    """Run the tests, stock or ours, and return what became of each."""
    report = CACHE / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--timeout={TIMEOUT_S}", f"--junitxml={report}"]
    command += ["-p", PLUGIN] if name == "ours" else []
    command += arguments or [*FOLDERS, *(f"--ignore={place}" for place in LEFT_OUT)]
    subprocess.run(command, cwd=CACHE, env=_environment(), check=False)
    return outcomes(report)


def _environment() -> dict[str, str]:
    offline = {name: "1" for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "DO_NOT_TRACK")}
    return {
        **os.environ,
        **offline,
        "PYTHONPATH": os.pathsep.join((str(CACHE / "lib"), str(ROOT))),
        "HF_HUB_CACHE": str(CACHE / "hub"),
        "VLLM_NO_USAGE_STATS": "1",
    }


def outcomes(report: Path) -> dict[str, str]:
    """Test to `passed`, `failed` or `skipped`, from a report of pytest."""
    found = {}
    # The report was written by the pytest that was just run.
    for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314
        place = case.get("classname", "").replace("tests.v1.", "")
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        found[f"{place}::{case.get('name')}"] = "skipped" if "skipped" in kinds else outcome
    return found


def listed() -> set[str]:
    """The tests that the page says fail with our classes."""
    return set(LISTED.findall(PAGE.read_text(encoding="utf-8")))


def verdict(name: str, found: dict[str, str], expected: set[str]) -> list[str]:
    """What is not as the page says, one sentence each."""
    failed = {test for test, outcome in found.items() if outcome == "failed"}
    passed = {test for test, outcome in found.items() if outcome == "passed"}
    return [f"{name}: {test} failed and is not listed" for test in sorted(failed - expected)] + [
        f"{name}: {test} passed and is listed" for test in sorted(passed & expected)
    ]


def main(arguments: list[str]) -> int:
    """Run what was asked for and judge it."""
    names = [arguments.pop(0)] if arguments and arguments[0] in ("stock", "ours") else []
    fetch()
    wrong: list[str] = []
    for name in names or ["stock", "ours"]:
        found = run(name, list(arguments))
        counts = Counter(found.values())
        print(name, ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped")))
        wrong += verdict(name, found, listed() if name == "ours" else set())
    print("\n".join(wrong) or "as spec/upstream-tests.md says")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

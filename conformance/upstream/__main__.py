# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's own offload tests: `python -m conformance.upstream [stock|ours] [pytest arguments]`.

Without a name, both runs follow each other. Exit status 1 if anything is not as
`spec/upstream-tests.md` lists it; `.cache/upstream/` keeps the results.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

from conformance.upstream.fetch import CACHE, ROOT, fetch
from conformance.upstream.listing import Outcome, complaints, listed, outcomes

FOLDERS = ("tests/v1/kv_offload", "tests/v1/kv_connector/unit/offloading_connector")
# vLLM's worker needs a device, ours does not: these tests have no stock run without one.
STOCK_LEAVES_OUT = ("tests/v1/kv_offload/cpu/test_gpu_worker.py",)
PLUGIN = "conformance.upstream.plugin"
PAGE = ROOT / "spec" / "upstream-tests.md"
TIMEOUT_S = 600


def run(name: str, arguments: list[str]) -> dict[str, Outcome]:
    """Run the tests, stock or ours, and return what became of each."""
    report = CACHE / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--timeout={TIMEOUT_S}", f"--junitxml={report}"]
    command += ["-p", PLUGIN] if name == "ours" else []
    command += arguments or list(FOLDERS)
    if name == "stock":
        command += [f"--ignore={place}" for place in STOCK_LEAVES_OUT]
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


def main(arguments: list[str]) -> int:
    """Run what was asked for and judge it."""
    names = [arguments.pop(0)] if arguments and arguments[0] in ("stock", "ours") else []
    fetch()
    wrong: list[str] = []
    for name in names or ["stock", "ours"]:
        found = run(name, list(arguments))
        counts = Counter(outcome.kind for outcome in found.values())
        print(name, ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped")))
        rows = listed(PAGE) if name == "ours" else []
        wrong += [f"{name}: {text}" for text in complaints(found, rows, whole=not arguments)]
    print("\n".join(wrong) or "as spec/upstream-tests.md says")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

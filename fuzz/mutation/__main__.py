# SPDX-License-Identifier: Apache-2.0
"""Break the code and see whether the tests notice: `python -m fuzz.mutation seal host ...`.

`--sample N` takes N faults of each folder (`--seed`), `--sample 0` all of them. With `--record`
a run goes on where the last one ended: what was killed stays killed while its file is the same,
`--again` tries what survived once more. Ends with exit code 1 when fewer than `--at-least`
percent are killed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from fuzz.mutation.cover import Coverage, CoverageError, measure
from fuzz.mutation.hunt import HUNG, NOTICED, SURVIVED, Fate, hunt, warm_up
from fuzz.mutation.record import Named, choose, faults_of, keep, known

TESTS: Final = {
    "seal": (
        "tests/seal",
        "tests/conformance/test_agreement.py",
        "tests/conformance/test_documents.py",
    ),
    "host": ("tests/host",),
    "device": ("tests/device",),
    "lifecycle": ("tests/lifecycle",),
}
# Without a fault only the quickest tests are run: all of them have just passed under coverage.
_CONTROL_S: Final = 5.0
# Only this folder's tests compare with vLLM's own classes.
_VLLM: Final = ("vllm.v1.kv_offload.base", "vllm.v1.kv_offload.cpu.policies.factory")


def main() -> int:
    """Hunt, print survivors, keep the record."""
    args = _arguments()
    folders = args.folders or list(TESTS)
    warm_up(_VLLM if "lifecycle" in folders else ())
    percents = []
    for folder in folders:
        try:
            percents.append(_hunt_folder(folder, args))
        except CoverageError as exc:
            print(f"{folder}: {exc}", file=sys.stderr)
            return 2
    return 0 if min(percents) >= args.at_least else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz.mutation", description=__doc__)
    parser.add_argument("folders", nargs="*", choices=[*TESTS, []], default=list(TESTS))
    parser.add_argument("--sample", type=int, default=100, help="faults per folder, 0 for all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cap", type=float, default=40.0, help="processor seconds of tests each")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one fault")
    parser.add_argument("--at-least", type=float, default=90.0, help="percent to be killed")
    parser.add_argument("--record", type=Path, help="JSON lines: written, and read to go on")
    parser.add_argument("--again", action="store_true", help="try survivors of the record again")
    return parser.parse_args()


def _hunt_folder(folder: str, args: argparse.Namespace) -> float:
    """Hunt the chosen faults of one folder; percent killed."""
    faults = faults_of(folder)
    chosen = choose(faults, args.sample, args.seed)
    old = known(args.record) if args.record else {}
    coverage = measure(folder, TESTS[folder])
    quick = coverage.tests(min(args.cap, _CONTROL_S))
    outcome, _, noticed_by = hunt("", None, quick, _allowance(coverage, quick), args.limit)
    if outcome != SURVIVED:
        raise CoverageError(f"{noticed_by or outcome} without any fault")
    todo = [
        fault
        for fault in chosen
        if fault.name not in old or (args.again and old[fault.name]["outcome"] not in NOTICED)
    ]
    say(f"{folder}: {len(chosen)} of {len(faults)} faults chosen, {len(todo)} to try")
    outcomes = {name: one["outcome"] for name, one in old.items()}
    for fault, fate in _fates(todo, coverage, args):
        outcomes[fault.name] = fate.outcome
        if args.record:
            keep(args.record, folder, fault.name, fate)
    return tell(folder, [outcomes[fault.name] for fault in chosen], len(faults))


def _fates(
    todo: list[Named], coverage: Coverage, args: argparse.Namespace
) -> Iterator[tuple[Named, Fate]]:
    """Each fault with its fate; says survivors at once and every 20th count."""
    start, survived = time.monotonic(), 0

    def one(fault: Named) -> Fate:
        tests = coverage.tests_of(fault.file, fault.mutant.line, args.cap)
        allowed = _allowance(coverage, tests)
        outcome, spent, by = hunt(fault.file, fault.mutant, tests, allowed, args.limit)
        return Fate(fault.file, fault.mutant, outcome, len(tests), spent, by)

    with ThreadPoolExecutor(args.jobs) as pool:
        for count, (fault, fate) in enumerate(zip(todo, pool.map(one, todo), strict=True), 1):
            if fate.outcome not in NOTICED:
                survived += 1
                say(f"{fate.outcome}: {fault.file}:{fault.mutant.line} {fault.name}")
            if count % 20 == 0:
                spent = time.monotonic() - start
                say(f"  {count}/{len(todo)}, {survived} survived, {spent:.0f} s")
            yield fault, fate


def _allowance(coverage: Coverage, tests: list[str]) -> float:
    """Processor seconds after which the tests hang: far more than they took."""
    return 30.0 + 4.0 * coverage.seconds_of(tests)


def tell(folder: str, outcomes: list[str], total: int) -> float:
    """Print the figures of one folder; percent killed."""
    killed = sum(outcome in NOTICED for outcome in outcomes)
    percent = 100.0 * killed / max(1, len(outcomes))
    print(
        f"{folder}: {len(outcomes)} of {total} faults tried, {killed} killed ({percent:.1f} %), "
        f"{outcomes.count(HUNG)} of them by hanging, {len(outcomes) - killed} survived"
    )
    return percent


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

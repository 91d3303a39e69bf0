# SPDX-License-Identifier: Apache-2.0
"""Run many worlds: `python -m fuzz.world --flavour stock|kvsafe --runs N --seed S [--jobs J]`.

Exit status: 0 all clean, 1 something was found, 2 wrong use of the command.
"""

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from fuzz.world import FLAVOURS, Finding, Plan, from_bytes, from_seed, read, run
from fuzz.world.shrink import shrink

Make = Callable[[int, str], Plan]
Batch = tuple[Counter[str], list[tuple[int, Finding]], int]
_BATCH = 50


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    options = _parser().parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of keys is part of what a seed decides.
        os.environ["PYTHONHASHSEED"] = "0"
        command = [sys.executable, "-m", "fuzz.world", *sys.argv[1:]]
        os.execv(sys.executable, command)  # noqa: S606 - this very program again
    if options.mask:
        from fuzz.world import doors

        doors.MASKS.update(options.mask.split(","))
    if options.replay is not None:
        return _replay(options.replay)
    seeds = range(options.seed, options.seed + options.runs)
    start = time.monotonic()
    counts: Counter[str] = Counter()
    first: dict[str, tuple[int, Finding]] = {}
    hits: Counter[str] = Counter()
    done = 0
    try:
        make = _of_bytes if options.bytes else from_seed
        for found_counts, findings, size in _batches(make, options.flavour, seeds, options.jobs):
            counts.update(found_counts)
            done += size
            for seed, finding in findings:
                hits[finding.signature] += 1
                if finding.signature not in first or seed < first[finding.signature][0]:
                    first[finding.signature] = seed, finding
            _progress(done, options.runs, start, hits)
    except KeyboardInterrupt:
        options.runs = done
    _report(options, counts, first, hits, time.monotonic() - start)
    return 1 if first else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fuzz.world", description=__doc__)
    parser.add_argument("--flavour", choices=FLAVOURS, default="kvsafe")
    parser.add_argument("--runs", type=int, default=200, help="worlds to run")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--mask", default="", help="known faults of stock to mend: C, E, N")
    parser.add_argument("--no-shrink", action="store_true", help="leave findings as they are")
    parser.add_argument("--bytes", action="store_true", help="random bytes, as a fuzz target's")
    parser.add_argument("--replay", metavar="PLAN", help="a plan in JSON, @FILE, or a seed")
    return parser


def _of_bytes(seed: int, flavour: str) -> Plan:
    """What 64 to 420 random bytes stand for."""
    dice = random.Random(seed)
    return from_bytes(dice.randbytes(dice.randint(64, 420)), flavour)


def _batches(make: Make, flavour: str, seeds: range, jobs: int) -> Iterator[Batch]:
    parts = [seeds[at : at + _BATCH] for at in range(0, len(seeds), _BATCH)]
    if jobs <= 1:
        yield from (_batch(make, flavour, part) for part in parts)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(_batch, make, flavour, part) for part in parts]):
            yield future.result()


def _batch(make: Make, flavour: str, seeds: Iterable[int]) -> Batch:
    counts: Counter[str] = Counter()
    findings = []
    size = 0
    for seed in seeds:
        outcome = run(make(seed, flavour))
        size += 1
        counts.update(outcome.counts)
        counts["events"] += outcome.events
        counts.update(f"worlds with {name}" for name, count in outcome.counts.items() if count)
        if outcome.finding is not None:
            findings.append((seed, outcome.finding))
    return counts, findings, size


def _progress(done: int, runs: int, start: float, hits: Counter[str]) -> None:
    rate = done / max(time.monotonic() - start, 0.001)
    end = "\r" if sys.stderr.isatty() and done < runs else "\n"
    text = f"{done}/{runs} worlds, {rate:.1f}/s, {sum(hits.values())} findings"
    print(text, end=end, file=sys.stderr, flush=True)


def _report(
    options: argparse.Namespace,
    counts: Counter[str],
    first: dict[str, tuple[int, Finding]],
    hits: Counter[str],
    seconds: float,
) -> None:
    print(f"{options.flavour}: {options.runs} worlds in {seconds:.0f} s")
    for name in sorted(counts):
        print(f"  {name:22} {counts[name]}")
    for signature, (seed, finding) in sorted(first.items(), key=lambda item: -hits[item[0]]):
        print(f"\n{hits[signature]} x {signature}\n  seed {seed}: {finding.detail}")
        if not options.no_shrink:
            make = _of_bytes if options.bytes else from_seed
            print(_small(make(seed, options.flavour), finding))


def _small(plan: Plan, finding: Finding) -> str:
    plan = shrink(plan, lambda one: _same(one, finding))
    return f"{plan}\n  python -m fuzz.world --replay '{plan.line()}'"


def _same(plan: Plan, finding: Finding) -> bool:
    found = run(plan).finding
    return found is not None and found.signature == finding.signature


def _replay(source: str) -> int:
    if source.lstrip("-").isdigit():
        plan = from_seed(int(source), "kvsafe")
    else:
        text = Path(source[1:]).read_text() if source.startswith("@") else source
        plan = read(text)
    print(plan)
    outcome = run(plan)
    print(f"digest {outcome.digest}")
    if outcome.finding is None:
        print("clean")
        return 0
    print(f"event {outcome.finding.at}: {outcome.finding.signature}\n{outcome.finding.detail}")
    return 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What the proof costs a worker: copies with it against copies without it, on the same bytes.

Both copiers work on the same tensors and rows.  A round runs one job of every row on each of
them, in alternating order; what counts is the ratio within a round, so that whatever else the
machine does meanwhile falls on both sides.

    python -m benchmarks.worker_copy [--json] [--rounds N] [--bytes N] [--suite NAME]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from kvsafe.device import (
    Copier,
    CopyPlan,
    DeviceTensor,
    Direction,
    Geometry,
    GroupRef,
    RowPlan,
    RowWindow,
    cpu_copier,
)
from kvsafe.seal.keyring import DEFAULT_SUITE
from kvsafe.seal.suites import Suite, tags_equal

KIB = 1024
SLICES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
THREADS = (1, 2)
LAYERS, SPAN, HEADER = 4, 4, 4096
KEY = bytes(range(32))
CONTEXT = bytes(120)


class KeyedProof:
    """Tags a slice after a store as workers do, checks the tag before a load."""

    def __init__(self, window: RowWindow, suite: Suite) -> None:
        self._suite = suite
        self._window = window
        self._bytes = memoryview(window.base.numpy()).cast("B")
        self._tags: dict[int, bytes] = {}

    def _tag(self, row: RowPlan) -> bytes:
        start = self._window.slice_start(row.row)
        body = self._bytes[start : start + self._window.slice_bytes]
        return self._suite.tag_slice(KEY, CONTEXT, body)

    def fence(self, row: RowPlan) -> object | None:
        return None

    def after_store(self, row: RowPlan) -> object | None:
        self._tags[row.row] = self._tag(row)
        return None

    def before_load(self, row: RowPlan) -> object | None:
        same = tags_equal(self._tag(row), self._tags.get(row.row, b""))
        return None if same else "tag"


@dataclass(frozen=True)
class Result:
    """Seconds per job are medians; `ratio` is proof / bare within a round."""

    slice_kib: int
    direction: str
    threads: int
    rows: int
    bare_s: float
    proof_s: float
    bare_gb_s: float
    proof_gb_s: float
    ratio: float
    ratio_min: float
    ratio_max: float


class Bench:
    """One slice size and thread count: the same memory under both copiers."""

    def __init__(self, suite: Suite, slice_bytes: int, threads: int, total: int) -> None:
        page = slice_bytes // (LAYERS * SPAN)
        self.rows = max(total // slice_bytes, 2 * threads)
        blocks = 1 + self.rows * SPAN
        self.slice_bytes, self.threads = slice_bytes, threads
        self.geometry = _geometry(page, blocks)
        stride = HEADER + slice_bytes
        base = torch.zeros(self.rows * stride, dtype=torch.int8)
        self.window = RowWindow(base, 0, self.rows, stride, HEADER, slice_bytes)
        self.bare = cpu_copier(self.geometry, self.window, None, threads)
        self.proof = cpu_copier(self.geometry, self.window, KeyedProof(self.window, suite), threads)
        self._job = 0

    def plan(self, direction: Direction) -> CopyPlan:
        self._job += 1
        rows = tuple(
            RowPlan(row, 0, tuple((slot, 1 + row * SPAN + slot) for slot in range(SPAN)))
            for row in range(self.rows)
        )
        return CopyPlan(self._job, direction, rows)

    def run(self, copier: Copier, direction: Direction) -> float:
        """Seconds from submit to outcome of one job over all rows."""
        plan = self.plan(direction)
        start = time.perf_counter()
        copier.submit(plan)
        if not copier.wait({plan.job}, 120):
            raise SystemExit("a job did not end within two minutes")
        seconds = time.perf_counter() - start
        if not all(outcome.ok for outcome in copier.poll()):
            raise SystemExit("a copy failed")
        return seconds

    def measure(self, direction: Direction, rounds: int) -> Result:
        self.run(self.proof, Direction.STORE)  # tags for the loads, and warm pages
        self.run(self.bare, direction)
        pairs = [self._round(direction, turn) for turn in range(rounds)]
        return self._result(direction, pairs)

    def _round(self, direction: Direction, turn: int) -> tuple[float, float]:
        if turn % 2:
            proof = self.run(self.proof, direction)
            return self.run(self.bare, direction), proof
        return self.run(self.bare, direction), self.run(self.proof, direction)

    def _result(self, direction: Direction, pairs: list[tuple[float, float]]) -> Result:
        bare = statistics.median(pair[0] for pair in pairs)
        proof = statistics.median(pair[1] for pair in pairs)
        ratios = [pair[1] / pair[0] for pair in pairs]
        moved = self.rows * self.slice_bytes / 1e9
        return Result(
            self.slice_bytes // KIB,
            direction.value,
            self.threads,
            self.rows,
            bare,
            proof,
            moved / bare,
            moved / proof,
            statistics.median(ratios),
            min(ratios),
            max(ratios),
        )

    def close(self) -> None:
        self.bare.shutdown()
        self.proof.shutdown()


def _geometry(page: int, blocks: int) -> Geometry:
    tensors = []
    for layer in range(LAYERS):
        maker = torch.Generator().manual_seed(layer)
        view = torch.randint(-128, 128, (blocks, page), generator=maker, dtype=torch.int8)
        tensors.append(DeviceTensor(view, page, (f"layer{layer}",)))
    refs = tuple(GroupRef(layer, page) for layer in range(LAYERS))
    return Geometry(tuple(tensors), (refs,), SPAN)


def results(suite: Suite, rounds: int, total: int) -> Iterator[Result]:
    for slice_bytes in SLICES:
        for threads in THREADS:
            bench = Bench(suite, slice_bytes, threads, total)
            for direction in Direction:
                yield bench.measure(direction, rounds)
            bench.close()


HEAD = "  slice  direction  threads  bare GB/s  proof GB/s  ratio (min - max)"


def line(result: Result) -> str:
    size = f"{result.slice_kib} KiB"
    return (
        f"{size:>8} {result.direction:>9} {result.threads:>8} {result.bare_gb_s:>10.2f} "
        f"{result.proof_gb_s:>11.2f}  {result.ratio:.2f} "
        f"({result.ratio_min:.2f} - {result.ratio_max:.2f})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Cost of the slice proof in the CPU worker.")
    parser.add_argument("--json", action="store_true", help="one JSON document, no table")
    parser.add_argument("--rounds", type=int, default=15, help="paired rounds per case")
    parser.add_argument("--bytes", type=int, default=32 * KIB * KIB, help="bytes per job")
    names = [suite.label for suite in Suite]
    parser.add_argument("--suite", default=DEFAULT_SUITE, choices=names, help="default %(default)s")
    options = parser.parse_args()
    if not options.json:
        print(HEAD)
    collected = []
    for result in results(Suite.named(options.suite), options.rounds, options.bytes):
        collected.append(asdict(result))
        if not options.json:
            print(line(result), flush=True)
    if options.json:
        json.dump({"benchmark": "worker_copy", "results": collected}, sys.stdout, indent=1)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

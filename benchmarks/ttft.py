# SPDX-License-Identifier: Apache-2.0
"""Time to first token: recompute, host hit and disk hit, with the checks and without them.

    python -m benchmarks.ttft [--json] [--rounds N] [--tokens 512,1024,...]

A real vLLM engine on a random model whose prefill takes seconds here. "Checks off" is our own
worker with the proofs taken out by this script (no setting does that). Both engines run in one
process each, one after the other; a figure is the median over rounds of one request that asks
for one token, on an idle engine, the first round of each kind left out.
"""

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.first_token import Run, arguments, child, engine, spawn
from benchmarks.report import show

KINDS = ("recompute", "host hit", "disk hit")


def _start(folder: Path, *, checks: bool) -> Any:
    if not checks:
        _take_checks_out()
    store = {"type": "fs", "root_dir": str(folder / "store")}
    return engine(folder, {"secondary_tiers": [store]})


def _take_checks_out() -> None:
    """Leave the fences, take out tagging and opening: the bare copier and the bare tier."""
    from kvsafe.engine.rows import proof
    from kvsafe.engine.tiers import proving as tier
    from kvsafe.seal import sealing

    proof.RowProof.before_load = proof.RowProof.fence  # type: ignore[method-assign]
    tier.ProvingTier._open = lambda self, key, row: None  # type: ignore[method-assign]
    sealing.SliceSealer.seal_slice = _record_only  # type: ignore[method-assign]


def _record_only(self: Any, row: memoryview, key: bytes, epoch: int, generation: int) -> None:
    """The writer's record without the hash of the slice."""
    from kvsafe.seal.layout import RECORD

    place = self._place
    fields = (place.rank, 0, place.offset, place.length, generation, bytes(32))
    RECORD.pack_into(row, self._record, *fields)


def _measure(run: Run, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of the three kinds for prompts of one length."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cached = dict.fromkeys(KINDS, 0)
    for _ in range(rounds + 1):
        prompt = run.prompt(tokens)
        for kind in KINDS:
            run.settle()
            run.forget(host=kind == "disk hit")
            took, hit = run.first_token(prompt)
            seconds[kind].append(took)
            cached[kind] = hit
    return {
        kind: {"s": statistics.median(values[1:]), "cached": cached[kind]}
        for kind, values in seconds.items()
    }


def main() -> int:
    """Run both engines and print."""
    lengths = (512, 1024, 2048, 4096, 8064)
    options = arguments("time to first token", ("on", "off"), lengths).parse_args()
    if options.child:
        child(options, partial(_start, checks=options.child == "on"), _measure)
    on, off = (spawn("benchmarks.ttft", options, checks) for checks in ("on", "off"))
    rows: list[dict[str, object]] = []
    for tokens in map(str, options.tokens):
        for kind in KINDS:
            with_checks, without = on[tokens][kind], off[tokens][kind]
            rows.append(
                {
                    "tokens": int(tokens),
                    "kind": kind,
                    "cached": with_checks["cached"],
                    "s": with_checks["s"],
                    "speedup": on[tokens]["recompute"]["s"] / with_checks["s"],
                    "s_checks_off": without["s"],
                    "checks_cost": with_checks["s"] / without["s"],
                }
            )
    show(rows, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

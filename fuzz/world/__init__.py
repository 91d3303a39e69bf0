# SPDX-License-Identifier: Apache-2.0
"""The whole connector as one world: vLLM's real scheduler over simulated accelerator memory.

    from fuzz.world import run
    outcome = run(7, "kvsafe")            # a seed
    outcome = run(b"...", "stock")        # any bytes: a fuzz target
    outcome = run(plan, plan.flavour)     # a plan, as `plan.read` takes it from a line

`outcome.finding` is None for a clean run, otherwise it says what was broken
(`kind`, `where`, `detail`, `signature`); `outcome.counts` says how often each thing happened,
`outcome.digest` is equal for equal runs. `run` never raises for what the world finds; it takes
some ten milliseconds after the first call of a process, which imports vLLM.

On the command line: `python -m fuzz.world --flavour stock|kvsafe --runs N --seed S`.
"""

from fuzz.world.outcome import Finding, Outcome, WrongWorld
from fuzz.world.plan import FLAVOURS, Event, Plan, Setting, from_seed, read
from fuzz.world.raw import from_bytes


def run(source: "int | bytes | Plan", flavour: str = "kvsafe") -> Outcome:
    """Run one world to its end. `flavour` is ignored for a plan, which names its own."""
    from fuzz.world.world import run_plan

    if isinstance(source, Plan):
        return run_plan(source)
    if isinstance(source, bytes):
        return run_plan(from_bytes(source, flavour))
    return run_plan(from_seed(source, flavour))


__all__ = [
    "FLAVOURS",
    "Event",
    "Finding",
    "Outcome",
    "Plan",
    "Setting",
    "WrongWorld",
    "from_bytes",
    "from_seed",
    "read",
    "run",
]

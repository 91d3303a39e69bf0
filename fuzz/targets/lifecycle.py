# SPDX-License-Identifier: Apache-2.0
"""The whole connector as one world: vLLM's scheduler, our manager, tier and seal code."""

from __future__ import annotations

from fuzz.target import Finding, Target

_ORACLES = {
    "died": "exception",
    "starved": "hang",
    "unbalanced": "wrong",
    "announced": "wrong",
    "wrong-output": "accepted",
    "wrong-load": "accepted",
    "wrong-row": "accepted",
    "wrong-compute": "accepted",
}


class Lifecycle(Target):
    """A plan of requests, aborts, preemptions, failures, delays, resets; then all must settle.

    The world is `fuzz.world`; its own command replays plans and makes them smaller event by event.
    Oracles: every served byte is right, every request is answered, pins return to zero, the
    books balance, nothing dies.
    """

    name = "lifecycle"
    max_len = 420
    seconds = 60.0
    memory_mib = 1024

    def __init__(self) -> None:
        from fuzz.world import run

        self._run = run
        # The first run of a process imports the engine.
        run(b"", "kvsafe")

    def once(self, data: bytes) -> None:
        found = self._run(data, "kvsafe").finding
        if found is not None:
            oracle = _ORACLES.get(found.kind, "wrong")
            finding = Finding(oracle, f"{found.kind} at {found.where}: {found.detail}")
            finding.where = found.signature
            raise finding

    def seeds(self) -> list[bytes]:
        from fuzz.world.raw import MIXES

        return [b"", *(bytes((mix, 32, mix, 1, mix, 2)) for mix in range(len(MIXES)))]

# SPDX-License-Identifier: Apache-2.0
"""Time to first token: recompute against a hit through LMCache's own lm:// server.

    conformance/lmcache/setup && python -m benchmarks.lmcache_ttft [--json] [--rounds N]

A real vLLM engine with the `kvsafe-lmcache` tier, one per kind of trust, on a random model whose
prefill takes seconds here. Before a hit is timed, the engine's prefix cache and the host rows are
emptied, so every chunk comes over the wire. Median over rounds, the first one left out.
"""

import statistics
import sys
from argparse import SUPPRESS
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.first_token import Run, arguments, child, engine, spawn
from benchmarks.report import show
from conformance.lmcache.peers.servers import NotHere, lm_server

BLOCK, CHUNK = 32, 256
TRUSTS = ("peer", "attested")


def _start(folder: Path, *, url: str, trust: str) -> Any:
    tier = {"type": "kvsafe-lmcache", "url": url, "trust": trust, "model_name": "wide"}
    extra = {"blocks_per_chunk": CHUNK // BLOCK, "secondary_tiers": [tier]}
    return engine(folder, extra, block_size=BLOCK)


def _measure(run: Run, tokens: int, rounds: int) -> dict[str, float]:
    """Medians of recompute and hit, and the tokens that the last hit did not compute."""
    computed, served, cached = [], [], 0
    for _ in range(rounds + 1):
        prompt = run.prompt(tokens)
        run.settle()
        computed.append(run.first_token(prompt)[0])
        run.settle()
        run.forget(host=True)
        took, cached = run.first_token(prompt)
        served.append(took)
    return {
        "recompute_s": statistics.median(computed[1:]),
        "hit_s": statistics.median(served[1:]),
        "cached": cached,
    }


def main() -> int:
    """Start the server, run an engine per kind of trust, print."""
    parser = arguments("time to first token through lm://", TRUSTS, (1024, 2048, 4096, 8064))
    parser.add_argument("--url", help=SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options, partial(_start, url=options.url, trust=options.child), _measure)
    rows: list[dict[str, object]] = []
    try:
        for trust in TRUSTS:
            with lm_server() as (host, port):
                url = f"lm://{host}:{port}"
                found = spawn("benchmarks.lmcache_ttft", options, trust, "--url", url)
            for tokens, one in found.items():
                speedup = one["recompute_s"] / one["hit_s"]
                rows.append({"trust": trust, "tokens": int(tokens), **one, "speedup": speedup})
    except NotHere as error:
        print(f"lmcache benchmark left out: {error}", file=sys.stderr)
        return 0
    show(rows, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

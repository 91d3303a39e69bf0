# SPDX-License-Identifier: Apache-2.0
"""Time to first token: recompute against a hit through LMCache's own lm:// server.

    conformance/lmcache/setup && python -m benchmarks.lmcache_ttft [--json] [--rounds N]

A real vLLM engine with the `kvsafe-lmcache` tier, one per kind of trust, on a random model whose
prefill takes seconds here. Before a hit is timed, the engine's prefix cache and the host rows are
emptied, so every chunk comes over the wire. Median over rounds, the first one left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import show
from benchmarks.ttft import Run
from conformance.lmcache.peers.servers import NotHere, lm_server

CHUNK = 256
TRUSTS = ("peer", "attested")


def _engine(folder: Path, url: str, trust: str) -> Any:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM

    from kvsafe.cli.demo import widemodel

    shape = widemodel.Shape(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, inner=1408)
    tier = {"type": "kvsafe-lmcache", "url": url, "trust": trust, "model_name": "wide"}
    return LLM(
        model=str(widemodel.wide_qwen3(folder, shape)),
        dtype="float32",
        enforce_eager=True,
        max_model_len=8192,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        block_size=32,
        kv_transfer_config={
            "kv_connector": "KVSafeConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": "1500MiB",
                "blocks_per_chunk": CHUNK // 32,
                "state_dir": str(folder / "state"),
                "secondary_tiers": [tier],
            },
        },
    )


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


def _child(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = Run(_engine(Path(name), options.url, options.child), 7)
        found = {tokens: _measure(run, tokens, options.rounds) for tokens in options.tokens}
        print("RESULT " + json.dumps(found), flush=True)
    # Engine threads may outlive the interpreter's own shutdown.
    os._exit(0)


def _spawn(options: argparse.Namespace, url: str, trust: str) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "benchmarks.lmcache_ttft", "--child", trust, "--url", url]
    command += ["--rounds", str(options.rounds), "--tokens", ",".join(map(str, options.tokens))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, dict[str, float]] = json.loads(line[7:])
            return result
    sys.exit(f"the engine gave no result:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def main() -> int:
    """Start the server, run an engine per kind of trust, print."""
    parser = argparse.ArgumentParser(description="time to first token through lm://")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1024, 2048, 4096, 8064],
    )
    parser.add_argument("--child", choices=TRUSTS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options)
    rows: list[dict[str, object]] = []
    try:
        for trust in TRUSTS:
            with lm_server() as (host, port):
                found = _spawn(options, f"lm://{host}:{port}", trust)
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

# SPDX-License-Identifier: Apache-2.0
"""Time to first token: recompute, host hit and disk hit, with the checks and without them.

    python -m benchmarks.ttft [--json] [--rounds N] [--tokens 512,1024,...]

A real vLLM engine on a random model whose prefill takes seconds here. "Checks off" is our own
worker with the proofs taken out by this script (no setting does that). Both engines run in one
process each, one after the other; a figure is the median over rounds of one request that asks
for one token, on an idle engine, the first round of each kind left out.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import show

KINDS = ("recompute", "host hit", "disk hit")


def _engine(folder: Path, *, checks: bool) -> Any:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM

    from kvsafe.cli.demo import widemodel

    if not checks:
        _take_checks_out()
    shape = widemodel.Shape(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, inner=1408)
    model = widemodel.wide_qwen3(folder, shape)
    return LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=8192,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        kv_transfer_config={
            "kv_connector": "KVSafeConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": "1500MiB",
                "state_dir": str(folder / "state"),
                "secondary_tiers": [{"type": "fs", "root_dir": str(folder / "store")}],
            },
        },
    )


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


class Run:
    """One engine and the prompts that are sent to it."""

    def __init__(self, llm: Any, seed: int) -> None:
        self.llm = llm
        self.random = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that nothing has seen."""
        return [self.random.randrange(10, 500) for _ in range(tokens)]

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how many prompt tokens were not computed."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        start = time.perf_counter()
        output = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt)],
            SamplingParams(temperature=0, max_tokens=1),
            use_tqdm=False,
        )[0]
        return time.perf_counter() - start, output.num_cached_tokens or 0

    def settle(self) -> None:
        """Let stores and cascades end."""
        core = self.llm.llm_engine.engine_core.engine_core
        deadline = time.monotonic() + 60
        while core.scheduler.connector.has_pending_push_work() and time.monotonic() < deadline:
            self.first_token(self.prompt(16))

    def forget(self, *, host: bool) -> None:
        """Empty the accelerator's prefix cache, and the host rows if asked."""
        self.llm.reset_prefix_cache()
        if host:
            core = self.llm.llm_engine.engine_core.engine_core
            core.scheduler.connector.connector_scheduler.manager.primary_tier.reset_cache()

    def measure(self, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
        """Medians of the three kinds for prompts of one length."""
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        cached = dict.fromkeys(KINDS, 0)
        for _ in range(rounds + 1):
            prompt = self.prompt(tokens)
            for kind in KINDS:
                self.settle()
                self.forget(host=kind == "disk hit")
                took, hit = self.first_token(prompt)
                seconds[kind].append(took)
                cached[kind] = hit
        return {
            kind: {"s": statistics.median(values[1:]), "cached": cached[kind]}
            for kind, values in seconds.items()
        }


def _child(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = Run(_engine(folder, checks=options.child == "on"), 7)
        found = {tokens: run.measure(tokens, options.rounds) for tokens in options.tokens}
        print("RESULT " + json.dumps(found), flush=True)
    # Engine threads may outlive the interpreter's own shutdown.
    os._exit(0)


def _spawn(options: argparse.Namespace, checks: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.ttft", "--child", checks]
    command += ["--rounds", str(options.rounds)]
    command += ["--tokens", ",".join(map(str, options.tokens))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line[7:])
            return result
    sys.exit(f"the engine gave no result:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def main() -> int:
    """Run both engines and print."""
    parser = argparse.ArgumentParser(description="time to first token")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[512, 1024, 2048, 4096, 8064],
    )
    parser.add_argument("--child", choices=("on", "off"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _child(options)
    on, off = _spawn(options, "on"), _spawn(options, "off")
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

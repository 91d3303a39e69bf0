# SPDX-License-Identifier: Apache-2.0
"""Shared by the two that time a first token: options, the child process, its engine, its requests.

Each kind of engine runs in a child process of its own, one after the other, and hands its
figures over as one line of JSON.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_MARK = "RESULT "
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


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


def engine(folder: Path, extra: dict[str, Any], **setting: Any) -> Any:
    """A real vLLM engine on a random model whose prefill takes seconds on a CPU.

    `extra` goes to our connector, `setting` to vLLM; model and state lie in `folder`.
    """
    from vllm import LLM

    from kvsafe.cli.demo import widemodel

    shape = widemodel.Shape(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, inner=1408)
    return LLM(
        model=str(widemodel.wide_qwen3(folder, shape)),
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
                **extra,
            },
        },
        **setting,
    )


def arguments(text: str, kinds: Sequence[str], tokens: Sequence[int]) -> argparse.ArgumentParser:
    """`--json`, `--rounds`, `--tokens`, and `--child` with one of `kinds` for the child."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(part) for part in text.split(",")],
        default=list(tokens),
    )
    parser.add_argument("--child", choices=kinds, help=argparse.SUPPRESS)
    return parser


def child(
    options: argparse.Namespace,
    start: Callable[[Path], Any],
    measure: Callable[[Run, int, int], Any],
) -> NoReturn:
    """Start an engine in a new folder, print `measure(run, tokens, rounds)` of each length, end."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.update(_ENVIRONMENT)
    with tempfile.TemporaryDirectory() as name:
        run = Run(start(Path(name)), 7)
        found = {tokens: measure(run, tokens, options.rounds) for tokens in options.tokens}
        print(_MARK + json.dumps(found), flush=True)
    # Engine threads may outlive the interpreter's own shutdown.
    os._exit(0)


def spawn(module: str, options: argparse.Namespace, kind: str, *more: str) -> dict[str, Any]:
    """What the child of that kind has measured, by length of the prompt; exits if it gave nothing.

    `module` is the benchmark's own name, `more` are arguments of its own for the child.
    """
    command = [sys.executable, "-m", module, "--child", kind, "--rounds", str(options.rounds)]
    command += ["--tokens", ",".join(map(str, options.tokens)), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return result
    sys.exit(f"the engine gave no result:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")

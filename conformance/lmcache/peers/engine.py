# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own, driven by JSON lines; runs in our venv and LMCache's.

    PYTHON -m conformance.lmcache.peers.engine

First line in: `{"settings": {...}}`, arguments of `vllm.LLM`; first line out: `{"ready": true}` or
`{"error": ...}`. Then `{"prompts": [[ids]...], "max_tokens": 16, "linger_s": 2.0}`, answered with
tokens, cached prompt tokens and seconds per prompt, and kvsafe's counters. Before each of these the
engine's own prefix cache is emptied, so what is cached came through the connector.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "2",
}


def main() -> None:
    """Serve until standard input ends; what vLLM prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if "settings" in question:
                engine = _start(question["settings"])
                answer: dict[str, Any] = {"ready": True}
            else:
                answer = _generate(engine, question)
        except Exception as error:  # whatever an engine raises is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    # Threads of an engine may outlive the interpreter's own shutdown.
    os._exit(0)


def _start(settings: dict[str, Any]) -> Any:
    from vllm import LLM

    fixed = {"enforce_eager": True, "enable_prefix_caching": True, "disable_log_stats": False}
    return LLM(**{**fixed, **settings})


def _generate(engine: Any, question: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    engine.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=question.get("max_tokens", 16))
    done = []
    for tokens in question["prompts"]:
        began = time.perf_counter()
        prompt = TokensPrompt(prompt_token_ids=tokens)
        out = engine.generate([prompt], sampling, use_tqdm=False)[0]
        done.append(_answer(out, time.perf_counter() - began))
    _linger(engine, question.get("linger_s", 0.0))
    return {"done": done, "counters": _counters()}


def _linger(engine: Any, seconds: float) -> None:
    """Let stores end: their reports are only taken while the engine makes steps."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    end = time.monotonic() + seconds
    one = SamplingParams(temperature=0, max_tokens=1)
    while time.monotonic() < end:
        engine.generate([TokensPrompt(prompt_token_ids=[3, 5])], one, use_tqdm=False)
        time.sleep(0.2)


def _answer(out: Any, seconds: float) -> dict[str, Any]:
    return {
        "tokens": list(out.outputs[0].token_ids),
        "cached": out.num_cached_tokens or 0,
        "finish": out.outputs[0].finish_reason,
        "seconds": seconds,
    }


def _counters() -> dict[str, float]:
    """kvsafe's samples; vLLM's own reader of metrics knows its own names only."""
    from prometheus_client import REGISTRY

    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return {
        f"{sample.name}{_labels(sample.labels)}": sample.value
        for sample in samples
        if sample.name.startswith("kvsafe") and not sample.name.endswith("_created")
    }


def _labels(labels: dict[str, str]) -> str:
    own = {k: v for k, v in labels.items() if k not in ("engine", "model_name")}
    return "" if not own else json.dumps(own, sort_keys=True)


if __name__ == "__main__":
    for _name, _value in ENVIRONMENT.items():
        os.environ.setdefault(_name, _value)
    main()

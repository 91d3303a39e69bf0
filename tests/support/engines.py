# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine for the length of a `with` block, and greedy decoding on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def running(model: Path, **settings: Any) -> Iterator[Any]:
    """Yield `vllm.LLM` over `model` in float32, eager; its processes have ended when the block has.

    Without this an engine lives until the interpreter exits, holds its memory while others start,
    and writes its farewell after pytest's closing line. `settings` go to `vllm.LLM` as they are.
    """
    from vllm import LLM

    chosen = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, **settings}
    engine = LLM(model=str(model), **chosen)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()


def greedy(engine: Any, prompt: Sequence[int], count: int, lora: Any = None) -> list[int]:
    """The `count` token ids that greedy decoding gives after `prompt`, never stopping early."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    [result] = engine.generate(
        [{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False, lora_request=lora
    )
    return list(result.outputs[0].token_ids)

# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine starts on the tiny models and generates; adapters change what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import models

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [(7 * place + 3) % 500 + 3 for place in range(300)]


def _engine(model: Path, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model), dtype="float32", enforce_eager=True, max_model_len=1024, **settings
    )


def _greedy(engine: Any, adapter: int | None = None) -> list[int]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    lora = None
    if adapter is not None:
        folder = models.qwen3_lora_adapter(adapter)
        lora = LoRARequest(f"adapter-{adapter}", adapter, str(folder))
    [result] = engine.generate(
        [{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False, lora_request=lora
    )
    return list(result.outputs[0].token_ids)


def test_qwen3_generates_with_and_without_adapters() -> None:
    engine = _engine(models.qwen3(), enable_lora=True, max_lora_rank=8, max_loras=1)
    plain = _greedy(engine)
    assert len(plain) == 8
    assert _greedy(engine) == plain
    assert _greedy(engine, adapter=1) not in (plain, _greedy(engine, adapter=2))


def test_gemma3_generates() -> None:
    engine = _engine(models.gemma3())
    first = _greedy(engine)
    assert len(first) == 8
    assert _greedy(engine) == first

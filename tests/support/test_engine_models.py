# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine starts on the tiny models and generates; adapters change what comes out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import models
from tests.support.engines import greedy, running

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [(7 * place + 3) % 500 + 3 for place in range(300)]


def _adapter(seed: int) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{seed}", seed, str(models.qwen3_lora_adapter(seed)))


def test_qwen3_generates_with_and_without_adapters() -> None:
    with running(models.qwen3(), enable_lora=True, max_lora_rank=8, max_loras=1) as engine:
        plain = greedy(engine, PROMPT, 8)
        one, two = (greedy(engine, PROMPT, 8, _adapter(seed)) for seed in (1, 2))
        again = greedy(engine, PROMPT, 8)
    assert len(plain) == 8
    assert again == plain
    assert plain not in (one, two)
    assert one != two


def test_gemma3_generates() -> None:
    with running(models.gemma3()) as engine:
        first, again = greedy(engine, PROMPT, 8), greedy(engine, PROMPT, 8)
    assert len(first) == 8
    assert again == first

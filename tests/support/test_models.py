# SPDX-License-Identifier: Apache-2.0
"""The tiny models: built once, always the same, and sensitive enough to notice a wrong block."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsafe.cli import tinymodel
from tests.support import models

BUILDERS = [models.qwen3, models.gemma3, models.deepseek_mla]
NEW_TOKENS = 8


def _digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def _greedy(model: Any, tokens: list[int]) -> list[int]:
    import torch

    prompt = torch.tensor([tokens])
    with torch.no_grad():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(tokens) :]]


def test_a_second_build_gives_the_same_bytes(tmp_path: Path) -> None:
    first, again = tinymodel.qwen3(tmp_path / "one"), tinymodel.qwen3(tmp_path / "two")
    assert _digests(first) == _digests(again)
    assert "model.safetensors" in _digests(first)


def test_a_built_folder_is_reused(tmp_path: Path) -> None:
    folder = tinymodel.qwen3_lora_adapter(tmp_path, 1)
    (folder / "mark").touch()
    assert tinymodel.qwen3_lora_adapter(tmp_path, 1) == folder
    assert (folder / "mark").exists()
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        tinymodel._cached(tmp_path, "broken", build)
    assert list(tmp_path.iterdir()) == []


def test_adapters_of_two_seeds_differ_in_weights_only(tmp_path: Path) -> None:
    one, two = (_digests(tinymodel.qwen3_lora_adapter(tmp_path, seed)) for seed in (1, 2))
    assert one["adapter_config.json"] == two["adapter_config.json"]
    assert one["adapter_model.safetensors"] != two["adapter_model.safetensors"]


def test_the_tokenizer_has_512_entries_and_gives_text_back() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.qwen3())
    text = "the station, 12 Ω"
    ids = tokenizer.encode(text)
    assert len(tokenizer) == 512
    assert max(ids) < 512
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())  # the merges are in use


def test_the_shapes_are_the_promised_ones() -> None:
    qwen3 = json.loads((models.qwen3() / "config.json").read_text())
    gemma3 = json.loads((models.gemma3() / "config.json").read_text())
    assert (qwen3["hidden_size"], qwen3["num_hidden_layers"]) == (256, 4)
    assert (qwen3["num_key_value_heads"], qwen3["head_dim"]) == (4, 64)
    assert gemma3["sliding_window"] == 256
    assert gemma3["layer_types"].count("full_attention") == 1
    assert len(gemma3["layer_types"]) == 6


@pytest.mark.parametrize("build", BUILDERS)
def test_one_wrong_block_changes_what_is_generated(build: Callable[[], Path]) -> None:
    """Else a test that compares tokens would not notice that wrong KV was copied back."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(build(), dtype=torch.float32).eval()
    draw = random.Random(1)
    tokens = [draw.randrange(3, 512) for _ in range(400)]
    wrong = [*tokens[:128], *(draw.randrange(3, 512) for _ in range(128)), *tokens[256:]]
    assert _greedy(model, tokens) == _greedy(model, tokens)
    assert _greedy(model, tokens) != _greedy(model, wrong)

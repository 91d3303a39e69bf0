# SPDX-License-Identifier: Apache-2.0
"""The demo's model: the tiny Qwen3 made wide, so that reading a long prompt costs seconds.

The tokenizer and the shape of `config.json` are those of `kvsafe.cli.tinymodel`; the weights are
drawn here, straight into a file, because building a module first would take most of the time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsafe.cli import tinymodel

__all__ = ["DEMO_SHAPE", "Shape", "wide_qwen3"]


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Qwen3: counts of layers, heads and KV heads, and widths in numbers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    @property
    def parameters(self) -> int:
        """Weights of all layers, embeddings left out."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (attention + 3 * self.inner)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token in float32: a K and a V for every layer and KV head."""
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim


DEMO_SHAPE = Shape(hidden=1024, layers=12, heads=16, kv_heads=2, head_dim=64, inner=2816)
"""Some 135 million weights: about five seconds for 2500 tokens on two cores."""


def wide_qwen3(root: Path, shape: Shape = DEMO_SHAPE, seed: int = 0) -> Path:
    """Make a Qwen3 of this shape with random bfloat16 weights in a new folder under `root`.

    Imports torch and transformers. Raises `OSError` when the folder cannot be written.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    narrow = tinymodel.qwen3(root)
    folder = root / "wide-qwen3"
    folder.mkdir()
    for path in narrow.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, folder)
    config = _widened(json.loads((narrow / "config.json").read_text()), shape)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_weights(folder / "model.safetensors", shape, int(config["vocab_size"]), seed)
    return folder


def _widened(config: dict[str, Any], shape: Shape) -> dict[str, Any]:
    return {
        **config,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
    }


def _write_weights(path: Path, shape: Shape, vocabulary: int, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for name, size in _tensors(shape, vocabulary):
        if len(size) == 2:
            drawn = torch.empty(size, dtype=torch.bfloat16)
            tensors[name] = drawn.normal_(0.0, 0.02, generator=random)
        else:
            sharper = (
                tinymodel.SHARPER_NORM if name.endswith(("q_norm.weight", "k_norm.weight")) else 0.0
            )
            tensors[name] = torch.full(size, 1.0 + sharper, dtype=torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})


def _tensors(shape: Shape, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and size of every tensor of a Qwen3 checkpoint."""
    hidden, queries, keys = (
        shape.hidden,
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    )
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(shape.layers):
        stem = f"model.layers.{layer}"
        yield f"{stem}.input_layernorm.weight", (hidden,)
        yield f"{stem}.post_attention_layernorm.weight", (hidden,)
        yield f"{stem}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{stem}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{stem}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{stem}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{stem}.self_attn.q_norm.weight", (shape.head_dim,)
        yield f"{stem}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{stem}.mlp.gate_proj.weight", (shape.inner, hidden)
        yield f"{stem}.mlp.up_proj.weight", (shape.inner, hidden)
        yield f"{stem}.mlp.down_proj.weight", (hidden, shape.inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)

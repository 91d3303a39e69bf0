# SPDX-License-Identifier: Apache-2.0
"""Tiny random models, made on the spot: no download, seconds to build, real engines run them.

Every builder returns a folder that vLLM loads: bfloat16 weights drawn with seed 0, `config.json`
and a byte-level BPE tokenizer of 512 entries. A folder's name holds a digest of this file and of
the library versions, so a changed builder never meets an old folder. torch, transformers and
tokenizers are imported when a model is really built.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

__all__ = ["deepseek_mla", "gemma3", "qwen3", "qwen3_lora_adapter"]

VOCABULARY: Final = 512
SPECIALS: Final = ("<pad>", "<bos>", "<eos>")
LETTERS: Final = "etaoinshrdlucmfw"
POSITIONS: Final = 8192
LORA_RANK: Final = 8

# A freshly drawn model attends to everything alike, and a wrong block hardly changes its output.
# These make attention sharp enough that it does: what is added to the norms of queries and keys,
# and for MLA, which has none, the factors on its query projection and on its latent.
SHARPER_NORM: Final = 1.5
SHARPER_MLA: Final = {"self_attn.q_proj.weight": 8.0, "kv_a_layernorm.weight": 3.0}


def qwen3(root: Path) -> Path:
    """Qwen3, full attention: hidden 256, 4 layers, 8 heads, 4 KV heads of 64."""
    return _cached(root, "qwen3", _build_qwen3)


def gemma3(root: Path) -> Path:
    """Gemma3 text: 6 layers, five with a sliding window of 256 tokens and one full."""
    return _cached(root, "gemma3", _build_gemma3)


def deepseek_mla(root: Path) -> Path:
    """DeepSeek-V2 with MLA: 3 dense layers, kv_lora_rank 512, rotary part 64."""
    return _cached(root, "deepseek-mla", _build_deepseek)


def qwen3_lora_adapter(root: Path, seed: int) -> Path:
    """A LoRA adapter for `qwen3` in PEFT's folder format; `seed` decides its weights.

    It changes queries, keys and values of every layer, so KV made with another seed is wrong KV.
    """
    return _cached(root, f"qwen3-lora-{seed}", lambda folder: _build_lora(folder, seed))


def _cached(root: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The folder of `name` under `root`; built aside, then moved: it is whole or absent."""
    folder = root / f"{name}-{_recipe()}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        build(aside)
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster, and its folder is as good
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _recipe() -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for package in ("torch", "transformers", "tokenizers"):
        digest.update(f"{package} {version(package)}\n".encode())
    return digest.hexdigest()[:12]


def _build_qwen3(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **_common(),
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    _save(Qwen3ForCausalLM, config, folder)


def _build_gemma3(folder: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **_common(),
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=256,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )
    _save(Gemma3ForCausalLM, config, folder)


def _build_deepseek(folder: Path) -> None:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **_common(),
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        topk_method="greedy",
    )
    _save(DeepseekV2ForCausalLM, config, folder)


def _common() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _save(model_class: Any, config: Any, folder: Path) -> None:
    """Draw the weights with seed 0, leaving the caller's random state as it was, and write all."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).to(torch.bfloat16)
    _sharpen(model)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _sharpen(model: Any) -> None:
    import torch

    weights = dict(model.named_parameters())
    latent = any(name.endswith("kv_a_layernorm.weight") for name in weights)
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                # An addition serves both: Gemma multiplies by 1 + weight, Qwen by weight.
                weight.add_(SHARPER_NORM)
            for ending, factor in SHARPER_MLA.items():
                if latent and name.endswith(ending):
                    weight.mul_(factor)


def _tokenizer() -> Any:
    """Byte-level BPE: the special tokens, 256 bytes, then pairs of frequent letters as merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = VOCABULARY - len(SPECIALS) - len(alphabet)
    merges = [(left, right) for left in LETTERS for right in LETTERS][:room]
    entries = [*SPECIALS, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        model_max_length=POSITIONS,
    )


def _build_lora(folder: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    widths = {"q_proj": 8 * 64, "k_proj": 4 * 64, "v_proj": 4 * 64}
    tensors: dict[str, Any] = {}
    for layer in range(4):
        for target, width in widths.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(LORA_RANK, 256, generator=random) / 16
            tensors[f"{stem}.lora_B.weight"] = torch.randn(width, LORA_RANK, generator=random) / 2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-qwen3",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")

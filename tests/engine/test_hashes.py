# SPDX-License-Identifier: Apache-2.0
"""F05: every dimension of a key, through vLLM's own block hashes and kvsafe's own names.

Two requests share a chunk only if vLLM hashes their blocks alike, the identity is the same and
so is the adapter's content. Each row of the matrix changes one dimension; equal must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.support.engine import prompt

pytestmark = pytest.mark.engine

BLOCK = 128
TOKENS = prompt(701, 3 * BLOCK)


def block_hashes(**changes: Any) -> list[bytes]:
    """The hashes of three blocks of one request, by vLLM's own functions."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    values: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": TOKENS,
        "sampling_params": SamplingParams(max_tokens=1),
        "pooling_params": None,
        **changes,
    }
    values["block_hasher"] = get_request_block_hasher(BLOCK, sha256)
    return list(Request(**values).block_hashes)


def lora(name: str, path: str = "p") -> Any:
    """An adapter of a name."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1, path)


def picture(identifier: str, offset: int, length: int = 20) -> list[Any]:
    """One multimodal item at a place of the prompt."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=offset, length=length)
    return [MultiModalFeatureSpec(data=None, modality="image", identifier=identifier,
                                  mm_position=place)]  # fmt: skip


def embeds(seed: int) -> Any:
    """Prompt embeddings."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    return torch.randn(len(TOKENS), 8, generator=draw)


Make = Callable[[], dict[str, Any]]
PAIRS: dict[str, tuple[Make, Make]] = {
    "tokens": (dict, lambda: {"prompt_token_ids": [TOKENS[0] ^ 1, *TOKENS[1:]]}),
    "salt": (lambda: {"cache_salt": "a"}, lambda: {"cache_salt": "b"}),
    "salt or none": (dict, lambda: {"cache_salt": "a"}),
    "adapter name": (lambda: {"lora_request": lora("a")}, lambda: {"lora_request": lora("b")}),
    "adapter or none": (dict, lambda: {"lora_request": lora("a")}),
    "picture": (
        lambda: {"mm_features": picture("x", 40)},
        lambda: {"mm_features": picture("y", 40)},
    ),
    "place of a picture": (
        lambda: {"mm_features": picture("x", 40)},
        lambda: {"mm_features": picture("x", 41)},
    ),
    "prompt embeddings": (
        lambda: {"prompt_token_ids": None, "prompt_embeds": embeds(1)},
        lambda: {"prompt_token_ids": None, "prompt_embeds": embeds(2)},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_differs_has_another_block_hash(name: str) -> None:
    one, other = PAIRS[name]
    assert block_hashes(**one()) == block_hashes(**one())
    assert len(block_hashes(**one())) == 3
    assert not set(block_hashes(**one())) & set(block_hashes(**other()))


def test_the_content_of_an_adapter_is_in_the_key() -> None:
    """vLLM's hash has the name alone; what kvsafe binds to it has the content."""
    from kvsafe.engine.identity.adapters import bind_adapter

    [block, *_] = block_hashes(lora_request=lora("a"))
    bound = {bind_adapter(block, bytes([seed]) * 32) for seed in range(4)}
    assert len(bound | {block}) == 5
    assert bind_adapter(block, bytes(32)) == bind_adapter(block, bytes(32))


def test_group_and_identity_are_in_the_name() -> None:
    from vllm.v1.kv_offload.base import make_offload_key

    from kvsafe.engine.tiers.names import object_name
    from kvsafe.seal.suites import Suite

    [block, *_] = block_hashes()
    suite, secret = Suite.named("blake3-keyed"), bytes(range(32))
    keys = [bytes(make_offload_key(block, group)) for group in (0, 1)]
    names = {
        object_name(suite, used, digest, key)[:-4]
        for used in (secret, bytes(32))
        for digest in (bytes(32), b"\1" * 32)
        for key in keys
    }
    assert len(names) == 8
    again = object_name(suite, secret, bytes(32), keys[0])
    assert again == object_name(suite, secret, bytes(32), keys[0])
    assert again[-4:] == keys[0][-4:]


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "revision": ({"revision": "other"}, "revision"),
    "dtype": ({"dtype": "bfloat16"}, "dtype"),
    "kv dtype": ({"kv_cache_dtype": "fp8"}, "kv_dtype"),
    "ranks": ({"tensor_parallel_size": 2}, "tp"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_in_the_identity(name: str, qwen3_model: Path) -> None:
    change, field = SETTINGS[name]
    base, other = identity(qwen3_model), identity(qwen3_model, **change)
    assert _differing(base, identity(qwen3_model)) == set()
    assert field in _differing(base, other)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_cache_layout": "LBNHC"}, "kv_layout"),
        ({"blocks_per_chunk": 2}, "blocks_per_chunk"),
        ({"namespace": "other"}, "namespace"),
        ({"weights": "22" * 32}, "weights"),
        ({"replicated": True}, "replicated"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_connector_adds_is_in_the_identity(
    change: dict[str, Any], field: str, qwen3_model: Path
) -> None:
    assert field in _differing(identity(qwen3_model), identity(qwen3_model, given=change))


def identity(model: Path, given: dict[str, Any] | None = None, **settings: Any) -> Any:
    """kvsafe's identity of a real vLLM configuration."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    from kvsafe.engine.identity.running import read_identity

    chosen = {"model": str(model), "dtype": "float32", "max_model_len": 2048, **settings}
    config = EngineArgs(**chosen).create_engine_config()
    names = [f"model.layers.{index}.self_attn.attn" for index in range(4)]
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=64, dtype=torch.float32)
    page = spec.page_size_bytes
    caches = KVCacheConfig(
        10, [KVCacheTensor(4 * page * 10, names, page * 10, page)], [KVCacheGroupSpec(names, spec)]
    )
    values: dict[str, Any] = {
        "namespace": "tests",
        "weights": "11" * 32,
        "format_version": 1,
        "blocks_per_chunk": 1,
        "tokens_per_hash": BLOCK,
        "kv_cache_layout": "LBHNC",
        **(given or {}),
    }
    return read_identity(config, caches, **values)


def _differing(one: Any, other: Any) -> set[str]:
    from kvsafe.seal.identity import differences

    return {item.field for item in differences(one.values, other.values)}

# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler for a setting: real configuration objects, one tiny model's config file."""

import contextlib
import copy
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from fuzz.world.content import Script
from fuzz.world.device import PAGE_BYTES
from fuzz.world.plan import BLOCK_TOKENS, Setting

_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
MAX_TOKENS = 256


@cache
def _base() -> VllmConfig:
    """One configuration per process; worlds take copies and change what differs."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="kvsafe-world-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        model = ModelConfig(
            model=folder,
            dtype="float32",
            seed=0,
            skip_tokenizer_init=True,
            max_model_len=MAX_TOKENS,
        )
        schedule = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=MAX_TOKENS,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=False,
        )
        memory = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
        memory.kv_cache_layout = "LBHNC"
        config = VllmConfig(
            model_config=model,
            scheduler_config=schedule,
            cache_config=memory,
            device_config=DeviceConfig("cpu"),
            attention_config=AttentionConfig(),
        )
    return config


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log lines, and the first block's parent is the same in every process.

    The first world of a process pays some seconds here.
    """
    loggers = [logging.getLogger(name) for name in ("vllm", "kvsafe")]
    levels = [logger.level for logger in loggers]
    parent = vars(kv_cache_utils).get("NONE_HASH")
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(b"\x17" * 32)
    try:
        _base()
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if parent is None:
            del kv_cache_utils.NONE_HASH
        else:
            kv_cache_utils.NONE_HASH = parent


def vllm_config(setting: Setting, connector: str, extra: dict[str, Any]) -> VllmConfig:
    """The effective configuration of a world whose connector is the class of this name."""
    config = copy.copy(_base())
    schedule = config.scheduler_config = copy.copy(config.scheduler_config)
    schedule.max_num_seqs = setting.seats
    schedule.max_num_batched_tokens = setting.budget
    schedule.max_num_scheduled_tokens = setting.budget
    schedule.async_scheduling = setting.pipelined
    memory = config.cache_config = copy.copy(config.cache_config)
    memory.num_gpu_blocks = setting.blocks
    memory.enable_prefix_caching = not setting.no_prefix_cache
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path="fuzz.world.doors",
        kv_role="kv_both",
        engine_id="world",
        kv_load_failure_policy="fail" if setting.fail else "recompute",
        kv_connector_extra_config={
            "blocks_per_chunk": setting.blocks_per_chunk,
            "offload_prompt_only": not setting.whole,
            "self_describing_kv_events": True,
            **extra,
        },
    )
    if setting.events:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return config


def kv_cache_config(setting: Setting) -> KVCacheConfig:
    """One layer per group; the groups share the blocks."""
    groups = [
        KVCacheGroupSpec([f"layer{index}"], _spec(window))
        for index, window in enumerate(setting.windows)
    ]
    tensors = [
        KVCacheTensor(
            size=PAGE_BYTES * setting.blocks,
            layers=list(group.layer_names),
            layer_stride=PAGE_BYTES * setting.blocks,
            block_stride=PAGE_BYTES,
        )
        for group in groups
    ]
    return KVCacheConfig(
        num_blocks=setting.blocks, kv_cache_tensors=tensors, kv_cache_groups=groups
    )


def _spec(window: int) -> Any:
    # Heads and size are such that a page has PAGE_BYTES bytes: 2 * 4 tokens * 1 * 1 * float32.
    shape = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    if window:
        return SlidingWindowSpec(**shape, sliding_window=window)
    return FullAttentionSpec(**shape)


def scheduler(config: VllmConfig, cache_config: KVCacheConfig, setting: Setting) -> Any:
    """vLLM's scheduler; it makes the connector's scheduler half by name."""
    blocks, hashes = resolve_kv_cache_block_sizes(cache_config, config)
    kind = AsyncScheduler if setting.pipelined else Scheduler
    made = kind(
        vllm_config=config,
        kv_cache_config=cache_config,
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
        block_size=blocks,
        hash_block_size=hashes,
    )
    made.use_v2_model_runner = setting.second_runner
    return made


@cache
def _hasher() -> Any:
    return get_request_block_hasher(BLOCK_TOKENS, sha256)


def request(name: str, script: Script, prompt: int, answer: int, params: Any = None) -> Request:
    """A request for `answer` tokens after the first `prompt` tokens of a script."""
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
    made = Request(
        request_id=name,
        prompt_token_ids=script.tokens[:prompt],
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=_hasher(),
    )
    made.kv_transfer_params = params
    return made

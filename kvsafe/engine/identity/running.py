# SPDX-License-Identifier: Apache-2.0
"""Read the identity of a running engine from vLLM 0.32's effective configuration.

Effective means: after `--hf-overrides`, rope and length flags, default dtypes and the
engine core's own decisions (layout, block sizes). The scheduler process and every worker
must read the same document, so nothing here depends on a rank, on memory sizes or on what
only workers know:

- the scheduler's KV cache config flattens a group of unlike layers to its first layer, the
  workers' does not: only the first layer's spec is read;
- under pipeline parallelism a process sees the layers of one stage: layer names and bytes
  per block are left empty, and the stage split is named by `pp` and `pp_partition`;
- `cache_config.block_size` is rewritten by the engine core only: block sizes come from the
  groups.

Some models change their own `hf_config` while they load. In a worker that happens before
the connector is built, in the scheduler's process it may not; compare the two digests at
start and refuse on a difference.
"""

import dataclasses
import os
import platform as machine
from typing import Any

import torch
import vllm
from blake3 import blake3
from vllm import envs
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    DEFAULT_NONE_HASH_SEED,
    resolve_dcp_kv_block_size,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    MambaSpec,
    get_kv_cache_spec_kind,
    get_kv_quant_mode,
    iter_layer_specs,
)

from kvsafe.engine.identity.model import draft_value, model_values, remote_code_value
from kvsafe.engine.identity.values import IdentityUnknown, dtype_name, enum_name, value_digest
from kvsafe.seal.identity import Identity, parse_digest
from kvsafe.seal.layer_names import compress_names

__all__ = [
    "RANDOM_NONE_HASH",
    "IdentityUnknown",
    "none_hash_fingerprint",
    "read_identity",
    "version_line",
]

RANDOM_NONE_HASH = "random"
"""`none_hash` of an engine whose block hashes are never seen again: refuse to persist."""

_CRYPTO_HASHES = frozenset({"sha256", "sha256_cbor"})
_RANK_MAP = "pp>pcp>tp"


def read_identity(  # noqa: PLR0913 - every one is a fact that only the caller has
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    namespace: str,
    weights: str,
    format_version: int,
    blocks_per_chunk: int,
    tokens_per_hash: int,
    kv_cache_layout: str | None,
    canonical_format: str = "",
    replicated: bool = False,
    draft_weights: str | None = None,
    remote_code: str | None = None,
) -> Identity:
    """The identity of this engine; equal in every process of it and after a restart.

    Args:
        vllm_config: vLLM's configuration, as the connector got it.
        kv_cache_config: the scheduler's or a worker's KV cache config.
        namespace: the operator's name for what may share chunks.
        weights: `[algorithm:]64 hex digits` over the content of the weights.
        format_version: version of the chunk format.
        blocks_per_chunk: blocks of one group in a chunk.
        tokens_per_hash: tokens that one block hash stands for.
        kv_cache_layout: the layout that the engine core resolved.
        canonical_format: vLLM's canonical format id, empty when rows are not canonical.
        replicated: one slice stands for all ranks.
        draft_weights: the same as `weights`, for a draft model with weights of its own.
        remote_code: digest of the model folder's code, when remote code is trusted.

    Raises `IdentityUnknown` when a value cannot be known, `IdentityError` for misuse.
    """
    values: dict[str, object] = {
        "format_version": format_version,
        "namespace": namespace,
        "weights": parse_digest(weights),
        "blocks_per_chunk": blocks_per_chunk,
        "hash_block_size": tokens_per_hash,
        "kv_layout": _layout(vllm_config, kv_cache_config, kv_cache_layout),
        "canonical_format": canonical_format,
        "replicated": replicated,
        "draft": draft_value(vllm_config, draft_weights),
        "remote_code": remote_code_value(vllm_config.model_config, remote_code),
    }
    values |= _engine(vllm_config)
    values |= model_values(vllm_config.model_config)
    values |= _attention(vllm_config)
    values |= _cache(vllm_config)
    values |= _groups(vllm_config, kv_cache_config)
    values |= _parallel(vllm_config.parallel_config)
    return Identity.of(values)


def none_hash_fingerprint(hash_algorithm: str) -> str:
    """32 hex digits over the NONE_HASH of this engine, or `random`.

    The engine core draws the seed only later, but from what is known here: the variable
    PYTHONHASHSEED, else a constant for cryptographic hashes and a random one for others.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        if hash_algorithm not in _CRYPTO_HASHES:
            return RANDOM_NONE_HASH
        seed = DEFAULT_NONE_HASH_SEED
    none_hash: bytes = get_hash_fn_by_name(hash_algorithm)(seed)
    return blake3(none_hash).hexdigest(length=16)


def _engine(vllm_config: Any) -> dict[str, object]:
    runner = "v2" if getattr(vllm_config, "use_v2_model_runner", False) else "v1"
    return {
        "engine": "vllm",
        "engine_version": version_line(vllm.__version__),
        "model_runner": runner,
        "platform": _platform(vllm_config),
    }


def version_line(version: str) -> str:
    """`0.32` for 0.32.1 and its local builds; the whole text for anything before a release."""
    release = version.partition("+")[0]
    parts = release.split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts):
        return version
    return ".".join(parts[:2])


def _platform(vllm_config: Any) -> dict[str, object]:
    found: dict[str, object] = {"machine": machine.machine()}
    found["type"] = "rocm" if current_platform.is_rocm() else current_platform.device_type
    if current_platform.is_cpu():
        # vLLM's CPU attention packs K for the instruction set that it finds: an AMX
        # machine and another one write different bytes of the same size.
        found["features"] = _cpu_features()
    else:
        capability = current_platform.get_device_capability()
        found["capability"] = "" if capability is None else capability.as_version_str()
    if vllm_config.additional_config:
        found["options"] = value_digest(vllm_config.additional_config).hex()[:32]
    return found


def _cpu_features() -> list[str]:
    checks = {"amx": "_is_amx_tile_supported", "avx512": "_is_avx512_supported"}
    return [name for name, probe in checks.items() if getattr(torch.cpu, probe, bool)()]


def _attention(vllm_config: Any) -> dict[str, object]:
    model, attention = vllm_config.model_config, vllm_config.attention_config
    found: dict[str, object] = {
        "backend": enum_name(attention.backend),
        "indexer_dtype": str(attention.indexer_kv_dtype),
        "non_causal": bool(attention.use_non_causal),
    }
    if attention.backend_per_kind:
        found["per_kind"] = {k: enum_name(v) for k, v in attention.backend_per_kind.items()}
    if model.attention_chunk_size:
        found["chunk"] = int(model.attention_chunk_size)
    return {
        "attention": found,
        "sliding_window": int(model.get_sliding_window() or 0),
        "sliding_window_disabled": bool(model.disable_sliding_window),
        "lora": _lora(vllm_config.lora_config),
    }


def _lora(config: Any) -> dict[str, object]:
    if config is None:
        return {}
    return {
        "dtype": dtype_name(config.lora_dtype),
        "targets": sorted(config.target_modules or ()),
        "tower": bool(config.enable_tower_connector_lora),
        "moe": [bool(config.enable_mixed_moe_lora_format), bool(config.enable_moe_shared_loras)],
    }


def _cache(vllm_config: Any) -> dict[str, object]:
    config = vllm_config.cache_config
    kv_dtype = str(config.cache_dtype)
    algorithm = str(config.prefix_caching_hash_algo)
    return {
        "kv_dtype": dtype_name(vllm_config.model_config.dtype) if kv_dtype == "auto" else kv_dtype,
        "kv_quantization": get_kv_quant_mode(kv_dtype).name.lower(),
        "kv_scales": _scales(config),
        "kv_skip_layers": sorted(str(item) for item in config.kv_cache_dtype_skip_layers),
        "hash_algorithm": algorithm,
        "none_hash": none_hash_fingerprint(algorithm),
    }


def _scales(cache_config: Any) -> str:
    if getattr(cache_config, "calculate_kv_scales", False):
        # Scales taken from the first batch differ in every process: the same codes would
        # mean other numbers. 0.32 no longer has the setting; builds that do are refused.
        raise IdentityUnknown("KV scales are calculated at run time")
    mode = get_kv_quant_mode(str(cache_config.cache_dtype))
    if mode == type(mode).NONE:
        return "none"
    if mode == type(mode).FP8_PER_TENSOR or mode.is_nvfp4:
        return "checkpoint"
    return "in the page"


def _layout(vllm_config: Any, kv_cache_config: Any, given: str | None) -> str:
    layout = given or kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout
    if not layout:
        raise IdentityUnknown("the KV cache layout has not been resolved")
    return str(layout)


def _groups(vllm_config: Any, kv_cache_config: Any) -> dict[str, object]:
    parallel = vllm_config.parallel_config
    one_stage = parallel.pipeline_parallel_size == 1
    groups = kv_cache_config.kv_cache_groups
    firsts = [_first_spec(group) for group in groups]
    attention = [spec for spec in firsts if isinstance(spec, AttentionSpec)]
    dcp = parallel.decode_context_parallel_size
    mamba = any(isinstance(spec, MambaSpec) for spec in firsts)
    sizes = [int(spec.block_size) for spec in firsts]
    return {
        "groups": [_group(group, dcp, one_stage) for group in groups],
        "block_size": min(sizes, default=0),
        "block_bytes": _block_bytes(kv_cache_config) if one_stage else 0,
        "head_size_v": int(attention[0].head_size_v) if attention else 0,
        "kv_tp_replicas": int(kv_cache_config.kv_tp_replicas),
        "mamba": _mamba(vllm_config) if mamba else {},
    }


def _first_spec(group: Any) -> Any:
    return next(iter(iter_layer_specs(group.kv_cache_spec)))


def _group(group: Any, dcp: int, one_stage: bool) -> dict[str, object]:
    """One group; what does not apply is left out, because headers are small."""
    spec = _first_spec(group)
    found: dict[str, object] = {
        "kind": str(get_kv_cache_spec_kind(spec).value),
        "tokens": int(resolve_dcp_kv_block_size(spec, dcp)),
        "page_bytes": int(spec.page_size_bytes),
        "rest": _rest(spec),
    }
    if one_stage:
        found["layers"] = compress_names(list(group.layer_names))
    if isinstance(spec, AttentionSpec):
        found["heads"] = int(spec.num_kv_heads)
        found["head"] = [int(spec.head_size), int(spec.head_size_v)]
        found["dtype"] = dtype_name(spec.dtype)
        found["quant"] = spec.kv_quant_mode.name.lower()
    window = getattr(spec, "sliding_window", None)
    if window:
        found["window"] = int(window)
    if group.is_eagle_group and one_stage:
        found["draft"] = True
    if not group.enable_kv_transfer or group.role.value != "default":
        found["role"] = f"{group.role.value}, transfer {group.enable_kv_transfer}"
    return found


_NAMED = frozenset(
    {
        "block_size",
        "num_kv_heads",
        "head_size",
        "head_size_v",
        "dtype",
        "kv_quant_mode",
        "sliding_window",
    }
)


def _rest(spec: Any) -> str:
    """16 hex digits over the class and every field of a spec that has no name of its own."""
    found = {
        field.name: getattr(spec, field.name)
        for field in dataclasses.fields(spec)
        if field.name not in _NAMED
    }
    return value_digest([type(spec).__name__, found]).hex()[:16]


def _block_bytes(kv_cache_config: Any) -> int:
    """Bytes of one block over all layers of a worker, padding included."""
    tensors = [t for t in kv_cache_config.kv_cache_tensors if not t.host_resident]
    if not tensors or kv_cache_config.num_blocks < 1:
        return 0
    return int(tensors[0].size // kv_cache_config.num_blocks)


def _mamba(vllm_config: Any) -> dict[str, object]:
    config, mamba = vllm_config.cache_config, vllm_config.mamba_config
    return {
        "dtype": str(config.mamba_cache_dtype),
        "ssm_dtype": str(config.mamba_ssm_cache_dtype),
        "mode": str(config.mamba_cache_mode),
        "block": int(config.mamba_block_size or 0),
        "backend": enum_name(mamba.backend),
        "replay": int(config.replayssm_buffer_len) if config.use_replayssm else 0,
        "rounding": bool(mamba.enable_stochastic_rounding),
    }


def _parallel(config: Any) -> dict[str, object]:
    return {
        "tp": int(config.tensor_parallel_size),
        "pp": int(config.pipeline_parallel_size),
        "pp_partition": str(envs.VLLM_PP_LAYER_PARTITION or ""),
        "pcp": int(config.prefill_context_parallel_size),
        "dcp": int(config.decode_context_parallel_size),
        "cp_interleave": max(
            int(config.cp_kv_cache_interleave_size), int(config.dcp_kv_cache_interleave_size)
        ),
        "rank_map": _RANK_MAP,
    }

# SPDX-License-Identifier: Apache-2.0
"""The half of the identity that says which model computes the KV bytes."""

from collections.abc import Mapping
from typing import Any

from kvsafe.engine.identity.values import (
    IdentityUnknown,
    dtype_name,
    plain,
    run_lengths,
    value_digest,
)
from kvsafe.seal.identity import parse_digest

_LONG_LIST = 8
_NOISE = frozenset(
    {
        "transformers_version",
        "_name_or_path",
        "_commit_hash",
        "dtype",
        "torch_dtype",
        "id2label",
        "label2id",
    }
)


def model_values(config: Any) -> dict[str, object]:
    """Every field that comes from the model configuration."""
    text = config.hf_text_config
    return {
        "model": config.model_weights or config.model,
        "revision": config.revision or "",
        "model_code": _model_code(config),
        "model_type": str(config.hf_config.model_type),
        "architectures": [str(name) for name in config.architectures],
        "layers": int(config.get_total_num_hidden_layers()),
        "layer_types": run_lengths(getattr(text, "layer_types", None) or ()),
        "kv_heads": int(config.get_total_num_kv_heads()),
        "head_size": int(config.get_head_size()),
        "mla": bool(config.use_mla),
        "rope": _rope(text),
        "max_model_len": int(config.max_model_len),
        "max_position_embeddings": int(getattr(text, "max_position_embeddings", 0) or 0),
        "dtype": dtype_name(config.dtype),
        "quantization": str(config.quantization or ""),
        "quantization_config": value_digest(config.quantization_config),
        "multimodal": _multimodal(config),
        "hf_config": _hf_config(config.hf_config),
    }


def _model_code(config: Any) -> dict[str, object]:
    found: dict[str, object] = {
        "impl": str(config.model_impl),
        "runner": str(config.runner_type),
        "convert": str(config.convert_type),
    }
    for original, target in sorted(config.model_class_overrides.items()):
        found[f"class {original}"] = str(target)
    return found


def remote_code_value(config: Any, digest: str | None) -> str:
    """Digest of trusted remote code, empty when none is trusted."""
    if not config.trust_remote_code:
        return ""
    if not digest:
        raise IdentityUnknown(
            "trust_remote_code is set and the digest of the model's code is not known"
        )
    return parse_digest(digest).hex()


def _rope(text_config: Any) -> object:
    """The rope parameters in effect, per layer type where the model has several."""
    rope = getattr(text_config, "rope_parameters", None)
    if rope is None:
        rope = getattr(text_config, "rope_scaling", None)
    found = dict(rope) if isinstance(rope, Mapping) else {}
    for name in ("rope_theta", "rope_local_base_freq", "partial_rotary_factor"):
        value = getattr(text_config, name, None)
        if value is not None:
            found.setdefault(name, value)
    return _short(plain(found))


def _short(value: Any) -> object:
    """Long lists (LongRoPE factors) as a digest: the document travels in every header."""
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list) and len(value) > _LONG_LIST:
        return f"{len(value)} values, {value_digest(value).hex()[:32]}"
    if isinstance(value, list):
        return [_short(item) for item in value]
    return value


def _hf_config(hf_config: Any) -> bytes:
    return value_digest(_without_noise(plain(hf_config.to_dict())))


def _without_noise(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_noise(v) for k, v in value.items() if k not in _NOISE}
    if isinstance(value, list):
        return [_without_noise(item) for item in value]
    return value


def _multimodal(config: Any) -> dict[str, object]:
    found: dict[str, object] = {}
    mm = config.multimodal_config
    if mm is None:
        return found
    found["language_only"] = bool(mm.language_model_only)
    found["normalize_on_device"] = bool(mm.mm_device_do_normalize)
    for name in ("mm_encoder_attn_backend", "mm_encoder_attn_dtype", "video_pruning_rate"):
        value = getattr(mm, name, None)
        if value is not None:
            found[name] = str(plain(value))
    if mm.video_pruning_rate:
        found["video_pruning_method"] = str(mm.video_pruning_method)
    settings = [mm.mm_processor_kwargs, mm.media_io_kwargs, config.hf_image_processor_config]
    found["processor"] = value_digest(settings).hex()[:32]
    return found


def draft_value(vllm_config: Any, weights: str | None) -> dict[str, object]:
    """The draft model, whose layers may share the cache; empty when nothing is drafted."""
    config = vllm_config.speculative_config
    if config is None:
        return {}
    found: dict[str, object] = {"method": str(config.method)}
    model = config.draft_model_config
    own = model is not None and model.model != vllm_config.model_config.model
    if own:
        if not weights:
            raise IdentityUnknown("the weights digest of the draft model is not known")
        found["model"] = str(model.model)
        found["revision"] = str(model.revision or "")
        found["weights"] = parse_digest(weights)
    if model is not None:
        found["hf_config"] = _hf_config(model.hf_config).hex()[:32]
        found["quantization"] = str(model.quantization or "")
        found["kv_dtype"] = str(config.kv_cache_dtype or "")
    return found

# SPDX-License-Identifier: Apache-2.0
"""Identity read from real vLLM configurations: one setting changed, exactly those fields."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvsafe.engine.identity.running import (
    IdentityUnknown,
    none_hash_fingerprint,
    read_identity,
    version_line,
)
from kvsafe.engine.identity.values import value_digest
from kvsafe.seal.identity import Identity, IdentityError, differences
from kvsafe.seal.suites import Suite

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
}
NAMES = [f"model.layers.{index}.self_attn.attn" for index in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return str(folder)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def spec(cls: type = FullAttentionSpec, **changes: Any) -> Any:
    values = {"block_size": 128, "num_kv_heads": 4, "head_size": 64, "dtype": torch.bfloat16}
    return cls(**{**values, **changes})


def caches(*groups: KVCacheGroupSpec, blocks: int = 10, **changes: Any) -> KVCacheConfig:
    page = max(group.kv_cache_spec.page_size_bytes for group in groups)
    size = 4 * page * blocks
    tensors = [KVCacheTensor(size, NAMES, page * blocks, page)]
    return KVCacheConfig(blocks, tensors, list(groups), kv_cache_layout="LBNHC", **changes)


def plain_caches(**changes: Any) -> KVCacheConfig:
    return caches(KVCacheGroupSpec(NAMES, spec()), **changes)


def config(model: str, **changes: Any) -> Any:
    settings = {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        **changes,
    }
    return EngineArgs(**settings).create_engine_config()


def read(vllm_config: Any, kv: KVCacheConfig | None = None, **changes: Any) -> Identity:
    values = {
        "namespace": "tests",
        "weights": "11" * 32,
        "format_version": 1,
        "blocks_per_chunk": 2,
        "tokens_per_hash": 128,
        "kv_cache_layout": "LBNHC",
        **changes,
    }
    return read_identity(vllm_config, kv or plain_caches(), **values)


def changed(base: Identity, other: Identity) -> set[str]:
    return {item.field for item in differences(base.values, other.values)}


def rope(**values: Any) -> dict[str, Any]:
    return {"hf_overrides": {"rope_parameters": {"rope_theta": 10000.0, **values}}}


YARN = rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=4096)
LINEAR = rope(rope_type="linear", factor=2.0, original_max_position_embeddings=4096)
DYNAMIC = rope(rope_type="dynamic", factor=2.0, original_max_position_embeddings=4096)
YARN4 = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)

SETTINGS: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("rope theta", {}, rope(rope_type="default", rope_theta=5e5), {"rope.rope_theta", "hf_config"}),
    ("rope factor", YARN, YARN4, {"rope.factor", "hf_config"}),
    ("rope type", LINEAR, DYNAMIC, {"rope.rope_type", "hf_config"}),
    ("max_model_len", {}, {"max_model_len": 1024}, {"max_model_len"}),
    (
        "max positions",
        {},
        {"hf_overrides": {"max_position_embeddings": 8192}},
        {"max_position_embeddings", "hf_config"},
    ),
    ("norm", {}, {"hf_overrides": {"rms_norm_eps": 1e-5}}, {"hf_config"}),
    ("revision", {}, {"revision": "abc"}, {"revision"}),
    ("fp8", {}, {"kv_cache_dtype": "fp8"}, {"kv_dtype", "kv_quantization", "kv_scales"}),
    ("dtype", {}, {"dtype": "float32"}, {"dtype", "kv_dtype"}),
    ("skip", {}, {"kv_cache_dtype_skip_layers": ["0"]}, {"kv_skip_layers[0]"}),
    ("hash", {}, {"prefix_caching_hash_algo": "sha256_cbor"}, {"hash_algorithm", "none_hash"}),
    ("tp", {}, {"tensor_parallel_size": 2}, {"tp"}),
    ("model_impl", {}, {"model_impl": "vllm"}, {"model_code.impl"}),
    (
        "lora",
        {},
        {"enable_lora": True},
        {"lora.dtype", "lora.targets", "lora.tower", "lora.moe"},
    ),
    ("additional", {}, {"additional_config": {"a": 1}}, {"platform.options"}),
]


@pytest.mark.parametrize(
    ("before", "after", "fields"), [row[1:] for row in SETTINGS], ids=[row[0] for row in SETTINGS]
)
def test_one_setting_changes_exactly_its_fields(
    model: str, before: dict[str, Any], after: dict[str, Any], fields: set[str]
) -> None:
    base = read(config(model, **before))
    assert changed(base, read(config(model, **after))) == fields
    again = read(config(model, **before))
    assert again.document == base.document
    assert again.digest(Suite.BLAKE3_KEYED) == base.digest(Suite.BLAKE3_KEYED)


ARGUMENTS: list[tuple[dict[str, Any], set[str]]] = [
    ({"namespace": "other"}, {"namespace"}),
    ({"weights": "blake3:" + "22" * 32}, {"weights"}),
    ({"format_version": 2}, {"format_version"}),
    ({"blocks_per_chunk": 4}, {"blocks_per_chunk"}),
    ({"tokens_per_hash": 64}, {"hash_block_size"}),
    ({"kv_cache_layout": "LBHNC"}, {"kv_layout"}),
    ({"canonical_format": "v1-nhd"}, {"canonical_format"}),
    ({"replicated": True}, {"replicated"}),
]


@pytest.mark.parametrize(("arguments", "fields"), ARGUMENTS, ids=lambda value: str(list(value)))
def test_one_argument_changes_exactly_its_field(
    model: str, arguments: dict[str, Any], fields: set[str]
) -> None:
    vllm_config = config(model)
    assert changed(read(vllm_config), read(vllm_config, **arguments)) == fields


GROUPS: list[tuple[str, Callable[[], KVCacheConfig], set[str]]] = [
    (
        "window",
        lambda: caches(KVCacheGroupSpec(NAMES, spec(sliding_window=256))),
        {"groups[0].window"},
    ),
    (
        "kind",
        lambda: caches(KVCacheGroupSpec(NAMES, spec(SlidingWindowSpec, sliding_window=256))),
        {"groups[0].window", "groups[0].kind", "groups[0].rest"},
    ),
    (
        "names",
        lambda: caches(KVCacheGroupSpec(NAMES[:3], spec())),
        {"groups[0].layers[0]"},
    ),
    (
        "order",
        lambda: caches(KVCacheGroupSpec([NAMES[1], NAMES[0], *NAMES[2:]], spec())),
        {"groups[0].layers[0]"},
    ),
    (
        "block size",
        lambda: caches(KVCacheGroupSpec(NAMES, spec(block_size=64))),
        {"groups[0].tokens", "groups[0].page_bytes", "block_bytes", "block_size"},
    ),
    (
        "dtype of the same size",
        lambda: caches(KVCacheGroupSpec(NAMES, spec(dtype=torch.float16))),
        {"groups[0].dtype"},
    ),
    (
        "heads against head size",
        lambda: caches(KVCacheGroupSpec(NAMES, spec(num_kv_heads=8, head_size=32))),
        {"groups[0].heads", "groups[0].head[0]", "groups[0].head[1]", "head_size_v"},
    ),
    (
        "packing",
        lambda: caches(KVCacheGroupSpec(NAMES, spec(num_head_slots=4))),
        {"groups[0].rest"},
    ),
    ("draft layers", lambda: caches(KVCacheGroupSpec(NAMES, spec(), True)), {"groups[0].draft"}),
    ("replicas", lambda: plain_caches(kv_tp_replicas=2), {"kv_tp_replicas"}),
]


@pytest.mark.parametrize(
    ("build", "fields"), [row[1:] for row in GROUPS], ids=[row[0] for row in GROUPS]
)
def test_one_change_of_the_cache_changes_exactly_its_fields(
    model: str, build: Callable[[], KVCacheConfig], fields: set[str]
) -> None:
    vllm_config = config(model)
    assert changed(read(vllm_config), read(vllm_config, build())) == fields


def test_two_groups_are_told_apart_by_index(model: str) -> None:
    def two(window: int) -> KVCacheConfig:
        full = KVCacheGroupSpec(NAMES[::2], spec())
        local = KVCacheGroupSpec(NAMES[1::2], spec(SlidingWindowSpec, sliding_window=window))
        return caches(full, local)

    vllm_config = config(model)
    assert changed(read(vllm_config, two(256)), read(vllm_config, two(128))) == {"groups[1].window"}


def test_memory_sizes_and_engine_ids_do_not_matter(model: str) -> None:
    base = read(config(model), plain_caches(blocks=10))
    other = config(model, seed=5, gpu_memory_utilization=0.5, max_num_seqs=3)
    other.instance_id = "another"
    other.parallel_config.rank = 1
    assert read(other, plain_caches(blocks=999)).document == base.document


def test_scheduler_and_worker_read_the_same(model: str) -> None:
    """The scheduler's config flattens a group of unlike layers, the worker's does not."""
    unlike = {name: spec(head_size=64 if at else 32) for at, name in enumerate(NAMES)}
    wrapper = UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs=unlike)
    worker = caches(KVCacheGroupSpec(NAMES, wrapper))
    scheduler = generate_scheduler_kv_cache_config([copy.deepcopy(worker)])
    assert not isinstance(scheduler.kv_cache_groups[0].kv_cache_spec, UniformTypeKVCacheSpecs)
    vllm_config, core_config = config(model), config(model)
    core_config.cache_config.block_size = 64  # the engine core rewrites its own copy only
    assert read(vllm_config, worker).document == read(core_config, scheduler).document


def test_pipeline_stages_read_the_same(model: str) -> None:
    vllm_config = config(model, pipeline_parallel_size=2)
    stages = [caches(KVCacheGroupSpec(NAMES[:3], spec())), caches(KVCacheGroupSpec([], spec()))]
    assert read(vllm_config, stages[0]).document == read(vllm_config, stages[1]).document
    assert changed(read(config(model)), read(vllm_config, stages[0])) == {
        "pp",
        "block_bytes",
        "groups[0].layers",
    }


def test_pipeline_partition_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_config = config(model)
    base = read(vllm_config)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    assert changed(base, read(vllm_config)) == {"pp_partition"}


def test_sliding_window_of_the_model(tmp_path: Path) -> None:
    mistral = {**MODEL, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps({**mistral, "sliding_window": 1024}))
    base = read(config(str(tmp_path)))
    assert base.values["sliding_window"] == 1024
    off = read(config(str(tmp_path), disable_sliding_window=True, max_model_len=1024))
    on = read(config(str(tmp_path), max_model_len=1024))
    assert changed(on, off) == {"sliding_window", "sliding_window_disabled", "hf_config"}


def test_layer_pattern_and_longrope_stay_short(tmp_path: Path) -> None:
    factors = {
        "rope_type": "longrope",
        "short_factor": [1.0 + index / 7 for index in range(32)],
        "long_factor": [2.0 + index / 7 for index in range(32)],
        "original_max_position_embeddings": 2048,
        "rope_theta": 10000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "rope_parameters": factors}))
    base = read(config(str(tmp_path)))
    found = base.values["rope"]
    assert isinstance(found, Mapping) and str(found["long_factor"]).startswith("32 values, ")
    assert base.values["layer_types"] == "4*full_attention"
    factors["long_factor"][31] += 0.5  # type: ignore[index]
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "rope_parameters": factors}))
    assert changed(base, read(config(str(tmp_path)))) == {"rope.long_factor", "hf_config"}


def test_seed_of_the_block_hashes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = read(config(model))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    seeded = read(config(model))
    assert changed(base, seeded) == {"none_hash"}
    assert read(config(model)).document == seeded.document
    monkeypatch.delenv("PYTHONHASHSEED")
    assert read(config(model)).document == base.document


def test_random_seed_is_said(model: str) -> None:
    assert none_hash_fingerprint("xxhash") == "random"
    base, other = config(model), config(model, prefix_caching_hash_algo="xxhash")
    assert changed(read(base), read(other)) == {"hash_algorithm", "none_hash"}
    assert read(other).values["none_hash"] == "random"


def test_fingerprint_is_of_the_engine_core_s_none_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    from blake3 import blake3
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setenv("PYTHONHASHSEED", "7")
    kv_cache_utils.init_none_hash(sha256)
    fingerprint = blake3(kv_cache_utils.NONE_HASH).hexdigest(length=16)
    assert none_hash_fingerprint("sha256") == fingerprint


def test_what_cannot_be_known_is_refused(model: str) -> None:
    trusting = config(model, trust_remote_code=True)
    with pytest.raises(IdentityUnknown, match="trust_remote_code"):
        read(trusting)
    known = read(trusting, remote_code="33" * 32)
    assert changed(read(config(model)), known) == {"remote_code"}
    with pytest.raises(IdentityError, match="64 hex digits"):
        read(config(model), weights="unknown")
    unresolved = plain_caches()
    unresolved.kv_cache_layout = None
    with pytest.raises(IdentityUnknown, match="layout"):
        read(config(model), unresolved, kv_cache_layout=None)


def test_draft_model_needs_its_weights(model: str) -> None:
    vllm_config = config(model, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert changed(read(config(model)), read(vllm_config)) >= {"draft.method"}

    draft = copy.copy(vllm_config.model_config)
    draft.model = "some/draft"
    vllm_config.speculative_config.draft_model_config = draft
    with pytest.raises(IdentityUnknown, match="draft"):
        read(vllm_config)
    left = read(vllm_config, draft_weights="44" * 32)
    right = read(vllm_config, draft_weights="55" * 32)
    assert changed(left, right) == {"draft.weights"}


def test_values_that_cannot_be_read_are_refused() -> None:
    class Opaque:
        __slots__ = ("hidden",)

    class Open:
        def __init__(self, value: int) -> None:
            self.value = value

        def __call__(self) -> None: ...

    with pytest.raises(IdentityUnknown, match="Opaque"):
        value_digest({"a": Opaque()})
    assert value_digest([Open(1)]) == value_digest([Open(1)])
    assert value_digest([Open(1)]) != value_digest([Open(2)])
    assert value_digest({"b": 1, "a": {2, 3}}) == value_digest({"a": {3, 2}, "b": 1})


def test_release_line() -> None:
    assert version_line("0.32.0") == version_line("0.32.1+cpu") == "0.32"
    assert version_line("0.33.0") == "0.33"
    assert version_line("0.33.0rc1") == "0.33.0rc1"
    assert version_line("0.33.1.dev2+gabc") == "0.33.1.dev2+gabc"


def test_eighty_layers_fit_a_header_page(tmp_path: Path) -> None:
    large = {**MODEL, "num_hidden_layers": 80}
    (tmp_path / "config.json").write_text(json.dumps(large))
    names = [f"model.layers.{index}.self_attn.attn" for index in range(80)]
    one = read(config(str(tmp_path)), caches(KVCacheGroupSpec(names, spec())))
    assert len(one.document) < 2048
    groups = [
        KVCacheGroupSpec(names[at::6], spec(SlidingWindowSpec, sliding_window=1024))
        for at in range(6)
    ]
    assert len(read(config(str(tmp_path)), caches(*groups)).document) < 3072

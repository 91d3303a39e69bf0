# SPDX-License-Identifier: Apache-2.0
"""What the operator may set, and which engines we accept: one table each, checked once at start.

`parse_config` turns `kv_connector_extra_config` into a `KVSafeConfig` or refuses with every problem
at once. `check_engine` compares what the engine reports with what was proven; each complaint names
the override that lets it through. Nothing here imports vllm: keys that vLLM's own classes read keep
the meaning they have there (vLLM 0.32: `v1/kv_offload/{base,cpu/spec,tiering/spec}.py`,
`kv_connector/v1/offloading/config.py`). Values of secrets and of unknown keys are never shown.
"""

from kvsafe.engine.config.facts import (
    ENGINE_RULES,
    PROVEN_EXECUTORS,
    PROVEN_GROUP_KINDS,
    PROVEN_GROUP_MIXES,
    PROVEN_HASH_ALGOS,
    PROVEN_KV_DTYPES,
    PROVEN_KV_LAYOUTS,
    PROVEN_KV_QUANT_MODES,
    PROVEN_MODEL_DTYPES,
    PROVEN_PLATFORMS,
    PROVEN_VLLM_VERSIONS,
    Complaint,
    EngineFacts,
    EngineRule,
    check_engine,
    refuse_unsafe,
)
from kvsafe.engine.config.options import (
    OPTIONS,
    OVERRIDES,
    SPEC_MODULE_PATH,
    SPEC_NAME,
    KVSafeConfig,
    small_thread_count,
)
from kvsafe.engine.config.page import options_markdown
from kvsafe.engine.config.parse import parse_config, to_vllm_extra
from kvsafe.engine.config.problems import ConfigError, Problem
from kvsafe.engine.config.table import Option
from kvsafe.engine.config.tiers import (
    BACKPRESSURE,
    FS_TIER,
    PROVEN_TIER_TYPES,
    UNPROVEN_TIER_TYPES,
    TierConfig,
)
from kvsafe.engine.config.values import (
    MAX_DEADLINE_S,
    MAX_SIZE,
    MAX_THREADS,
    Check,
    parse_size,
)

__all__ = [
    "BACKPRESSURE",
    "ENGINE_RULES",
    "FS_TIER",
    "MAX_DEADLINE_S",
    "MAX_SIZE",
    "MAX_THREADS",
    "OPTIONS",
    "OVERRIDES",
    "PROVEN_EXECUTORS",
    "PROVEN_GROUP_KINDS",
    "PROVEN_GROUP_MIXES",
    "PROVEN_HASH_ALGOS",
    "PROVEN_KV_DTYPES",
    "PROVEN_KV_LAYOUTS",
    "PROVEN_KV_QUANT_MODES",
    "PROVEN_MODEL_DTYPES",
    "PROVEN_PLATFORMS",
    "PROVEN_TIER_TYPES",
    "PROVEN_VLLM_VERSIONS",
    "SPEC_MODULE_PATH",
    "SPEC_NAME",
    "UNPROVEN_TIER_TYPES",
    "Check",
    "Complaint",
    "ConfigError",
    "EngineFacts",
    "EngineRule",
    "KVSafeConfig",
    "Option",
    "Problem",
    "TierConfig",
    "check_engine",
    "options_markdown",
    "parse_config",
    "parse_size",
    "refuse_unsafe",
    "small_thread_count",
    "to_vllm_extra",
]

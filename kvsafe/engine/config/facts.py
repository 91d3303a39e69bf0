# SPDX-License-Identifier: Apache-2.0
"""Which engines we accept: what it reports about itself, against what was proven.

Each complaint names the override that lets it through.
"""

from collections.abc import Callable
from typing import Final, Literal

import msgspec

from kvsafe.engine.config.options import KVSafeConfig
from kvsafe.engine.config.problems import ConfigError, Problem

PROVEN_VLLM_VERSIONS: Final = ("0.32.0",)
PROVEN_KV_DTYPES: Final = ("auto", "bfloat16", "float16", "float32")
PROVEN_MODEL_DTYPES: Final = ("bfloat16", "float16", "float32")
PROVEN_KV_QUANT_MODES: Final = ("NONE",)
PROVEN_KV_LAYOUTS: Final[tuple[str | None, ...]] = (None, "LBHNC", "LBNHC")
PROVEN_GROUP_KINDS: Final = ("full_attention", "sliding_window", "mla")
PROVEN_GROUP_MIXES: Final[tuple[frozenset[str], ...]] = (
    frozenset({"full_attention", "sliding_window"}),
)
"""Different group kinds proven together in one model; a single proven kind needs no entry."""
PROVEN_HASH_ALGOS: Final = ("sha256", "sha256_cbor")
PROVEN_EXECUTORS: Final = (None, "uni", "mp")
PROVEN_PLATFORMS: Final = ("cpu", "cuda")


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the effective configuration of the engine says, as plain values.

    Per-group tuples are in group order. `group_kinds` uses the words of `PROVEN_GROUP_KINDS`
    ("mamba" and others for what is not there); `kv_quant_modes` the member names of vLLM's
    `KVQuantMode`.
    """

    vllm_version: str
    nnodes: int
    world_size: int
    executor_backend: str | None
    kv_cache_dtype: str
    model_dtype: str
    kv_quant_modes: tuple[str, ...]
    kv_cache_layout: str | None
    group_kinds: tuple[str, ...]
    hash_algo: str
    none_hash_random: bool
    platform: str
    prefix_caching: bool
    spec_decode: bool


class Complaint(msgspec.Struct, frozen=True):
    """Something about the engine that is not proven.

    `override` names the option that lets it through. Level `warn` never stops the start.
    """

    key: str
    problem: str
    way_out: str
    override: str | None
    level: Literal["refuse", "warn"] = "refuse"


class EngineRule(msgspec.Struct, frozen=True):
    """One rule about the engine: `problem` says what is not proven about the facts, or None."""

    key: str
    problem: Callable[[EngineFacts], str | None]
    way_out: str
    override: str | None
    level: Literal["refuse", "warn"] = "refuse"


def _bad_version(facts: EngineFacts) -> str | None:
    # A local part (+cpu, +cu129) names a build of the same release.
    release = facts.vllm_version.split("+", 1)[0]
    tested = ", ".join(PROVEN_VLLM_VERSIONS)
    return None if release in PROVEN_VLLM_VERSIONS else f"vLLM {release}; tested: {tested}"


def _bad_nodes(facts: EngineFacts) -> str | None:
    if facts.nnodes > 1:
        return f"{facts.nnodes} nodes under one scheduler: rows live in one machine's memory"
    if facts.world_size > 1 and facts.executor_backend not in PROVEN_EXECUTORS:
        return f"executor {facts.executor_backend} may place workers on other machines"
    return None


def _bad_dtype(facts: EngineFacts) -> str | None:
    if facts.kv_cache_dtype.removeprefix("torch.") not in PROVEN_KV_DTYPES:
        return f"KV dtype {facts.kv_cache_dtype}; proven: {', '.join(PROVEN_KV_DTYPES)}"
    model_dtype = facts.model_dtype.removeprefix("torch.")
    if facts.kv_cache_dtype == "auto" and model_dtype not in PROVEN_MODEL_DTYPES:
        return f"KV dtype auto means {model_dtype}; proven: {', '.join(PROVEN_MODEL_DTYPES)}"
    return None


def _bad_quant(facts: EngineFacts) -> str | None:
    bad = sorted(set(facts.kv_quant_modes) - set(PROVEN_KV_QUANT_MODES))
    return f"KV quantisation {', '.join(bad)}: scales are not proven" if bad else None


def _bad_layout(facts: EngineFacts) -> str | None:
    if facts.kv_cache_layout in PROVEN_KV_LAYOUTS:
        return None
    proven = ", ".join(str(layout) for layout in PROVEN_KV_LAYOUTS)
    return f"KV layout {facts.kv_cache_layout}; proven: {proven}"


def _bad_groups(facts: EngineFacts) -> str | None:
    kinds = frozenset(facts.group_kinds)
    if not kinds:
        return "no KV-cache group is known"
    if bad := sorted(kinds - set(PROVEN_GROUP_KINDS)):
        return f"KV-cache groups of kind {', '.join(bad)}"
    if "mla" in kinds and not facts.prefix_caching:
        # vLLM switches prefix caching off where its MLA attention does not look at what was
        # there before the request (CPU): a loaded prefix would be ignored, and tokens wrong.
        return "MLA without prefix caching: this engine may ignore a loaded prefix"
    if len(kinds) > 1 and kinds not in PROVEN_GROUP_MIXES:
        return f"groups of several kinds in one model: {', '.join(sorted(kinds))}"
    return None


def _bad_hash(facts: EngineFacts) -> str | None:
    if facts.hash_algo in PROVEN_HASH_ALGOS:
        return None
    return f"block hash {facts.hash_algo}: other tokens can be made to have the same hash"


def _random_seed(facts: EngineFacts) -> str | None:
    return "the hash of the empty prefix is random per process" if facts.none_hash_random else None


def _no_prefix_caching(facts: EngineFacts) -> str | None:
    return None if facts.prefix_caching else "prefix caching is off: every hit comes from the rows"


def _spec_decode(facts: EngineFacts) -> str | None:
    return "speculative decoding is on: its KV blocks are not proven" if facts.spec_decode else None


def _bad_platform(facts: EngineFacts) -> str | None:
    return None if facts.platform in PROVEN_PLATFORMS else f"platform {facts.platform} is untested"


ENGINE_RULES: Final[tuple[EngineRule, ...]] = (
    EngineRule("vllm_version", _bad_version, "install a tested version", "allow_untested_vllm"),
    EngineRule("nnodes", _bad_nodes, "use one node with the mp executor", "allow_multi_node"),
    EngineRule(
        "kv_cache_dtype", _bad_dtype, "set --kv-cache-dtype auto", "allow_unproven_kv_dtype"
    ),
    EngineRule(
        "kv_quant_modes", _bad_quant, "set --kv-cache-dtype auto", "allow_unproven_kv_dtype"
    ),
    EngineRule(
        "kv_cache_layout", _bad_layout, "choose a proven layout", "allow_unproven_kv_layout"
    ),
    EngineRule(
        "group_kinds", _bad_groups, "run this model without offload", "allow_unproven_groups"
    ),
    EngineRule(
        "hash_algo", _bad_hash, "set --prefix-caching-hash-algo sha256", "allow_weak_block_hash"
    ),
    EngineRule(
        "none_hash_random",
        _random_seed,
        "use sha256, or set PYTHONHASHSEED to one value everywhere",
        "allow_weak_block_hash",
    ),
    EngineRule("spec_decode", _spec_decode, "switch it off", "allow_unproven_spec_decode"),
    EngineRule("prefix_caching", _no_prefix_caching, "switch it on", None, "warn"),
    EngineRule("platform", _bad_platform, "run the conformance suite on it", None, "warn"),
)


def check_engine(facts: EngineFacts, config: KVSafeConfig) -> tuple[Complaint, ...]:
    """Return what is not proven about this engine and not let through by an override."""
    return tuple(
        complaint for complaint in _complaints(facts) if not _let_through(complaint, config)
    )


def refuse_unsafe(facts: EngineFacts, config: KVSafeConfig) -> tuple[Complaint, ...]:
    """Raise `ConfigError` for every complaint that stops the start; return the others.

    The returned ones (warnings, and what an override lets through) are for the log.
    """
    fatal = [c for c in check_engine(facts, config) if c.level == "refuse"]
    if fatal:
        raise ConfigError("kvsafe refuses this engine:", map(_as_problem, fatal))
    return _complaints(facts)


def _complaints(facts: EngineFacts) -> tuple[Complaint, ...]:
    found = ((rule, rule.problem(facts)) for rule in ENGINE_RULES)
    return tuple(
        Complaint(rule.key, problem, rule.way_out, rule.override, rule.level)
        for rule, problem in found
        if problem is not None
    )


def _let_through(complaint: Complaint, config: KVSafeConfig) -> bool:
    return complaint.override in config.active_overrides


def _as_problem(complaint: Complaint) -> Problem:
    hint = f"or set {complaint.override} to true" if complaint.override else ""
    return Problem(complaint.key, complaint.problem, complaint.way_out, hint)

# SPDX-License-Identifier: Apache-2.0
"""From vLLM's effective configuration to the parts of one process: built once, at start."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    canonical_format_id,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
    get_offloading_group_ids,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_quant_mode,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvsafe.device import ExpectedGroup, GeometryExpectation
from kvsafe.engine.config import (
    EngineFacts,
    KVSafeConfig,
    parse_config,
    refuse_unsafe,
    to_vllm_extra,
)
from kvsafe.engine.identity.adapters import AdapterLedger
from kvsafe.engine.identity.registry import foreign_names, remember_identity
from kvsafe.engine.identity.running import (
    RANDOM_NONE_HASH,
    none_hash_fingerprint,
    read_identity,
)
from kvsafe.engine.identity.weights import (
    code_digest,
    newest_change_ns,
    resolve_model_folder,
    weights_digest,
)
from kvsafe.engine.journal import logger
from kvsafe.engine.spec import Assembly, KVSafeSpec
from kvsafe.engine.station import Launch, Station
from kvsafe.seal.epoch import EpochFile
from kvsafe.seal.identity import Identity
from kvsafe.seal.keyfile import from_environment, load_or_create
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.layout import FORMAT_VERSION
from kvsafe.seal.suites import Suite

UNKNOWN_WEIGHTS = "unknown:" + "0" * 64


# Formats that load what lies in the model's folder; for any other the weights are unknown.
_FILE_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "gguf", "mistral"}
    | {"bitsandbytes"}
)


class AssemblyError(RuntimeError):
    """Something that must be known before the first chunk is not; the text names the way out."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a connector of this process is made of."""

    config: KVSafeConfig
    offloading: OffloadingConfig
    spec: KVSafeSpec
    adapters: AdapterLedger


def assemble(vllm_config: Any, kv_cache_config: Any, *, scheduler: bool) -> Parts:
    """Read, check and build everything for the scheduler's or a worker's process.

    Raises `ConfigError`, `AssemblyError`, `KeyFileError`, `EpochError` or `IdentityError`:
    a start that cannot be proven safe does not happen.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    config = parse_config(extra, environ=os.environ)
    offloading = build_offloading_config(vllm_config, kv_cache_config)
    facts = engine_facts(vllm_config, kv_cache_config, offloading)
    for complaint in refuse_unsafe(facts, config):
        logger.warning("kvsafe: %s: %s", complaint.key, complaint.problem)
    identity = _identity(vllm_config, kv_cache_config, offloading, config)
    keyring = load_keyring(config, os.environ)
    station = Station(
        config,
        identity,
        keyring,
        epoch_file(config, keyring),
        Launch(_token(vllm_config), offloading.parallel.world_size, _rank(offloading, scheduler)),
    )
    assembly = Assembly(
        station=station,
        expectation=_expectation(kv_cache_config, offloading),
        foreign=_foreign(config, identity, station) if scheduler else (),
        fail_loads=vllm_config.kv_transfer_config.kv_load_failure_policy == "fail",
        layers=vllm_config.compilation_config.static_forward_context,
    )
    spec = KVSafeSpec(replace(offloading, extra_config=to_vllm_extra(config)), assembly)
    adapters = AdapterLedger(Path(config.state_dir) / "adapters.json")
    return Parts(config, offloading, spec, adapters)


def load_keyring(config: KVSafeConfig, environ: Mapping[str, str]) -> Keyring:
    """The keys that the operator configured; a key file is made on first use."""
    suite = Suite.named(config.suite)
    if suite is Suite.BLAKE3:
        return Keyring.unkeyed()
    if config.key_env is not None:
        return from_environment(environ, config.key_env, suite=suite.label)
    if config.key_file is None:
        raise AssemblyError("no key: set key_file or key_env")
    return load_or_create(Path(config.key_file), suite=suite.label)


def epoch_file(config: KVSafeConfig, keyring: Keyring) -> EpochFile:
    """The epoch of this namespace, or the one that the operator has several engines share."""
    suite = Suite.named(config.suite)
    secret = keyring.state_secret
    path = Path(config.state_dir) / f"epoch-{config.namespace}.json"
    if config.epoch_file is not None:
        path = Path(config.epoch_file)
    return EpochFile(path, lambda message: suite.tag(secret, message), first=int(time.time()))


def engine_facts(
    vllm_config: Any, kv_cache_config: Any, offloading: OffloadingConfig
) -> EngineFacts:
    """The facts that decide whether this engine is one that kvsafe is proven on."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    groups = [kv_cache_config.kv_cache_groups[index] for index in _group_ids(kv_cache_config)]
    algorithm = cache.prefix_caching_hash_algo
    return EngineFacts(
        vllm_version=vllm.__version__,
        nnodes=int(getattr(parallel, "nnodes", 1)),
        world_size=int(parallel.world_size),
        executor_backend=_executor_name(parallel.distributed_executor_backend),
        kv_cache_dtype=str(cache.cache_dtype),
        model_dtype=str(vllm_config.model_config.dtype),
        kv_quant_modes=tuple(get_kv_quant_mode(str(cache.cache_dtype)).name for _ in groups),
        kv_cache_layout=offloading.kv_cache_layout,
        group_kinds=tuple(_group_kind(group) for group in groups),
        hash_algo=str(algorithm),
        none_hash_random=none_hash_fingerprint(str(algorithm)) == RANDOM_NONE_HASH,
        platform="cuda" if current_platform.is_cuda_alike() else current_platform.device_type,
        prefix_caching=bool(cache.enable_prefix_caching),
        spec_decode=vllm_config.speculative_config is not None,
    )


def _group_ids(kv_cache_config: Any) -> tuple[int, ...]:
    ids: tuple[int, ...] = get_offloading_group_ids(kv_cache_config)
    return ids


def _executor_name(backend: object) -> str | None:
    return backend if backend is None or isinstance(backend, str) else type(backend).__name__


def _group_kind(group: Any) -> str:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    kind = get_kv_cache_spec_kind(spec)
    name = str(getattr(kind, "value", kind))
    return "mla" if name.startswith("mla") else name


def _rank(offloading: OffloadingConfig, scheduler: bool) -> int | None:
    return None if scheduler else int(offloading.parallel.rank)


def _token(vllm_config: Any) -> str:
    """The same in all processes of one start of one engine, and nowhere else."""
    transfer = vllm_config.kv_transfer_config
    return f"{transfer.engine_id} {vllm_config.instance_id}"


def _identity(
    vllm_config: Any, kv_cache_config: Any, offloading: OffloadingConfig, config: KVSafeConfig
) -> Identity:
    model = vllm_config.model_config
    folder = _folder_of(model, vllm_config)
    layout = offloading.kv_cache_layout
    canonical = ""
    if offloading.canonical_layout and layout is not None:
        canonical = str(canonical_format_id(layout))
    return read_identity(
        vllm_config,
        kv_cache_config,
        namespace=config.namespace,
        weights=_weights(vllm_config, config, folder),
        format_version=FORMAT_VERSION,
        blocks_per_chunk=offloading.cache.blocks_per_chunk,
        tokens_per_hash=offloading.cache.tokens_per_hash,
        kv_cache_layout=layout,
        canonical_format=canonical,
        replicated=offloading.replicated_layout,
        remote_code=_remote_code(model, folder, config),
        draft_weights=_draft_weights(vllm_config, config),
    )


def _folder_of(model: Any, vllm_config: Any) -> Path | None:
    download = vllm_config.load_config.download_dir
    return resolve_model_folder(
        model.model, model.revision, download_dir=Path(download) if download else None
    )


def _draft_weights(vllm_config: Any, config: KVSafeConfig) -> str | None:
    """Digest of a draft model's own weights, None where there is no such model."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft.model == vllm_config.model_config.model:
        return None
    folder = _folder_of(draft, vllm_config)
    if folder is None:
        return None
    return weights_digest(folder, cache=_weights_cache(config), threads=config.verify_threads)


def _weights_cache(config: KVSafeConfig) -> Path:
    return Path(config.state_dir) / "weights.json"


def _weights(vllm_config: Any, config: KVSafeConfig, folder: Path | None) -> str:
    if config.weights_digest != "auto":
        return config.weights_digest
    digest = None
    load_format = str(vllm_config.load_config.load_format)
    if folder is not None and load_format in _FILE_FORMATS:
        digest = weights_digest(
            folder,
            cache=_weights_cache(config),
            threads=config.verify_threads,
            progress=_ProgressLog(),
            load_format=load_format,
        )
        _check_unchanged(vllm_config, folder, load_format)
    if digest is not None:
        return digest
    if config.allow_unknown_weights:
        return UNKNOWN_WEIGHTS
    raise AssemblyError(
        f"the weights of {vllm_config.model_config.model} cannot be read from local files, so "
        "chunks of other weights could not be told apart: set weights_digest to a value that "
        "changes with the weights, or set allow_unknown_weights"
    )


def _check_unchanged(vllm_config: Any, folder: Path, load_format: str) -> None:
    """Refuse when files changed after this engine was configured, and so perhaps after its load.

    What was read here must be what the engine has loaded. A snapshot in the Hugging Face cache
    is left out: its files are named by their content, and may be downloaded during the start.
    """
    if "snapshots" in folder.parts or not vllm_config.instance_id.isdigit():
        return
    if newest_change_ns(folder, load_format) >= int(vllm_config.instance_id):
        raise AssemblyError(
            f"weight files in {folder} changed after this engine was configured, so it may have "
            "loaded other weights than those that are there now: start it again"
        )


def _remote_code(model: Any, folder: Path | None, config: KVSafeConfig) -> str | None:
    if not model.trust_remote_code or folder is None:
        return None
    return code_digest(folder, cache=Path(config.state_dir) / "code.json")


class _ProgressLog:
    """Reading weights can take minutes: one line at the end of every tenth part."""

    def __init__(self) -> None:
        self._told = 0

    def __call__(self, done: int, total: int, name: str) -> None:
        """`done` of `total` bytes are read, lately of the file `name`."""
        tenth = 10 * done // max(total, 1)
        if tenth > self._told:
            self._told = tenth
            logger.info("kvsafe: reading weights, %d of %d MiB", done >> 20, total >> 20)


def _foreign(config: KVSafeConfig, identity: Identity, station: Station) -> tuple[Any, ...]:
    folder = Path(config.state_dir) / "identities"
    others = foreign_names(folder, identity, station.suite, station.keyring)
    remember_identity(folder, identity, station.suite)
    for other in others:
        logger.info(
            "kvsafe: chunks of another identity are refused; differs in %s: here %s, there %s",
            other.refusal.field,
            other.refusal.expected,
            other.refusal.found,
        )
    return others if config.explain_misses else ()


def _expectation(kv_cache_config: Any, offloading: OffloadingConfig) -> GeometryExpectation:
    """What the registered tensors must be, said from the configuration alone."""
    per_chunk = offloading.cache.blocks_per_chunk
    groups = tuple(
        ExpectedGroup(
            tuple(kv_cache_config.kv_cache_groups[index].layer_names),
            _page_bytes(kv_cache_config.kv_cache_groups[index]),
        )
        for index in _group_ids(kv_cache_config)
    )
    return GeometryExpectation(
        device_type=str(current_platform.device_type),
        blocks_per_chunk=per_chunk,
        slice_bytes=offloading.worker_kv_bytes_per_block * per_chunk,
        groups=groups,
    )


def _page_bytes(group: Any) -> tuple[int, ...]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return tuple(_unpadded(spec.kv_cache_specs[name]) for name in group.layer_names)
    return (_unpadded(spec),) * len(group.layer_names)


def _unpadded(spec: Any) -> int:
    if isinstance(spec, AttentionSpec):
        return int(spec.unpadded_page_size_bytes)
    if isinstance(spec, MambaSpec):
        return int(replace(spec, page_size_padded=None).page_size_bytes)
    return int(spec.page_size_bytes)

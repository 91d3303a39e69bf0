# SPDX-License-Identifier: Apache-2.0
"""Every option that the operator may set: one Struct whose annotations check and document it."""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Final, get_args, get_type_hints

import msgspec

from kvsafe.engine.config.problems import refuse
from kvsafe.engine.config.table import Option
from kvsafe.engine.config.tiers import TierConfig, check_backpressure, check_module, check_tiers
from kvsafe.engine.config.values import (
    MAX_DEADLINE_S,
    MAX_THREADS,
    check_bool,
    check_key_file,
    check_path,
    check_size,
    int_between,
    matching,
    number_between,
    one_of,
)
from kvsafe.seal.keyring import DEFAULT_SUITE, SuiteName

SPEC_NAME: Final = "KVSafeSpec"
SPEC_MODULE_PATH: Final = "kvsafe.engine.spec"


def _check_policy(value: object) -> str:
    allowed = "lru, arc, or a class name together with cache_policy_module_path"
    return str(matching(r"[A-Za-z_][A-Za-z0-9_]{0,127}", allowed)(value))


def _check_canonical_layout(value: object) -> bool:
    if check_bool(value):
        raise refuse(value, "false", "chunks portable between topologies are not proven yet")
    return False


def _check_epoch_file(value: object) -> str:
    path = check_path(value)
    # Its name keeps it, and the files beside it, apart from everything else that kvsafe writes.
    if not re.fullmatch(r"epoch-[A-Za-z0-9._-]{1,64}\.json", path.rpartition("/")[2]):
        raise refuse(value, "an absolute path that ends in epoch-NAME.json")
    return path


def _check_store_threshold(value: object) -> int:
    if type(value) is not int or not 0 <= value <= 1:
        hint = "the tiering manager cannot count offers; 0 and 1 both mean: store at once"
        raise refuse(value, "0 or 1", hint)
    return value


def small_thread_count() -> int:
    """Default number of threads: half the CPUs this process may use, from 1 to 4."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


_POSITIVE: Final = int_between(1, 1 << 31)
_OURS_ONLY: Final = "only this value: another spec class would not check anything"


def _override(doc: str) -> Option:
    return Option("boolean", doc, check_bool, "override")


class KVSafeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the operator set, checked and completed. Sizes in bytes, deadlines in seconds."""

    cpu_bytes_to_use: Annotated[
        int,
        Option(
            "size", "Host memory for rows, headers included.", check_size, "vllm", required=True
        ),
    ]
    block_size: Annotated[
        int | None,
        Option("integer", "Tokens per chunk; not with `blocks_per_chunk`.", _POSITIVE, "vllm"),
    ] = None
    blocks_per_chunk: Annotated[
        int | None,
        Option("integer", "Blocks per chunk; not with `block_size`.", _POSITIVE, "vllm"),
    ] = None
    eviction_policy: Annotated[
        str,
        Option(
            "text",
            "`lru`, `arc`, or a class in `cache_policy_module_path`.",
            _check_policy,
            "vllm",
        ),
    ] = "lru"
    cache_policy_module_path: Annotated[
        str | None,
        Option("text", "Module of an eviction policy that is not built in.", check_module, "vllm"),
    ] = None
    secondary_tiers: Annotated[
        tuple[TierConfig, ...],
        Option("list of objects", "What lies behind the rows (below).", check_tiers, "vllm"),
    ] = ()
    backpressure: Annotated[
        dict[str, object] | None,
        Option(
            "object",
            "When a slow tier drops stores; the default of every tier (below).",
            check_backpressure,
            "vllm",
        ),
    ] = None
    offload_prompt_only: Annotated[
        bool, Option("boolean", "Store prompt blocks only, not decoded ones.", check_bool, "vllm")
    ] = True
    self_describing_kv_events: Annotated[
        bool, Option("boolean", "KV events carry tokens and parents.", check_bool, "vllm")
    ] = False
    canonical_layout: Annotated[
        bool,
        Option(
            "boolean", "Only false: portable chunks are unproven.", _check_canonical_layout, "vllm"
        ),
    ] = False
    store_threshold: Annotated[
        int,
        Option("integer", "Only 0 or 1, both mean: store at once.", _check_store_threshold, "vllm"),
    ] = 0
    spec_name: Annotated[str, Option("text", _OURS_ONLY, one_of(SPEC_NAME), "vllm")] = SPEC_NAME
    spec_module_path: Annotated[
        str, Option("text", _OURS_ONLY, one_of(SPEC_MODULE_PATH), "vllm")
    ] = SPEC_MODULE_PATH

    suite: Annotated[
        SuiteName,
        Option(
            "text",
            "How tags are made. `aes256-gmac` is the fastest where the processor has AES; it and "
            "`hmac-sha256` use NIST algorithms only; `blake3-keyed` is for other processors; "
            "`blake3` has no key: it finds accidents, not attackers.",
            one_of(*get_args(SuiteName)),
        ),
    ] = DEFAULT_SUITE
    key_file: Annotated[
        str | None,
        Option(
            "path",
            "Key file (0600, outside every store, none of kvsafe's other files in `state_dir`), "
            "made on first use. Not with `key_env`.",
            check_key_file,
            default="`keys.json` in `state_dir`",
        ),
    ] = None
    key_env: Annotated[
        str | None,
        Option(
            "text",
            "Name of the environment variable that holds the key: 32 bytes as base64 or hex.",
            matching("[A-Za-z_][A-Za-z0-9_]{0,40}", "the name of a variable", show=False),
        ),
    ] = None
    state_dir: Annotated[
        str,
        Option(
            "path",
            "Folder of epoch and key file; outside every tier's `root_dir`.",
            check_path,
            default="`$XDG_STATE_HOME/kvsafe` or `~/.local/state/kvsafe`",
        ),
    ]
    epoch_file: Annotated[
        str | None,
        Option(
            "path",
            "The epoch file, for engines with state folders of their own that share chunks: the "
            "same file (`epoch-NAME.json`, in a folder that only their user writes) and the same "
            "key for all. A reset of one is a reset of all. Outside every tier's `root_dir`.",
            _check_epoch_file,
            default="`epoch-NAMESPACE.json` in `state_dir`",
        ),
    ] = None
    namespace: Annotated[
        str,
        Option(
            "text",
            "Chunks of one namespace are never served in another.",
            matching("[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "1 to 64 of A-Z a-z 0-9 . _ -"),
        ),
    ] = "default"
    weights_digest: Annotated[
        str,
        Option(
            "text",
            "`auto` reads the weight files; or what you know about them: `blake3:` or `sha256:` "
            "and 64 lower-case hex digits.",
            matching(
                "auto|(blake3|sha256):[0-9a-f]{64}",
                "auto, or blake3: or sha256: and 64 lower-case hex digits",
            ),
        ),
    ] = "auto"
    quarantine: Annotated[
        str,
        Option(
            "text",
            "What becomes of a refused chunk: moved `aside`, `remove`d, or `keep`t in place.",
            one_of("aside", "remove", "keep"),
        ),
    ] = "aside"
    verify_loads: Annotated[
        str,
        Option(
            "text",
            "`always` checks the payload before every load. `once` skips the payload tag for a row "
            "that this worker has itself tagged or proven in the present allocation; gives up "
            "finding bytes that change in host memory after that (a memory fault, another process "
            "that writes the shared region).",
            one_of("always", "once"),
        ),
    ] = "always"
    monitor: Annotated[
        str,
        Option(
            "text",
            "The lifecycle's state machine beside the host tier. `log` counts and logs every step "
            "that the machine does not allow; `enforce` also stops offering and storing chunks "
            "from the first one on, so that requests are recomputed until a restart; `off`.",
            one_of("off", "log", "enforce"),
        ),
    ] = "log"
    copy_threads: Annotated[
        int,
        Option(
            "integer",
            "Threads that copy between accelerator and rows, per worker.",
            int_between(1, MAX_THREADS),
            default="half the CPUs, 1 to 4",
        ),
    ] = msgspec.field(default_factory=small_thread_count)
    verify_threads: Annotated[
        int,
        Option(
            "integer",
            "Threads that check payloads.",
            int_between(1, MAX_THREADS),
            default="half the CPUs, 1 to 4",
        ),
    ] = msgspec.field(default_factory=small_thread_count)
    weights_survive_reset: Annotated[
        bool,
        Option(
            "boolean",
            "A reset only empties the cache: the weights in memory are still those of the files. "
            "Unless this is set, what is sealed after a reset is served by this launch only, since "
            "the reset may have come with new weights.",
            check_bool,
        ),
    ] = False
    explain_misses: Annotated[
        bool,
        Option(
            "boolean",
            "On a miss in a tier of files, ask in the background whether the chunk is there under "
            "another recent identity, and name the field that differs (refusal 703).",
            check_bool,
        ),
    ] = True
    load_deadline_s: Annotated[
        float,
        Option(
            "seconds",
            "A write into a row (store or promotion) that is pending longer is a miss for whoever "
            "waits; the chunks of a load that takes longer are offered to nobody else. At least "
            "0.01.",
            number_between(0.01, MAX_DEADLINE_S),
        ),
    ] = 30.0
    store_deadline_s: Annotated[
        float,
        Option(
            "seconds",
            "Longest wait for transfers that must end before their blocks are reused. At least 1.",
            number_between(1, MAX_DEADLINE_S),
        ),
    ] = 60.0

    allow_unknown_weights: Annotated[
        bool, _override("Start when the weights cannot be told apart from others.")
    ] = False
    allow_untested_vllm: Annotated[bool, _override("Start on a vLLM version not tested.")] = False
    allow_unproven_kv_dtype: Annotated[
        bool, _override("Start with a KV dtype or KV quantisation not proven.")
    ] = False
    allow_unproven_kv_layout: Annotated[bool, _override("Start with a KV layout not proven.")] = (
        False
    )
    allow_unproven_groups: Annotated[
        bool,
        _override("Start with KV-cache groups not proven (Mamba, several kinds in one model)."),
    ] = False
    allow_unproven_spec_decode: Annotated[
        bool, _override("Start with speculative decoding on.")
    ] = False
    allow_unproven_tier: Annotated[
        bool,
        _override("Use a tier, an eviction policy or a back-pressure class that is not proven."),
    ] = False
    allow_weak_block_hash: Annotated[
        bool, _override("Start with block hashes that collide or do not survive a restart.")
    ] = False
    allow_multi_node: Annotated[
        bool, _override("Start with workers that may not share this machine's memory.")
    ] = False

    @property
    def active_overrides(self) -> tuple[str, ...]:
        """Names of the overrides that are set, for logs and metrics."""
        return tuple(name for name in OVERRIDES if getattr(self, name))

    @property
    def unproven_tiers(self) -> tuple[str, ...]:
        """Types of the tiers that `allow_unproven_tier` let through."""
        return tuple(tier.type for tier in self.secondary_tiers if not tier.proven)


def _options_of(struct: type[msgspec.Struct]) -> dict[str, Option]:
    """The options in a Struct's annotations, by key."""
    hints = get_type_hints(struct, include_extras=True)
    return {
        name: extra
        for name in struct.__struct_fields__
        for extra in getattr(hints[name], "__metadata__", ())
        if isinstance(extra, Option)
    }


OPTIONS: Final[Mapping[str, Option]] = _options_of(KVSafeConfig)
OVERRIDES: Final = tuple(name for name, o in OPTIONS.items() if o.origin == "override")

# SPDX-License-Identifier: Apache-2.0
"""Configuration JSON: what an operator, a template or a broken tool may put there."""

from __future__ import annotations

import copy
import json
import os

from fuzz.target import ByteSource, Finding, Target, demand
from kvsafe.engine import config

SECRET = "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3I="  # noqa: S105 - a planted one
"""A key that somebody has put into the JSON; no error may repeat it."""
_ENVIRON = {"HOME": "/nowhere/user", "KEY": SECRET}
_NAMES = (*config.OPTIONS, "secondary_tiers", "keyfile", "Key_File", "key", "token", "", "é")
_TIER_NAMES = (
    "type", "root_dir", "capacity_bytes", "reserve_bytes", "ttl_s", "sync", "threads", "deadline_s",
    "direct_io", "quarantine", "locality", "backpressure", "n_read_threads", "module_path", "x",
    "url", "host", "port", "password",
)  # fmt: skip
_TYPES = (*config.PROVEN_TIER_TYPES, *config.UNPROVEN_TIER_TYPES, "mine", "FS", "")
_PATHS = (
    "/nowhere/a", "/nowhere/a/b", "/nowhere/b", "/nowhere", "/", "~/x", "a", "/nowhere/../b",
    "//nowhere//a/", "/nowhere/a/epoch-1.json", "/nowhere/a/keys.json", "/nowhere/ab", "/a\0b",
)  # fmt: skip
_TEXTS = (
    "8GiB", "8 GB", "1e9", "0", "-1", "1.5KiB", "", "lru", "arc", "aside", "always", "once", "KEY",
    "blake3", "hmac-sha256", "auto", "a.b.C", "x" * 5000, "default", "none", "full", "LOCAL",
    "blake3:" + "0" * 64, "EMABackpressureDetector", "DropStorePolicy", "mine.Policy",
)  # fmt: skip
_SECRET_PLACES = (
    "key_file", "key_env", "key", "secret", "keyfile", "Key-Env", "token", "hmac_key", "é",
)  # fmt: skip
_NUMBERS = (0, 1, 2, -1, 64, 257, 1 << 30, 1 << 61, 1 << 70, 10**400, 0.0, 0.5, -0.5, 1e300)
_PRESSURE = (*config.BACKPRESSURE, "what")


class Config(Target):
    """`kv_connector_extra_config`, as text and as objects.

    Oracles: only `ConfigError`, of bounded length and without the planted secret; what is taken
    is in range, comes out the same a second time and leaves its input alone; no folder of ours
    lies in a tier's; code of others only with its override.
    """

    name = "config"
    max_len = 512
    memory_mib = 64

    def once(self, data: bytes) -> None:
        source = ByteSource(data)
        if source.below(8) == 7:
            _text(source)
            return
        extra = _extra(source)
        kept = copy.deepcopy(extra)
        try:
            made = config.parse_config(extra, environ=_ENVIRON)
        except config.ConfigError as error:
            _check_error(error)
            return
        finally:
            demand(repr(extra) == repr(kept), "the input was changed")
        _check_taken(made, extra)

    def seeds(self) -> list[bytes]:
        return [
            b"",
            bytes([0, 1]),
            bytes([7]) + b'{"cpu_bytes_to_use": 1}',
            bytes(range(0, 200, 3)),
        ]


def _text(source: ByteSource) -> None:
    """Text that is read as JSON the way the command line does."""
    try:
        value = json.loads(source.rest().decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return
    try:
        config.parse_config(value, environ=_ENVIRON)
    except config.ConfigError as error:
        _check_error(error)


def _extra(source: ByteSource) -> dict[str, object]:
    """Mostly a good configuration with a few options more, of which some are wrong."""
    extra: dict[str, object] = {"cpu_bytes_to_use": 1 << 30}
    if source.flag():
        extra["state_dir"] = source.pick(_PATHS)
    if source.flag():
        tiers = [_tier(source) for _ in range(source.below(4))]
        extra["secondary_tiers"] = tiers
    if source.below(4) == 3:
        extra["backpressure"] = _pressure(source)
    for _ in range(source.below(5)):
        extra[source.pick(_NAMES)] = _value(source, 0)
    if source.below(4) == 3:
        extra[source.pick(_SECRET_PLACES)] = SECRET
    return extra


def _tier(source: ByteSource) -> object:
    if source.rarely():
        return _value(source, 1)
    kind = source.pick(_TYPES)
    tier: dict[str, object] = {"type": kind, "root_dir": source.pick(_PATHS)}
    if kind == "kvsafe-fs":
        tier["capacity_bytes"] = 1 << 30
    for _ in range(source.below(4)):
        tier[source.pick(_TIER_NAMES)] = _value(source, 1)
    return tier


def _pressure(source: ByteSource) -> dict[str, object]:
    found: dict[str, object] = {"backpressure_cls": "EMABackpressureDetector"}
    for _ in range(source.below(4)):
        found[source.pick(_PRESSURE)] = _value(source, 2)
    return found


def _value(source: ByteSource, depth: int) -> object:
    kind = source.below(8 if depth < 20 else 6)
    if kind == 6:
        return [_value(source, depth + 1) for _ in range(source.below(3))]
    if kind == 7:
        return {source.pick(_TIER_NAMES): _value(source, depth + 1) for _ in range(source.below(3))}
    plain: tuple[object, ...] = (
        None, source.flag(), source.pick(_NUMBERS), source.pick(_TEXTS), source.pick(_PATHS),
        _pressure(source) if depth < 3 else source.some(20).decode("latin-1"),
    )  # fmt: skip
    return plain[kind]


def _check_error(error: config.ConfigError) -> None:
    text = str(error)
    demand(len(text) < 40_000, f"an error of {len(text)} characters", "memory")
    demand(SECRET not in text, "a secret in an error")
    demand(len(error.problems) > 0, "an error without a problem")


def _check_taken(made: config.KVSafeConfig, extra: dict[str, object]) -> None:
    """What was taken, judged by what it says and not by how it was checked."""
    again = config.parse_config(extra, environ=_ENVIRON)
    demand(made == again, "the same JSON twice is two configurations")
    demand(1 <= made.cpu_bytes_to_use <= config.MAX_SIZE, "a size out of range", "accepted")
    demand(0 < made.load_deadline_s <= config.MAX_DEADLINE_S, "a deadline", "accepted")
    demand(1 <= made.copy_threads <= config.MAX_THREADS, "threads out of range", "accepted")
    demand(made.spec_name == config.SPEC_NAME, "another spec class", "accepted")
    demand(not made.canonical_layout, "a layout that is not proven", "accepted")
    keyed = made.suite != "blake3"
    sources = (made.key_file is not None) + (made.key_env is not None)
    demand(sources == int(keyed), f"{sources} sources of a key for {made.suite}", "accepted")
    _check_folders(made)
    if not made.allow_unproven_tier:
        _check_proven(made)
    vllm = config.to_vllm_extra(made)
    foreign = {name for name in vllm if config.OPTIONS[name].origin != "vllm"}
    demand(not foreign, f"vLLM is given {foreign}")
    demand(
        len(json.dumps(vllm, default=str)) < 1 << 20, "a configuration without a bound", "memory"
    )


def _check_folders(made: config.KVSafeConfig) -> None:
    """By the parts of the names: no folder holds another, none of ours is a tier's."""
    roots = [tier.root_dir for tier in made.secondary_tiers if tier.root_dir is not None]
    ours = [path for path in (made.state_dir, made.key_file) if path is not None]
    for path in ours:
        demand(os.path.isabs(path) and ".." not in path, "a path that is not whole", "accepted")
    for number, root in enumerate(roots):
        for other in (*roots[:number], *ours):
            demand(not _together(root, other), "two folders, one in the other", "accepted")


def _together(one: str, other: str) -> bool:
    left, right = (tuple(part for part in path.split("/") if part) for path in (one, other))
    length = min(len(left), len(right))
    return left[:length] == right[:length]


def _check_proven(made: config.KVSafeConfig) -> None:
    """Without the override every class is a built-in one."""
    demand(made.eviction_policy in ("lru", "arc"), "a policy of somebody else", "accepted")
    for tier in made.secondary_tiers:
        if tier.type not in config.PROVEN_TIER_TYPES:
            raise Finding("accepted", "a tier that is not proven")
    places = [made.backpressure, *(t.options.get("backpressure") for t in made.secondary_tiers)]
    for options in places:
        names = options.values() if isinstance(options, dict) else ()
        demand(not any("." in str(n) for n in names if isinstance(n, str)), "a class", "accepted")

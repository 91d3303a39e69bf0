# SPDX-License-Identifier: Apache-2.0
"""Secondary tiers and back-pressure: the options of ours, and the bounds on those of others."""

import copy
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from kvsafe.engine.config.lmcache import KVSAFE_LMCACHE_TIER as _LMCACHE_OPTIONS
from kvsafe.engine.config.problems import Problem, Refused, describe, nearest, refuse, under
from kvsafe.engine.config.table import Option, read_table
from kvsafe.engine.config.values import (
    MAX_THREADS,
    Check,
    check_bool,
    check_json,
    check_path,
    check_seconds,
    check_size,
    int_between,
    matching,
    number_between,
    one_of,
)

PROVEN_TIER_TYPES: Final = ("fs", "kvsafe-fs", "kvsafe-lmcache")
UNPROVEN_TIER_TYPES: Final = ("example", "obj", "p2p", "kvcr")

_MODULE: Final = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){0,15}"
check_module: Final = matching(_MODULE, "a Python module path such as my_package.my_module")
EMA: Final = "EMABackpressureDetector"
"""vLLM's own detector of back-pressure."""


def _class_of(*built_in: str) -> Check:
    """A class that vLLM has under a plain name, or any `module.ClassName`."""

    def check(value: object) -> str:
        allowed = f"{', '.join(built_in)}, or module.ClassName"
        if type(value) is str and (value in built_in or _is_dotted(value)):
            return value
        near = nearest(value, built_in) if type(value) is str else ""
        raise refuse(value, allowed, near)

    return check


def _is_dotted(value: object) -> bool:
    return type(value) is str and "." in value and re.fullmatch(_MODULE, value) is not None


BACKPRESSURE: Final[Mapping[str, Option]] = {
    "backpressure_cls": Option("text", f"`{EMA}`, or `module.ClassName`", _class_of(EMA)),
    "policy_cls": Option(
        "text",
        "`ThrottledDropPolicy`, `DropStorePolicy`, or `module.ClassName`",
        _class_of("ThrottledDropPolicy", "DropStorePolicy"),
    ),
    "high_water_s": Option("number", "pressure begins (s/MiB)", number_between(0, 3600)),
    "low_water_s": Option("number", "pressure ends (s/MiB)", number_between(0, 3600)),
    "alpha": Option("number", "weight of the newest sample", number_between(1e-6, 1)),
    "warmup_completions": Option("integer", "stores before judging", int_between(0, 1 << 20)),
    "decay_half_life_s": Option("number", "decay when idle (s)", number_between(0, 3600)),
    "cooldown_s": Option("number", "half rate after pressure (s)", number_between(0, 3600)),
}


def check_backpressure(value: object) -> dict[str, object]:
    """Check one backpressure object; a detector class of somebody else takes what it likes."""
    if type(value) is not dict:
        raise refuse(value, "an object with the keys " + ", ".join(BACKPRESSURE))
    if _is_dotted(value.get("backpressure_cls")):
        copied = check_json(value)
        return copied if isinstance(copied, dict) else {}
    problems: list[Problem] = []
    values = read_table(BACKPRESSURE, value, problems)
    if problems:
        raise Refused(*problems)
    return values


FS_TIER: Final[Mapping[str, Option]] = {
    "type": Option("text", "`fs`", one_of("fs"), required=True),
    "root_dir": Option(
        "path", "Folder of the chunk files; our state and key file lie outside it.", check_path,
        required=True,
    ),
    "n_read_threads": Option("integer", "Threads that prefer reads.", int_between(1, MAX_THREADS)),
    "n_write_threads": Option(
        "integer", "Threads that prefer writes.", int_between(1, MAX_THREADS)
    ),
    "enable_kv_events": Option("boolean", "Emit KV events for stored chunks.", check_bool),
    "locality": Option("text", "`LOCAL` or `REMOTE`.", one_of("LOCAL", "REMOTE")),
    "backpressure": Option("object", "Overrides the top level, key by key.", check_backpressure),
}  # fmt: skip


def _check_reserve(value: object) -> int:
    """A size in bytes, or 0."""
    return 0 if type(value) is int and value == 0 else check_size(value)


KVSAFE_FS_TIER: Final[Mapping[str, Option]] = {
    "type": Option("text", "`kvsafe-fs`", one_of("kvsafe-fs"), required=True),
    "root_dir": Option(
        "path", "Folder of the store, of this user alone; our state and key file lie outside it.",
        check_path, required=True,
    ),
    "capacity_bytes": Option(
        "size", "Most bytes in the folder, all processes together, at every moment.",
        check_size, required=True,
    ),
    "reserve_bytes": Option(
        "size", "Bytes left free on the file system for others.", _check_reserve, default="`0`"
    ),
    "ttl_s": Option(
        "number", "A chunk written longer ago (s) is a miss and is removed.",
        number_between(1, 3.2e8),
    ),
    "sync": Option(
        "text", "What is synced before a store counts: `none`, `data`, or `full` (the name too).",
        one_of("none", "data", "full"), default="`none`",
    ),
    "threads": Option(
        "integer",
        "Threads that write. Half as many read, at most 8 or a fourth; one of those only reads.",
        int_between(1, MAX_THREADS),
        default="`32`",
    ),
    "direct_io": Option(
        "text", "`auto` bypasses the page cache where it can, `on` insists, `off` does not.",
        one_of("auto", "on", "off"), default="`auto`",
    ),
    "deadline_s": Option(
        "seconds", "Longest wait, and longest run, of one operation; then it is a miss.",
        check_seconds, default="`10.0`",
    ),
    "quarantine": Option(
        "text", "As the key of the same name above; `keep` costs a miss each time.",
        one_of("aside", "remove", "keep"), default="as above",
    ),
    "locality": Option("text", "`LOCAL` or `REMOTE`.", one_of("LOCAL", "REMOTE")),
    "backpressure": Option("object", "Overrides the top level, key by key.", check_backpressure),
}  # fmt: skip

KVSAFE_LMCACHE_TIER: Final[Mapping[str, Option]] = {
    **_LMCACHE_OPTIONS,
    "backpressure": KVSAFE_FS_TIER["backpressure"],
}

_OWN_TABLES: Final = {
    "fs": FS_TIER,
    "kvsafe-fs": KVSAFE_FS_TIER,
    "kvsafe-lmcache": KVSAFE_LMCACHE_TIER,
}


class TierConfig(msgspec.Struct, frozen=True):
    """One secondary tier. `options` is everything but `type` and `module_path`, as checked."""

    type: str
    module_path: str | None
    options: dict[str, object]

    @property
    def proven(self) -> bool:
        """Whether the conformance suite covers this tier type."""
        return self.type in PROVEN_TIER_TYPES

    @property
    def root_dir(self) -> str | None:
        """The folder that the tier writes, where its options name one."""
        root = self.options.get("root_dir")
        return root if isinstance(root, str) else None

    def to_vllm(self) -> dict[str, object]:
        """A fresh dict for vLLM's tier factory (it changes the dict it gets)."""
        module = {} if self.module_path is None else {"module_path": self.module_path}
        return {"type": self.type, **module, **copy.deepcopy(self.options)}

    def __repr__(self) -> str:
        # Options of other people's tiers may hold credentials.
        return f"TierConfig(type={self.type!r}, options={sorted(self.options)})"


def check_tiers(value: object) -> tuple[TierConfig, ...]:
    """Check the list of secondary tiers; returns them in order, 64 at most."""
    if type(value) is not list or len(value) > 64:
        raise refuse(value, "a list of at most 64 tier objects")
    problems: list[Problem] = []
    tiers: list[TierConfig] = []
    for place, item in enumerate(value):
        try:
            tiers.append(_check_tier(item))
        except Refused as refused:
            problems.extend(under(f"[{place}]", refused.problems))
    if problems:
        raise Refused(*problems)
    return tuple(tiers)


def _check_tier(value: object) -> TierConfig:
    if type(value) is not dict:
        raise refuse(value, "an object with at least the key type")
    kind = value.get("type")
    known = (*PROVEN_TIER_TYPES, *UNPROVEN_TIER_TYPES)
    allowed = f"{', '.join(known)}, or a class name together with module_path"
    if type(kind) is not str or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,127}", kind):
        found = describe(kind) if "type" in value else "nothing"
        raise Refused(Problem("type", found, allowed))
    if kind not in known and "module_path" not in value:
        raise Refused(Problem("type", describe(kind), allowed, nearest(kind, known)))
    if kind in known and "module_path" in value:
        hint = f"{kind} is built in: leave module_path out"
        raise Refused(Problem("module_path", "a key without effect", "", hint))
    if kind in _OWN_TABLES:
        return TierConfig(kind, None, _by_table(_OWN_TABLES[kind], value))
    return _check_other_tier(kind, value)


def _by_table(table: Mapping[str, Option], raw: Mapping[object, object]) -> dict[str, object]:
    problems: list[Problem] = []
    values = read_table(table, raw, problems)
    if problems:
        raise Refused(*problems)
    del values["type"]
    return values


def check_kvsafe_fs(raw: Mapping[object, object]) -> dict[str, object]:
    """Check the options of a `kvsafe-fs` tier, `type` included; returns the others.

    Sizes come back in bytes. Raises `Refused`. Checking twice changes nothing.
    """
    return _by_table(KVSAFE_FS_TIER, raw)


def check_kvsafe_lmcache(raw: Mapping[object, object]) -> dict[str, object]:
    """Check the options of a `kvsafe-lmcache` tier, `type` included; returns the others.

    Raises `Refused`. Checking twice changes nothing.
    """
    return _by_table(KVSAFE_LMCACHE_TIER, raw)


def _check_other_tier(kind: str, raw: dict[object, object]) -> TierConfig:
    """Options of tiers that are not ours pass through as they are, as plain JSON."""
    copied = check_json(raw)
    options = copied if isinstance(copied, dict) else {}
    del options["type"]
    checks: tuple[tuple[str, Check], ...] = (
        ("module_path", check_module),
        ("backpressure", check_backpressure),
    )
    for key, check in checks:
        try:
            options.update({key: check(options[key])} if key in options else {})
        except Refused as refused:
            raise Refused(*under(key, refused.problems)) from None
    module = options.pop("module_path", None)
    return TierConfig(kind, module, options)

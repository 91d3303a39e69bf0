# SPDX-License-Identifier: Apache-2.0
"""Rules about several options together: what each of them allows, but not in this company."""

import os
from collections.abc import Mapping
from typing import Final

from kvsafe.engine.config.problems import Problem, describe, nearest
from kvsafe.engine.config.tiers import EMA, PROVEN_TIER_TYPES, TierConfig

Values = dict[str, object]


def _chunk_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    if "block_size" in values and "blocks_per_chunk" in values:
        return [Problem("block_size", "blocks_per_chunk as well", "one of the two")]
    return []


def _policy_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    policy = values.get("eviction_policy", "lru")
    module = values.get("cache_policy_module_path")
    if policy in ("lru", "arc") and module is not None:
        found = f"a module although eviction_policy is {policy}, which is built in"
        return [Problem("cache_policy_module_path", found, "nothing, or name its class")]
    if policy not in ("lru", "arc") and module is None:
        allowed = "lru, arc, or a class name together with cache_policy_module_path"
        near = nearest(str(policy), ("lru", "arc"))
        return [Problem("eviction_policy", describe(policy), allowed, near)]
    return []


def _key_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    sources = [name for name in ("key_file", "key_env") if name in values]
    if values.get("suite") == "blake3":
        hint = "leave it out, or choose blake3-keyed"
        return [Problem(name, "a key, but suite blake3 uses none", "", hint) for name in sources]
    if len(sources) == 2:
        return [Problem("key_env", "key_file as well", "one of the two")]
    variable = values.get("key_env")
    if isinstance(variable, str) and not environ.get(variable, "").strip():
        # Not shown: somebody may have put the key itself here.
        found = "a name of no variable that is set in this process"
        return [Problem("key_env", found, "the name of a variable that holds the key")]
    return []


def _tier_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    """Unproven tiers need their override, and no two tiers write the same folder."""
    problems: list[Problem] = []
    roots: dict[str, str] = {}
    for path, tier in _tiers(values):
        if not tier.proven and values.get("allow_unproven_tier", False) is not True:
            hint = "set allow_unproven_tier to true to use it all the same"
            proven = ", ".join(PROVEN_TIER_TYPES)
            problems.append(Problem(f"{path}.type", f"{tier.type}, not proven", proven, hint))
        if tier.root_dir is not None:
            first = roots.setdefault(_real(tier.root_dir), path)
            if first != path:
                problems.append(Problem(f"{path}.root_dir", f"the folder of {first}", "its own"))
    return problems


def _pressure_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    """What a tier gets is the top level overlaid with its own: that must be whole."""
    common = values.get("backpressure") or {}
    problems: list[Problem] = []
    for path, tier in _tiers(values):
        own = tier.options.get("backpressure")
        merged = {**(common if isinstance(common, dict) else {})}
        merged.update(own if isinstance(own, dict) else {})
        if not merged and own is None:
            continue
        where = f"{path}.backpressure"
        if "backpressure_cls" not in merged:
            problems.append(Problem(where, "no backpressure_cls here or above", EMA))
        low, high = merged.get("low_water_s"), merged.get("high_water_s")
        if isinstance(low, float) and isinstance(high, float) and low > high:
            problems.append(Problem(where, f"low_water_s {low:g} above high_water_s {high:g}"))
    return problems


def _place_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    """Key and state lie outside every store: who may write chunks must not write those."""
    problems: list[Problem] = []
    for path, tier in _tiers(values):
        if tier.root_dir is None:
            continue
        root = _real(tier.root_dir)
        for name in ("state_dir", "key_file"):
            ours = values.get(name)
            if isinstance(ours, str) and (_inside(_real(ours), root) or _inside(root, _real(ours))):
                found = f"a folder that holds {name} or lies inside it"
                problems.append(Problem(f"{path}.root_dir", found, "a folder apart from it"))
    return problems


CROSS_RULES: Final = (
    _chunk_rule, _policy_rule, _key_rule, _tier_rule, _pressure_rule, _place_rule,
)  # fmt: skip


def _tiers(values: Values) -> list[tuple[str, TierConfig]]:
    tiers = values.get("secondary_tiers", ())
    known = tiers if isinstance(tiers, tuple) else ()
    return [(f"secondary_tiers[{place}]", tier) for place, tier in enumerate(known)]


def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:
        # A NUL or a lone surrogate from a pass-through tier: no such file can exist.
        return os.path.normpath("/" + path)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")

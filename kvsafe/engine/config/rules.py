# SPDX-License-Identifier: Apache-2.0
"""Rules about several options together: what each of them allows, but not in this company."""

import os
import re
from collections.abc import Mapping
from typing import Final

from kvsafe.engine.config.lmcache import complete_lmcache
from kvsafe.engine.config.problems import Problem, Refused, describe, nearest, under
from kvsafe.engine.config.tiers import EMA, PROVEN_TIER_TYPES, TierConfig

Values = dict[str, object]

_BUILT_IN_POLICIES: Final = ("lru", "arc")
_LET_THROUGH: Final = "set allow_unproven_tier to true to use it all the same"
_STATE_FILE: Final = re.compile(r"\.?((adapters|weights|code)|epoch-.*)\.json(\..*)?", re.DOTALL)
"""What kvsafe writes into `state_dir`, and the .lock, .used, .new and temporary names beside it."""
_IDENTITIES: Final = "identities"


def _chunk_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    if "block_size" in values and "blocks_per_chunk" in values:
        return [Problem("block_size", "blocks_per_chunk as well", "one of the two")]
    return []


def _policy_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    policy = values.get("eviction_policy", "lru")
    module = values.get("cache_policy_module_path")
    if policy in _BUILT_IN_POLICIES and module is not None:
        found = f"a module although eviction_policy is {policy}, which is built in"
        return [Problem("cache_policy_module_path", found, "nothing, or name its class")]
    if policy not in _BUILT_IN_POLICIES and module is None:
        allowed = "lru, arc, or a class name together with cache_policy_module_path"
        near = nearest(str(policy), _BUILT_IN_POLICIES)
        return [Problem("eviction_policy", describe(policy), allowed, near)]
    return []


def _key_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    sources = [name for name in ("key_file", "key_env") if name in values]
    if values.get("suite") == "blake3":
        hint = "leave it out, or choose a keyed suite"
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
    """Unproven tiers need their override."""
    if _unproven_allowed(values):
        return []
    proven = ", ".join(PROVEN_TIER_TYPES)
    return [
        Problem(f"{path}.type", f"{tier.type}, not proven", proven, _LET_THROUGH)
        for path, tier in _tiers(values)
        if not tier.proven
    ]


def _class_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    """Code of somebody else that decides about rows or stores needs the same override."""
    if _unproven_allowed(values):
        return []
    problems: list[Problem] = []
    policy = values.get("eviction_policy", "lru")
    if policy not in _BUILT_IN_POLICIES and "cache_policy_module_path" in values:
        found = "a class that is not built in, not proven"
        allowed = ", ".join(_BUILT_IN_POLICIES)
        problems.append(Problem("eviction_policy", found, allowed, _LET_THROUGH))
    places = [("backpressure", values.get("backpressure"))]
    places += [
        (f"{path}.backpressure", t.options.get("backpressure")) for path, t in _tiers(values)
    ]
    for place, options in places:
        for key in ("backpressure_cls", "policy_cls"):
            name = options.get(key) if isinstance(options, dict) else None
            # Only a built-in class has a name without a module.
            if isinstance(name, str) and "." in name:
                found = "a class that is not built in, not proven"
                problems.append(Problem(f"{place}.{key}", found, "a class of vLLM", _LET_THROUGH))
    return problems


def _apart_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    """No tier writes into the folder of another, nor above or below it."""
    problems: list[Problem] = []
    roots: list[tuple[str, str]] = []
    for path, tier in _tiers(values):
        if tier.root_dir is None:
            continue
        root = _real(tier.root_dir)
        near = [p for p, other in roots if _inside(root, other) or _inside(other, root)]
        if near:
            found = f"the folder of {near[0]}, or one that holds it or lies inside it"
            problems.append(Problem(f"{path}.root_dir", found, "a folder apart from it"))
        roots.append((path, root))
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
        for name in ("state_dir", "key_file", "epoch_file"):
            ours = values.get(name)
            if isinstance(ours, str) and (_inside(_real(ours), root) or _inside(root, _real(ours))):
                found = f"a folder that holds {name} or lies inside it"
                problems.append(Problem(f"{path}.root_dir", found, "a folder apart from it"))
    return problems


def _state_file_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    """The key file is none of the files that kvsafe itself replaces beside it."""
    key_file, state_dir = values.get("key_file"), values.get("state_dir")
    if not isinstance(key_file, str) or not isinstance(state_dir, str):
        return []
    epoch_file = values.get("epoch_file")
    folders = [state_dir, *([os.path.dirname(epoch_file)] if isinstance(epoch_file, str) else [])]
    folder, name = os.path.split(key_file)
    # A link is looked at as what it is and as what it leads to.
    places = (_real(key_file), os.path.join(_real(folder), name))
    if not any(_is_state_file(place, ours) for place in places for ours in folders):
        return []
    found = "a file that kvsafe itself writes"
    hint = "leave key_file out: keys.json in state_dir is made on first use"
    return [Problem("key_file", found, "a file of its own, under another name", hint)]


def _peer_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    """What the options of a `kvsafe-lmcache` tier say together, with the environment."""
    problems: list[Problem] = []
    for path, tier in _tiers(values):
        if tier.type == "kvsafe-lmcache":
            try:
                complete_lmcache(tier.options, environ)
            except Refused as refused:
                problems += under(path, refused.problems)
    return problems


CROSS_RULES: Final = (
    _chunk_rule, _policy_rule, _key_rule, _tier_rule, _class_rule, _apart_rule, _pressure_rule,
    _place_rule, _state_file_rule, _peer_rule,
)  # fmt: skip


def _unproven_allowed(values: Values) -> bool:
    return values.get("allow_unproven_tier", False) is True


def _is_state_file(path: str, state_dir: str) -> bool:
    state = _real(state_dir)
    folder, name = os.path.split(path)
    identities = os.path.join(state, _IDENTITIES)
    if _inside(path, identities) or _inside(path, _real(identities)):
        return True
    return folder == state and _STATE_FILE.fullmatch(name) is not None


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

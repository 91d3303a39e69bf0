# SPDX-License-Identifier: Apache-2.0
"""From `kv_connector_extra_config` to a `KVSafeConfig`, and back to what vLLM's classes read."""

import copy
import os
from collections.abc import Mapping
from typing import Final

import msgspec

from kvsafe.engine.config.options import OPTIONS, KVSafeConfig
from kvsafe.engine.config.problems import ConfigError, Problem, Refused, describe, under
from kvsafe.engine.config.rules import CROSS_RULES, Values
from kvsafe.engine.config.table import read_table
from kvsafe.engine.config.tiers import PROVEN_TIER_TYPES
from kvsafe.engine.config.values import check_path
from kvsafe.seal.keyring import DEFAULT_SUITE

_WHOLE: Final = "kv_connector_extra_config"
_TITLE: Final = f"kvsafe refuses {_WHOLE}:"


def parse_config(extra: Mapping[str, object], *, environ: Mapping[str, str]) -> KVSafeConfig:
    """Read `kv_connector_extra_config`; called once, when the connector is built.

    Raises `ConfigError` with every problem found: unknown keys (with the nearest valid one), wrong
    types (nothing is converted), values out of range and combinations that are unsafe.
    """
    if not isinstance(extra, Mapping):
        raise ConfigError(_TITLE, [Problem(_WHOLE, describe(extra), "an object")])
    problems: list[Problem] = []
    values = read_table(OPTIONS, dict[object, object](extra.items()), problems)
    _place_files(values, extra, environ, problems)
    for rule in CROSS_RULES:
        problems.extend(rule(values, environ))
    if problems:
        raise ConfigError(_TITLE, problems)
    return msgspec.convert(values, KVSafeConfig, strict=True)


def _place_files(
    values: Values, extra: Mapping[str, object], environ: Mapping[str, str], problems: list[Problem]
) -> None:
    """Fill in the default places and replace `~/` everywhere a path of ours may stand."""
    home = environ.get("HOME", "")
    if "state_dir" not in extra:
        values["state_dir"] = _default_state_dir(environ)
    for name in ("state_dir", "key_file", "epoch_file"):
        if name in values:
            _expand(values, name, name, home, problems)
    tiers = values.get("secondary_tiers", ())
    for place, tier in enumerate(tiers if isinstance(tiers, tuple) else ()):
        if tier.root_dir is not None and tier.type in PROVEN_TIER_TYPES:
            _expand(tier.options, "root_dir", f"secondary_tiers[{place}].root_dir", home, problems)
    state_dir = values.get("state_dir")
    keyed = values.get("suite", DEFAULT_SUITE) != "blake3"
    if keyed and isinstance(state_dir, str) and not {"key_file", "key_env"} & set(extra):
        values["key_file"] = os.path.join(state_dir, "keys.json")


def _default_state_dir(environ: Mapping[str, str]) -> str:
    # The XDG base directory specification has relative values ignored.
    base = environ.get("XDG_STATE_HOME", "")
    return os.path.join(base, "kvsafe") if base.startswith("/") else "~/.local/state/kvsafe"


def _expand(table: Values, name: str, path: str, home: str, problems: list[Problem]) -> None:
    """Replace a leading `~/` in `table[name]`; drop it with a problem when that gives no path."""
    given = table.pop(name)
    if isinstance(given, str) and given.startswith("~/"):
        if not home.startswith("/"):
            found = "no absolute HOME in the environment"
            problems.append(Problem(path, found, "an absolute path", f"set {path} or HOME"))
            return
        given = os.path.join(home, given[2:])
    try:
        table[name] = check_path(given)
    except Refused as refused:
        problems.extend(under(path, refused.problems))


def to_vllm_extra(config: KVSafeConfig) -> dict[str, object]:
    """Give the dict that vLLM's spec classes read: vLLM's own keys only, sizes as integers.

    Fresh on every call, since vLLM writes into it. Keys left unset stay out.
    """
    named = ((name, getattr(config, name)) for name, o in OPTIONS.items() if o.origin == "vllm")
    extra = {name: copy.deepcopy(value) for name, value in named if value is not None}
    extra["secondary_tiers"] = [tier.to_vllm() for tier in config.secondary_tiers]
    return extra

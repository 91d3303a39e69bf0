# SPDX-License-Identifier: Apache-2.0
"""The configuration under examination, read by the same code as the engine's."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsafe.cli import UsageError
from kvsafe.cli.doctor.finding import Finding, bad, ok, warn
from kvsafe.engine.config import ConfigError, KVSafeConfig, parse_config
from kvsafe.engine.config.problems import nearest, quote

__all__ = ["TransferConfig", "examine_config", "read_config"]

MAX_CONFIG_BYTES = 1 << 20
_CONNECTOR = "KVSafeConnector"
_MODULE = "kvsafe.engine.connector"
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_EXTRA = "kv_connector_extra_config"
_OUTER = (
    "kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port", _EXTRA,
    "kv_connector_module_path", "enable_permute_local_kv", "kv_load_failure_policy",
)  # fmt: skip
"""Fields of vLLM 0.32's KVTransferConfig (`vllm/config/kv_transfer.py`)."""


class _TwiceError(ValueError):
    """A key stands twice in one object: JSON readers take the last one without a word."""


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """A `--kv-transfer-config`, or only its extra part (`outer` is then None)."""

    outer: Mapping[str, Any] | None
    extra: Mapping[str, Any]


def read_config(text: str) -> TransferConfig:
    """Read JSON text, or the file of that name. Raises `UsageError` if it is no JSON object."""
    shown = "--config"
    if not text.lstrip().startswith("{"):
        shown, text = f"--config {text}", _read_file(text)
    try:
        value = json.loads(text, object_pairs_hook=_no_key_twice)
    except _TwiceError as exc:
        raise UsageError(f"{shown}: the key {quote(str(exc))} stands twice in one object") from None
    except (ValueError, RecursionError) as exc:
        # The message of the decoder names the place, not the text.
        where = f"line {exc.lineno}" if isinstance(exc, json.JSONDecodeError) else "nesting"
        raise UsageError(f"{shown}: not JSON ({where})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{shown}: a JSON object was expected")
    if "kv_connector" not in value and _EXTRA not in value:
        return TransferConfig(None, value)
    extra = value.get(_EXTRA, {})
    if not isinstance(extra, dict):
        raise UsageError(f"{shown}: {_EXTRA} is no object")
    return TransferConfig(value, extra)


def _read_file(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise UsageError(f"--config {path}: not a regular file")
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise UsageError(f"--config {path}: larger than {MAX_CONFIG_BYTES} bytes")
        return data.decode("utf-8")
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or "not UTF-8 text, or no path"
        raise UsageError(f"--config {path}: {reason}") from None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return made


def examine_config(
    given: TransferConfig, environ: Mapping[str, str]
) -> tuple[list[Finding], KVSafeConfig | None]:
    """What is wrong with it, in the engine's own words; the configuration if nothing is."""
    findings = [] if given.outer is None else _examine_outer(given.outer)
    try:
        config = parse_config(given.extra, environ=environ)
    except ConfigError as exc:
        for problem in exc.problems:
            todo = f"allowed: {problem.allowed}" if problem.allowed else ""
            todo += (". " if todo and problem.hint else "") + problem.hint
            findings.append(bad(problem.key, f"found {problem.found}", todo))
        return findings, None
    findings.append(ok("configuration", f"{len(given.extra)} keys, all known and allowed"))
    for name in config.active_overrides:
        findings.append(warn(name, "is set: something is used that is not proven", "unset it"))
    if config.suite == "blake3":
        found = "has no key: it finds accidents, not attackers"
        findings.append(warn("suite blake3", found, "leave it out, or choose a keyed one"))
    if not config.secondary_tiers:
        found = "none: chunks are kept in host memory only, and not over a restart"
        findings.append(warn("secondary_tiers", found, "name a tier, such as kvsafe-fs"))
    return findings, config


def _examine_outer(outer: Mapping[str, Any]) -> list[Finding]:
    findings = []
    for name in outer:
        if name not in _OUTER:
            hint = nearest(name, _OUTER) or f"kvsafe's own keys belong into {_EXTRA}"
            findings.append(bad(quote(name), "vLLM's kv-transfer-config has no such key", hint))
    if outer.get("kv_connector") != _CONNECTOR:
        found = f"is {quote(str(outer.get('kv_connector')))}: nothing is checked by another one"
        findings.append(bad("kv_connector", found, f"set it to {_CONNECTOR}"))
    if outer.get("kv_role") not in _ROLES:
        findings.append(bad("kv_role", "vLLM needs one", "set it to kv_both"))
    elif outer.get("kv_role") != "kv_both":
        findings.append(warn("kv_role", "only kv_both stores and loads", "set it to kv_both"))
    if outer.get("kv_connector_module_path") not in (None, _MODULE):
        findings.append(
            bad("kv_connector_module_path", "not kvsafe's", f"leave it out, or {_MODULE}")
        )
    findings.append(_examine_policy(outer.get("kv_load_failure_policy")))
    return findings


def _examine_policy(policy: object) -> Finding:
    name, choice = "kv_load_failure_policy", "set it to recompute, or to fail if that is meant"
    if policy is None:
        return warn(name, "not set: vLLM's default, fail, ends requests that met a refusal", choice)
    if policy not in ("recompute", "fail"):
        return bad(name, "neither recompute nor fail", choice)
    meaning = {"recompute": "computed again", "fail": "ends the request with an error"}
    return ok(name, f"{policy}: what is refused is {meaning[str(policy)]}")

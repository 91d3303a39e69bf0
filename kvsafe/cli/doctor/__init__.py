# SPDX-License-Identifier: Apache-2.0
"""`kvsafe doctor`: this installation, machine and configuration, looked at before serving.

Starts no engine and makes nothing, but for one small file in each tier's folder that is
there, which it removes again. See `spec/commands.md`.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvsafe.cli import ExitCode, UsageError
from kvsafe.cli.doctor.contents import examine_contents
from kvsafe.cli.doctor.disk import Store, examine_store
from kvsafe.cli.doctor.engine import (
    examine_engine,
    examine_hashing,
    examine_plugin,
    examine_python,
    examine_user,
)
from kvsafe.cli.doctor.finding import Finding, Level, finding_lines, unknown
from kvsafe.cli.doctor.machine import examine_clock, examine_limits, examine_memory
from kvsafe.cli.doctor.setting import examine_config, read_config
from kvsafe.cli.doctor.speed import examine_opening, examine_suite
from kvsafe.cli.doctor.state import State, examine_state
from kvsafe.cli.inspect.keys import default_state_dir
from kvsafe.cli.inspect.screen import print_json, say
from kvsafe.engine.config import KVSafeConfig, TierConfig
from kvsafe.seal.keyring import DEFAULT_SUITE
from kvsafe.seal.suites import Suite

__all__ = ["add_arguments", "examine", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `kvsafe doctor`."""
    parser.add_argument(
        "--config", metavar="JSON|FILE",
        help="the value of --kv-transfer-config, or a file with it",
    )  # fmt: skip
    parser.add_argument("--root", metavar="DIR", action="append", default=[],
                        help="a store to look at, without --config")  # fmt: skip
    parser.add_argument("--state-dir", metavar="DIR", help="the state folder, without --config")
    parser.add_argument("--key-file", metavar="FILE", help="the key file, without --config")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """0 if nothing is bad (warnings are not), 1 otherwise."""
    findings = list(examine(args, os.environ))
    counts = Counter(item.level for item in findings)
    if args.json:
        print_json(
            {
                "ok": not counts[Level.BAD],
                "counts": {level.value: counts[level] for level in Level},
                "findings": [item.document() for item in findings],
            }
        )
    else:
        say(finding_lines(findings, shutil.get_terminal_size((100, 24)).columns))
        say(["", ", ".join(f"{counts[level]} {level.value}" for level in Level)])
    return ExitCode.FOUND if counts[Level.BAD] else ExitCode.FINE


def examine(args: argparse.Namespace, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Every finding, in the order in which things are needed. Raises `UsageError`."""
    config = None
    yield examine_python()
    yield examine_user()
    if args.config is not None:
        if args.root or args.state_dir or args.key_file:
            raise UsageError("--config says where everything is: leave the other options out")
        findings, config = examine_config(read_config(args.config), environ)
        yield from findings
    else:
        yield unknown("configuration", "none was given", "pass --config with what vllm serve gets")
    yield examine_engine(config is not None and config.allow_untested_vllm)
    yield examine_plugin(environ)
    yield examine_hashing(environ)
    yield unknown("engine settings", "KV dtype, layout, groups: the engine shows them at its start")
    wanted = None if config is None else config.cpu_bytes_to_use
    yield from examine_memory(wanted)
    yield from examine_limits(wanted)
    suite = Suite.named(DEFAULT_SUITE if config is None else config.suite)
    yield examine_suite(suite)
    yield examine_opening(suite)
    if args.config is not None and config is None:
        todo = "correct the configuration, and run this again"
        yield unknown("state and stores", "the configuration does not say where they are", todo)
        yield examine_clock(None)
        return
    state, stores = _places(args, environ, config)
    yield from examine_state(state, environ, [store.root for store in stores])
    yield examine_clock(state.epoch)
    for store in stores:
        yield from examine_store(store)
        if os.path.isdir(store.root):
            yield from examine_contents(store, state)
    yield from _others(config)


def _places(
    args: argparse.Namespace, environ: Mapping[str, str], config: KVSafeConfig | None
) -> tuple[State, list[Store]]:
    if config is not None:
        return _state_of(config), _stores_of(config)
    folder = Path(os.path.abspath(args.state_dir)) if args.state_dir else default_state_dir(environ)
    named = Path(os.path.abspath(args.key_file)) if args.key_file else None
    key_file = named or (None if folder is None else folder / "keys.json")
    state = State(folder, key_file, None, Suite.named(DEFAULT_SUITE), "default", presumed=True)
    return state, [Store(os.path.abspath(root)) for root in args.root]


def _state_of(config: KVSafeConfig) -> State:
    key_file = None if config.key_file is None else Path(config.key_file)
    suite = Suite.named(config.suite)
    epoch_file = None if config.epoch_file is None else Path(config.epoch_file)
    folder = Path(config.state_dir)
    return State(folder, key_file, config.key_env, suite, config.namespace, epoch_file)


def _stores_of(config: KVSafeConfig) -> list[Store]:
    stores = []
    for tier in config.secondary_tiers:
        if _has_files(tier) and tier.root_dir is not None:
            options = tier.options
            capacity = options.get("capacity_bytes")
            stores.append(
                Store(
                    tier.root_dir,
                    tier.type,
                    None if capacity is None else int(str(capacity)),
                    int(str(options.get("reserve_bytes", 0))),
                    str(options.get("sync", "none")),
                    str(options.get("direct_io", "auto")),
                )
            )
    return stores


def _has_files(tier: TierConfig) -> bool:
    return tier.type in ("fs", "kvsafe-fs")


def _others(config: KVSafeConfig | None) -> Iterator[Finding]:
    for tier in () if config is None else config.secondary_tiers:
        if not _has_files(tier):
            yield unknown(f"tier {tier.type}", "no folder of files of this machine: not looked at")

# SPDX-License-Identifier: Apache-2.0
"""Tiers that are known here: how they are driven, with which options, and what they promise.

A promise stands here only if the tier's own documentation or code comments make it. Whatever
is not promised is shown as such and never as a failure.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from conformance.tier.folder import BASIC, promises
from conformance.tier.subject import Subject

STOCK_FS = "vllm.v1.kv_offload.tiering.fs.manager:FileSystemTierManager"
KVSAFE_FS = "kvsafe.engine.fs.tier:KVSafeFsTier"
LMCACHE_FS = "conformance.tier.drivers.lmcache_fs:LMCacheFs"
SPOOLCACHE = "conformance.tier.drivers.spoolcache:SpoolCache"
UNDER_PROOF = frozenset(
    {"heal", "bytes", "place", "authentic", "fresh", "identity", "deadline", "longer", "shorter"}
)
"""What `ProvingTier` promises for any tier that it stands before."""


class Unknown(ValueError):
    """What was named is no tier; the text says why."""


@dataclass(frozen=True)
class Entry:
    """A tier that is known: its name, options and promises, plain and under kvsafe's proof."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    plain: frozenset[str] = frozenset()
    proven: frozenset[str] = frozenset()


def _known() -> dict[str, Entry]:
    return {
        STOCK_FS: Entry(
            "vLLM fs",
            {"root_dir": "{root}", "n_read_threads": 4, "n_write_threads": 4},
            # Its docstrings: temporary file and rename, several instances on one folder by
            # default, a failed load marks its keys as misses.
            frozenset({"writers", "errors", "shorter"}),
            frozenset({"kind"}),
        ),
        KVSAFE_FS: Entry(
            "kvsafe-fs",
            {"root_dir": "{root}", "capacity_bytes": 64 << 20, "threads": 4, "deadline_s": 2.0},
            frozenset(),
            promises(),
        ),
    }


@dataclass(frozen=True)
class Entrant:
    """A tier that goes on trial."""

    name: str
    target: str
    driver: type[Subject]
    options: Mapping[str, Any]
    promised: frozenset[str]


def enter(
    target: str, options: Mapping[str, Any] | None, sealed: bool, promise: Collection[str]
) -> Entrant:
    """The tier at MODULE:CLASS: a `SecondaryTierManager`, or a driver of this kit's.

    Raises `Unknown`, and `ImportError` when something that it needs is not installed.
    """
    found = _load(target)
    entry = _known().get(target, Entry(target.rpartition(":")[2]))
    if target == KVSAFE_FS:
        sealed = True
    promised = BASIC | frozenset(promises() if "all" in promise else promise)
    if hasattr(found, "PROMISES") and hasattr(found, "load"):
        driver = cast(type[Subject], found)
        return Entrant(driver.NAME, target, driver, options or {}, promised | driver.PROMISES)
    name = f"{entry.name} under kvsafe" if sealed and target != KVSAFE_FS else entry.name
    promised |= entry.plain
    if sealed:
        promised |= UNDER_PROOF | entry.proven
    chosen = entry.options if options is None else options
    return Entrant(name, target, driver_for(found, name, sealed), chosen, promised)


def _load(target: str) -> Any:
    module, colon, name = target.partition(":")
    if not colon:
        raise Unknown(f"{target!r} is not MODULE:CLASS")
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type):
        raise Unknown(f"{module} has no class {name}")
    return found


def driver_for(tier: Any, name: str, sealed: bool) -> type[Subject]:
    """A driver class for a `SecondaryTierManager`."""
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    if not issubclass(tier, SecondaryTierManager):
        raise Unknown(f"{tier.__name__} is neither a SecondaryTierManager nor a driver")
    if sealed:
        from conformance.tier.drivers.sealed import SealedTier as Driver
    else:
        from conformance.tier.drivers.stock import (  # type: ignore[assignment]
            StockTier as Driver,
        )
    made = type(Driver.__name__, (Driver,), {"tier_class": tier, "NAME": name})
    return cast(type[Subject], made)

# SPDX-License-Identifier: Apache-2.0
"""The options of `kvsafe-fs`: checked, and as its store takes them."""

from pathlib import Path
from typing import Any

from kvsafe.engine.config.problems import ConfigError, Refused, under
from kvsafe.engine.config.tiers import check_kvsafe_fs
from kvsafe.seal.refusal import RefusalKind
from kvsafe.tiers import StoreSetting

TIER_TYPE = "kvsafe-fs"


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a tier by the table of `kvsafe-fs`. Raises `ConfigError`."""
    given: dict[object, object] = {"type": TIER_TYPE}
    given.update(options)
    try:
        return check_kvsafe_fs(given)
    except Refused as refused:
        raise ConfigError(f"{TIER_TYPE}:", under(TIER_TYPE, refused.problems)) from None


def deadline_s(chosen: dict[str, Any]) -> float:
    """Seconds for each operation."""
    return float(chosen.get("deadline_s", 10.0))


def store_setting(chosen: dict[str, Any], file_bytes: int, quarantine: str) -> StoreSetting:
    """The store under a tier; `quarantine` is what becomes of refused files by default."""
    names = ("capacity_bytes", "reserve_bytes", "ttl_s", "sync", "direct_io")
    return StoreSetting(
        root=str(Path(chosen["root_dir"]).expanduser()),
        row_bytes=file_bytes,
        quarantine=chosen.get("quarantine", quarantine),
        flaw_number=int(RefusalKind.TIER_OBJECT),
        batch_s=deadline_s(chosen) / 4,
        **{name: chosen[name] for name in names if name in chosen},
    )

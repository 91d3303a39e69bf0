# SPDX-License-Identifier: Apache-2.0
"""Seeded faults in the configuration, in key files and rings, and in the epoch file."""

from __future__ import annotations

from types import SimpleNamespace

from fuzz.canaries import Canary
from fuzz.canaries.tools import both, fed, gone, instead
from kvsafe.engine.config import parse, problems, rules, table
from kvsafe.seal import epoch, keyfile, keyring, private

_ring = keyfile._ring


def _without(*left_out: str) -> tuple[object, ...]:
    return tuple(rule for rule in rules.CROSS_RULES if rule.__name__ not in left_out)


def _any_active(path: object, document: object, suite: object) -> object:
    """The first key is the active one, whatever the file says."""
    for place, entry in enumerate(document.keys):  # type: ignore[attr-defined]
        entry.active = place == 0
    return _ring(path, document, suite)  # type: ignore[arg-type]


_read_table = table.read_table


def _showing(known: object, raw: object, found: list[object], at: str = "") -> object:
    """As the real one, and a problem that quotes every value of an unknown key."""
    values = _read_table(known, raw, found, at)  # type: ignore[arg-type]
    for key, value in raw.items():  # type: ignore[attr-defined]
        if key not in known:  # type: ignore[operator]
            found.append(problems.Problem(str(key), problems.describe(value)))
    return values


CANARIES = (
    Canary("folders may meet", "config", "a tier's folder may hold our state", 600,
           instead(parse, "CROSS_RULES", _without("_place_rule"))),
    Canary("two tiers in one folder", "config", "tiers may write into one another", 1500,
           instead(parse, "CROSS_RULES", _without("_apart_rule"))),
    Canary("unproven tiers need no override", "config", "code of others decides about rows", 600,
           instead(parse, "CROSS_RULES", _without("_tier_rule"))),
    Canary("a folder is a prefix of its name", "config", "only equal folders meet", 3000,
           instead(rules, "_inside", lambda path, folder: path == folder)),
    Canary("a secret is quoted", "config", "values under secret-like names are shown", 1500,
           instead(parse, "read_table", _showing)),
    Canary("weak secrets pass", "keys", "placeholders are taken for keys", 600,
           both(instead(keyfile, "weakness_of", lambda secret: None),
                instead(keyring, "weakness_of", lambda secret: None))),
    Canary("others may read the key", "keys", "the mode of a key file is not checked", 600,
           gone(private, "check_private")),
    Canary("the first key is active", "keys", "the active flag of a key file is not read", 3000,
           instead(keyfile, "_ring", _any_active)),
    Canary("one subkey for all purposes", "keys", "a slice tag can pass for a header tag", 600,
           fed(keyring, "derive_subkey", lambda secret, suite, _: (secret, suite, "header"))),
    Canary("the epoch file has no tag", "keys", "an edited epoch file is taken", 4000,
           instead(epoch, "hmac", SimpleNamespace(compare_digest=lambda *_: True))),
    Canary("the epoch may fall", "keys", "an older epoch file put back is taken", 4000,
           both(instead(epoch.EpochFile, "_floored", lambda self, value, floor: value),
                instead(epoch.EpochFile, "_note", lambda self, value, floor, mark: value))),
)  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""Tables of keys: how each key is checked and documented, and how an object is read by a table."""

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from kvsafe.engine.config.problems import Problem, Refused, describe, join, nearest, quote, under
from kvsafe.engine.config.values import Check

_NO_SECRETS: Final = (
    "keys never come from this JSON, it gets logged: put the key into a file named by key_file, "
    "or into an environment variable named by key_env"
)
_SECRET_NAME: Final = re.compile(
    r"key|keys|token|secrets?|.*secret.*|.*passw.*|.*passphrase.*|.*hmac.*|.*_key"
    r"|key_(hex|base64|b64|bytes|material|value|data)"
)
_REFUSED_KEYS: Final = {
    "max_tracker_size": "it belongs to store_threshold, which the tiering manager does not support",
}


class Option(msgspec.Struct, frozen=True):
    """How one key is checked and documented. `check` returns the clean value or refuses."""

    kind: str
    doc: str
    check: Check
    origin: Literal["vllm", "kvsafe", "override"] = "kvsafe"
    default: str = ""
    required: bool = False


def read_table(
    table: Mapping[str, Option], raw: Mapping[object, object], problems: list[Problem], at: str = ""
) -> dict[str, object]:
    """Check every key of `raw` against the table; return the good values, append the problems."""
    values: dict[str, object] = {}
    for key, value in raw.items():
        if type(key) is not str:
            problems.append(Problem(join(at, "(key)"), describe(key), "text as a key"))
        elif key not in table:
            problems.append(_unknown(join(at, _name(key)), key, table))
        else:
            try:
                values[key] = table[key].check(value)
            except Refused as refused:
                problems.extend(under(join(at, key), refused.problems))
    for key, option in table.items():
        if option.required and key not in raw:
            problems.append(Problem(join(at, key), "nothing", option.kind, "this key is required"))
    return values


def _name(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", key) else quote(key)


def _unknown(path: str, key: str, known: Iterable[str]) -> Problem:
    plain = key[:60].lower().replace("-", "_")
    if _SECRET_NAME.fullmatch(plain):
        return Problem(path, "a key or secret (not shown)", "", _NO_SECRETS)
    if key in _REFUSED_KEYS:
        return Problem(path, "a key that is not supported", "", _REFUSED_KEYS[key])
    return Problem(path, "an unknown key", "", nearest(plain, known) or "see the option table")

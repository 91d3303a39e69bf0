# SPDX-License-Identifier: Apache-2.0
"""Configuration values as plain data and digests, the same in every process."""

import dataclasses
import enum
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from blake3 import blake3

from kvsafe.seal.identity import IdentityError

_PLAIN_DEPTH = 12


class IdentityUnknown(IdentityError):
    """A value of the identity cannot be known, so nothing may be stored or loaded."""


def run_lengths(items: Sequence[Any]) -> str:
    """`5*sliding_attention,1*full_attention`; a long pattern ends in a digest."""
    runs = [f"{len(list(group))}*{key}" for key, group in groupby(str(item) for item in items)]
    text = ",".join(runs)
    if len(text) <= 160:
        return text
    return f"{len(items)} layers, {value_digest(runs).hex()[:32]}"


def dtype_name(value: object) -> str:
    """`bfloat16` for the dtype or for its name."""
    return str(value).removeprefix("torch.")


def enum_name(value: Any) -> str:
    """The name of a choice, `auto` when none was made."""
    if value is None:
        return "auto"
    return value.name if isinstance(value, enum.Enum) else str(value)


def value_digest(value: object) -> bytes:
    """BLAKE3 over the sorted JSON text of any configuration value."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"))
    return blake3(text.encode("utf-8", "surrogatepass")).digest()


def plain(value: Any, depth: int = _PLAIN_DEPTH) -> Any:
    """A configuration value in JSON's types, without memory addresses or object order."""
    if depth == 0:
        raise IdentityUnknown("a configuration value is nested too deeply")
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item, depth - 1) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(item, depth - 1) for item in value]
    return _plain_object(value, depth)


def _plain_object(value: Any, depth: int) -> Any:
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    name = type(value).__qualname__
    if hasattr(value, "numerator"):
        return [name, int(value.numerator), int(value.denominator)]
    if dataclasses.is_dataclass(value):
        pairs: Iterable[tuple[str, Any]] = (
            (field.name, getattr(value, field.name)) for field in dataclasses.fields(value)
        )
    elif hasattr(value, "__dict__"):
        pairs = vars(value).items()
    else:
        raise IdentityUnknown(f"a configuration value of type {name} cannot be read")
    public = {key: item for key, item in pairs if not key.startswith("_")}
    return [name, plain(public, depth - 1)]

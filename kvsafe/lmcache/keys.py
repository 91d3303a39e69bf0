# SPDX-License-Identifier: Apache-2.0
"""LMCache's key text, byte for byte: `model@world_size@worker_id@hash@dtype[@layer][@tag%value]`.

LMCache joins the parts with `@` and `%` and escapes nothing. A name that holds one of them, a
space at its end, or a text over 150 bytes is another key to a server than to its writer. Such
material is refused here (1308), in both directions; it is never passed on.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kvsafe.seal.refusal import Refusal, RefusalKind

KEY_BYTES: Final = 150
"""Bytes of the key field of an lm:// request. LMCache cuts longer keys silently."""

MAX_TAGS: Final = 16
TAG_PREFIX: Final = "lmcache.tag."
"""Entries of a request's `kv_transfer_params` with this prefix become tags of its keys."""

DTYPES: Final = (
    "half", "bfloat16", "float", "double", "uint8", "int8", "int16", "int32", "int64", "bool",
    "fp8_e4m3fn", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz",
)  # fmt: skip

_NAME: Final = re.compile(r"[!-$&-?A-~](?:[ -$&-?A-~]*[!-$&-?A-~])?")
"""Printable ASCII without `@` and `%`; no space at either end, where a server would strip it."""
_BARE: Final = re.compile(r"[!-$&-?A-~]+")
"""The same without any space: tags have none at all."""
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,8}")
_HASH: Final = re.compile(r"0|-?[1-9a-f][0-9a-f]{0,63}")


def refuse_key(field_name: str, expected: str, found: object) -> Refusal:
    """The refusal of key material: it would be another key to a peer."""
    return Refusal.of(RefusalKind.PEER_KEY, field_name, expected, found)


@dataclass(frozen=True, slots=True)
class CacheKey:
    """One chunk of one worker, or with `layer` one layer of it, as LMCache names it.

    `hash` is a signed number (LMCache's `builtin` gives negative ones). `tags` keep their order:
    the same tags in another order are another key to LMCache.
    """

    model: str
    world_size: int
    worker: int
    hash: int
    dtype: str
    layer: int | None = None
    tags: tuple[tuple[str, str], ...] = field(default=())

    def text(self) -> str:
        """The key text. Only what `check` lets through is safe to send."""
        parts = [
            self.model, str(self.world_size), str(self.worker), format(self.hash, "x"), self.dtype,
        ]  # fmt: skip
        if self.layer is not None:
            parts.append(str(self.layer))
        return "@".join((*parts, *(f"{name}%{value}" for name, value in self.tags)))

    def at_layer(self, layer: int) -> "CacheKey":
        """The key of one layer of this chunk."""
        return replace(self, layer=layer)

    def layers(self, count: int) -> tuple["CacheKey", ...]:
        """The keys of layers 0 to `count` - 1."""
        return tuple(self.at_layer(layer) for layer in range(count))

    def check(self) -> Refusal | None:
        """Why LMCache could take this for another key, or None."""
        if refusal := check_name("model", self.model):
            return refusal
        numbers = {"world_size": self.world_size, "worker_id": self.worker, "layer": self.layer}
        for name, number in numbers.items():
            if number is not None and not 0 <= number < 10**9:
                return refuse_key(name, "0 to 999999999", number)
        if self.hash.bit_length() > 256:
            return refuse_key("hash", "at most 256 bits", f"{self.hash.bit_length()} bits")
        if self.dtype not in DTYPES:
            return refuse_key("dtype", ", ".join(DTYPES), self.dtype)
        return check_tags(self.tags) or check_length(self.text())


def check_name(field_name: str, text: str) -> Refusal | None:
    """Why `text` cannot stand for a model in a key, or None."""
    if _NAME.fullmatch(text):
        return None
    return refuse_key(field_name, "printable ASCII without @ and %, no space at an end", text)


def check_tags(tags: Iterable[tuple[str, str]]) -> Refusal | None:
    """Why these tags could be taken for others, or None."""
    seen: set[str] = set()
    for name, value in tags:
        for what, text in (("tag name", name), ("tag value", value)):
            if not _BARE.fullmatch(text):
                return refuse_key(what, "printable ASCII without @, % and spaces", text)
        if name in seen:
            return refuse_key("tag", "each name once", name)
        seen.add(name)
    if len(seen) > MAX_TAGS:
        return refuse_key("tags", f"at most {MAX_TAGS}", len(seen))
    return None


def check_length(text: str) -> Refusal | None:
    """Why a key text does not fit a request, or None."""
    length = len(text.encode("utf-8", "surrogatepass"))
    return refuse_key("key", f"at most {KEY_BYTES} bytes", length) if length > KEY_BYTES else None


def request_tags(params: Mapping[str, object] | None) -> tuple[tuple[str, str], ...] | Refusal:
    """The tags that a request's `kv_transfer_params` ask for, in their order."""
    tags: list[tuple[str, str]] = []
    for name, value in (params or {}).items():
        if not isinstance(name, str) or not name.startswith(TAG_PREFIX):
            continue
        if not isinstance(value, str):
            return refuse_key("tag value", "text", type(value).__name__)
        tags.append((name[len(TAG_PREFIX) :], value))
    return check_tags(tags) or tuple(tags)


def parse_key(text: str) -> CacheKey | Refusal:
    """Read a key text; only the one text that LMCache itself would print is taken.

    LMCache's server normalises (upper case, leading zeros, spaces); a key that needs it has two
    texts, so it is refused.
    """
    if refusal := check_length(text):
        return refusal
    parts = text.split("@")
    if len(parts) < 5:
        return refuse_key("key", "at least 5 parts with @ between them", len(parts))
    model, world_size, worker, hash_text, dtype, *rest = parts
    for name, number in (("world_size", world_size), ("worker_id", worker)):
        if not _NUMBER.fullmatch(number):
            return refuse_key(name, "a plain decimal number", number)
    if not _HASH.fullmatch(hash_text):
        return refuse_key("hash", "lower case hex without leading zeros", hash_text)
    layer = int(rest.pop(0)) if rest and _NUMBER.fullmatch(rest[0]) else None
    tags = [tag.split("%") for tag in rest]
    for tag in tags:
        if len(tag) != 2:
            return refuse_key("tag", "name%value", "%".join(tag))
    key = CacheKey(
        model, int(world_size), int(worker), int(hash_text, 16), dtype, layer,
        tuple((name, value) for name, value in tags),
    )  # fmt: skip
    return key.check() or key

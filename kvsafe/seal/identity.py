# SPDX-License-Identifier: Apache-2.0
"""Identity: the document that says which engine, model and setting KV bytes belong to.

`IDENTITY_FIELDS` is the one table: it generates the document, `spec/identity.md` and the
negative tests. A field is here when a difference in it gives other KV bytes, or another
meaning of the same bytes, for the same tokens and the same key. Two identities are equal
when their documents (canonical CBOR) are equal; the digest of the document is in every
header. Order matters: the first field that differs is the one that a refusal explains.
"""

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeGuard

from kvsafe.seal.cbor import CborError, decode, encode
from kvsafe.seal.refusal import bounded
from kvsafe.seal.suites import Suite

DOCUMENT_LIMIT = 65536
"""Bytes of the longest identity document that is decoded."""

_DIFFERENCE_LIMIT = 64
_TEXT_LIMIT = 1024
_TREE_DEPTH = 5
_DIGEST = re.compile(r"(?:[a-z0-9-]+:)?([0-9a-f]{64})")


class IdentityError(ValueError):
    """Our own side built an identity wrongly, or a value of it cannot be known."""


@dataclass(frozen=True, slots=True)
class IdentityField:
    """One line of the table.

    Attributes:
        name: key in the document.
        kind: text, count, flag, digest (32 bytes), list, or map.
        source: where the value is read from in vLLM's effective configuration.
        why: how a difference makes the bytes wrong.
    """

    name: str
    kind: str
    source: str
    why: str


def _fields(*rows: tuple[str, str, str, str]) -> tuple[IdentityField, ...]:
    return tuple(IdentityField(*row) for row in rows)


IDENTITY_FIELDS = (
    *_fields(
        ("format_version", "count", "kvsafe chunk format", "other header and payload rules"),
        ("engine", "text", "constant `vllm`", "another engine lays out other pages"),
        ("engine_version", "text", "`vllm.__version__`, release line", "page layout may change"),
        ("model_runner", "text", "`use_v2_model_runner`", "the runners place pages differently"),
        ("platform", "map", "`current_platform`, CPU features", "kernels pack K by CPU features"),
        ("namespace", "text", "kvsafe setting", "tenants that must not share"),
        ("model", "text", "`model_config.model`", "another model"),
        ("revision", "text", "`model_config.revision`, resolved", "another version of the weights"),
        ("weights", "digest", "content of the weight files", "same name, other weights (F02)"),
        ("draft", "map", "`speculative_config`", "draft layers have KV of their own weights"),
        ("remote_code", "text", "`trust_remote_code`, digest of *.py", "code computes the KV"),
        ("model_code", "map", "`model_impl`, runner, convert, overrides", "another model class"),
        ("model_type", "text", "`hf_config.model_type`", "another architecture"),
        ("architectures", "list", "`model_config.architectures`", "another model class"),
        ("layers", "count", "total hidden layers", "other set of pages"),
        ("layer_types", "text", "`hf_text_config.layer_types`", "which layer sees which tokens"),
        ("kv_heads", "count", "total KV heads of the model", "other page content"),
        ("head_size", "count", "`model_config.get_head_size()`", "other page content"),
        ("head_size_v", "count", "first attention group", "K and V split elsewhere"),
        ("mla", "flag", "`model_config.use_mla`", "latent pages instead of K and V"),
        ("rope", "map", "`hf_text_config.rope_parameters`", "K holds other rotations (F01)"),
        ("max_model_len", "count", "`model_config.max_model_len`", "LongRoPE picks factors by it"),
        ("max_position_embeddings", "count", "`hf_text_config`", "rope scaling starts from it"),
        ("sliding_window", "count", "effective, 0 if none", "deeper layers saw other tokens"),
        ("sliding_window_disabled", "flag", "`disable_sliding_window`", "window switched off"),
        ("attention", "map", "`attention_config`, chunk size", "backend decides page packing"),
        ("dtype", "text", "`model_config.dtype`", "activations, hence KV, rounded otherwise"),
        ("quantization", "text", "`model_config.quantization`", "weights dequantise otherwise"),
        ("quantization_config", "digest", "`model_config.quantization_config`", "the same, detail"),
        ("lora", "map", "`lora_config`, when on", "which modules an adapter changes"),
        ("hf_config", "digest", "`hf_config.to_dict()` without noise", "any other model setting"),
        ("multimodal", "map", "`multimodal_config`, processor", "other embeddings for one mm hash"),
    ),
    *_fields(
        ("kv_dtype", "text", "`cache_config.cache_dtype`, resolved", "bytes mean other numbers"),
        ("kv_quantization", "text", "KV quantisation mode", "other packing of the same size"),
        ("kv_scales", "text", "where KV scales come from", "same codes, other numbers"),
        ("kv_skip_layers", "list", "`kv_cache_dtype_skip_layers`", "these are not quantised"),
        ("kv_layout", "text", "resolved KV cache layout", "same size, other axis order (F03)"),
        ("kv_tp_replicas", "count", "`kv_cache_config.kv_tp_replicas`", "which ranks hold copies"),
        ("mamba", "map", "`cache_config`, when a group is mamba", "state dtype and checkpoints"),
        ("groups", "list", "`kv_cache_config.kv_cache_groups`", "what one block of a group holds"),
        ("block_bytes", "count", "bytes of a block on one worker", "padding between layers"),
        ("block_size", "count", "smallest group block, tokens", "blocks hold other tokens"),
        ("hash_block_size", "count", "tokens per block hash", "a key names other tokens"),
        ("blocks_per_chunk", "count", "kvsafe setting", "a chunk holds other blocks"),
        ("hash_algorithm", "text", "`prefix_caching_hash_algo`", "a key names other tokens"),
        ("none_hash", "text", "hash of the seed, or `random`", "a key names other tokens"),
        ("tp", "count", "`tensor_parallel_size`", "heads are split otherwise (F04)"),
        ("pp", "count", "`pipeline_parallel_size`", "layers are split otherwise"),
        ("pp_partition", "text", "`VLLM_PP_LAYER_PARTITION`", "layers are split otherwise"),
        ("pcp", "count", "`prefill_context_parallel_size`", "tokens are split otherwise"),
        ("dcp", "count", "`decode_context_parallel_size`", "tokens are split otherwise"),
        ("cp_interleave", "count", "`cp_kv_cache_interleave_size`", "which rank has which token"),
        ("rank_map", "text", "rank order of the engine line", "a slice belongs to another rank"),
        ("canonical_format", "text", "canonical format id, or empty", "other order in the row"),
        ("replicated", "flag", "one copy for all ranks", "the row holds one slice, not one each"),
    ),
)  # fmt: skip
"""Every field, in the order in which differences are reported."""

_BY_NAME = {field.name: field for field in IDENTITY_FIELDS}


def _is_scalar(value: object) -> bool:
    if isinstance(value, float):
        return type(value) is float and math.isfinite(value)
    if isinstance(value, str):
        return type(value) is str and len(value) <= _TEXT_LIMIT
    return value is None or type(value) in (bool, int, bytes)


def _is_tree(value: object, depth: int = _TREE_DEPTH) -> bool:
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        return all(isinstance(key, str) for key in value) and all(
            _is_tree(item, depth - 1) for item in value.values()
        )
    if isinstance(value, list | tuple):
        return all(_is_tree(item, depth - 1) for item in value)
    return _is_scalar(value)


def _is_int(value: object) -> TypeGuard[int]:
    # The exact type: an enum member would encode as a number and print as a name.
    return type(value) is int


_KINDS: dict[str, Callable[[object], bool]] = {
    "text": lambda value: isinstance(value, str) and _is_scalar(value),
    "count": lambda value: _is_int(value) and 0 <= value < 2**63,
    "flag": lambda value: isinstance(value, bool),
    "digest": lambda value: isinstance(value, bytes) and len(value) == 32,
    "list": lambda value: isinstance(value, list | tuple) and _is_tree(value),
    "map": lambda value: isinstance(value, Mapping) and _is_tree(value),
}


def _plain(value: object) -> object:
    """Copy of a tree in the types that the encoder knows."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class Identity:
    """A complete, checked identity. Build it with `Identity.of`.

    Attributes:
        values: one value for every field of the table; a private copy.
        document: canonical CBOR of `values`, at most `DOCUMENT_LIMIT` bytes.
    """

    values: Mapping[str, object]
    document: bytes

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "Identity":
        """Check `values` against the table and encode them.

        Raises `IdentityError`, naming the field, when one is missing, unknown or of
        another kind. Nothing has a default: an unknown value is refused, not left out.
        """
        _check_names(values)
        for field in IDENTITY_FIELDS:
            if not _KINDS[field.kind](values[field.name]):
                found = bounded(repr(values[field.name]))
                raise IdentityError(f"identity field {field.name} is no {field.kind}: {found}")
        copy = {field.name: _plain(values[field.name]) for field in IDENTITY_FIELDS}
        document = _encoded(copy)
        return cls(MappingProxyType(copy), document)

    def digest(self, suite: Suite) -> bytes:
        """32-byte digest of the document, as it stands in a header of `suite`."""
        return suite.digest(self.document)


def _check_names(values: Mapping[str, object]) -> None:
    for field in IDENTITY_FIELDS:
        if field.name not in values:
            raise IdentityError(f"identity field {field.name} is missing")
    for name in values:
        if name not in _BY_NAME:
            raise IdentityError(f"identity field {bounded(name)} is not in the table")


def _encoded(values: Mapping[str, object]) -> bytes:
    try:
        document = encode(values)
    except CborError as exc:
        raise IdentityError(f"identity cannot be encoded: {exc}") from None
    if len(document) > DOCUMENT_LIMIT:
        raise IdentityError(f"identity of {len(document)} bytes, at most {DOCUMENT_LIMIT}")
    return document


@dataclass(frozen=True, slots=True)
class IdentityDamaged:
    """Bytes that are no identity document, and why. A value: hostile bytes are ordinary."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def decode_identity(
    data: bytes | bytearray | memoryview, limit: int = DOCUMENT_LIMIT
) -> Mapping[str, object] | IdentityDamaged:
    """Decode a found document of at most `limit` bytes. Never raises for its content.

    Fields are not checked against the table: a document of a later version must still be
    comparable, so that a refusal can name what differs.
    """
    try:
        value = decode(data, limit=limit)
    except CborError as exc:
        return IdentityDamaged(bounded(exc))
    if not isinstance(value, dict):
        return IdentityDamaged(f"a map was expected, found {type(value).__name__}")
    return MappingProxyType(value)


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One leaf that differs, such as `groups[1].window`, with bounded text of both sides."""

    field: str
    expected: str
    found: str


class _Absent:
    def __str__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def differences(
    expected: Mapping[str, object], found: Mapping[str, object]
) -> tuple[FieldDifference, ...]:
    """Every leaf in which two documents differ: table order, then unknown names, sorted.

    At most 64 are returned. A field that one side lacks is shown as `absent`.
    """
    known = [field.name for field in IDENTITY_FIELDS]
    unknown = sorted(name for name in {*expected, *found} if name not in _BY_NAME)
    out: list[FieldDifference] = []
    for name in known + unknown:
        _compare(name, expected.get(name, _ABSENT), found.get(name, _ABSENT), out)
    return tuple(out)


def _compare(path: str, expected: object, found: object, out: list[FieldDifference]) -> None:
    if len(out) >= _DIFFERENCE_LIMIT:
        return
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in sorted({*expected, *found}):
            deeper = f"{path}.{key}"
            _compare(deeper, expected.get(key, _ABSENT), found.get(key, _ABSENT), out)
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        for index in range(max(len(expected), len(found))):
            ours = expected[index] if index < len(expected) else _ABSENT
            theirs = found[index] if index < len(found) else _ABSENT
            _compare(f"{path}[{index}]", ours, theirs, out)
    elif not _same(expected, found):
        out.append(FieldDifference(bounded(path), bounded(expected), bounded(found)))


def _same(left: object, right: object) -> bool:
    """Equality as the encoder sees it: 1, 1.0 and true are three things, and so is -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    return left == right


def parse_digest(text: str) -> bytes:
    """The 32 bytes of `[algorithm:]64 hex digits`. Raises `IdentityError` for other text."""
    match = _DIGEST.fullmatch(text.strip().lower())
    if match is None:
        raise IdentityError(f"no digest of 64 hex digits: {bounded(text)}")
    return bytes.fromhex(match.group(1))

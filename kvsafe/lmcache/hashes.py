# SPDX-License-Identifier: Apache-2.0
"""LMCache's chunk hashes: `h = H(prefix, tokens)`, from a first prefix called NONE_HASH.

| name | H | value | NONE_HASH |
|---|---|---|---|
| `builtin` | CPython's `hash((prefix, (tokens), ()))` | signed 64 bits | `hash(str(seed))` |
| `sha256_cbor`, `vllm` | SHA-256 over CBOR `[prefix, [tokens], []]` | first 8 bytes, unsigned | the same over the seed |
| `sha256` | SHA-256 over Python's serialisation (protocol 5) of the same | as above | as above |
| `blake3` | BLAKE3 over prefix and big-endian 32-bit tokens | 32 bytes | BLAKE3 of 12 zero bytes |
| `mp_sha256_cbor` | SHA-256 over CBOR `[prefix, [tokens], null]` | 32 bytes | SHA-256 over the seed |

The seed is the peers' PYTHONHASHSEED; without one, vLLM takes the text `vllm-none-hash`. For
`builtin` there is none to take: unset means random in every process, so it is refused. `sha256`
is feasible up to 8192 tokens per chunk: above, Python's serialisation splits into frames in a way
that is the library's business. A LMCache whose process has no vLLM uses `builtin` with NONE_HASH
0 whatever it was asked for; such peers are not supported, they share nothing with vLLM's.
"""  # noqa: E501

import array
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import cbor2
from blake3 import blake3

from kvsafe.lmcache.siphash import MAX_SEED, text_hash

Value = int | bytes
"""A chunk's hash: a number where LMCache folds it to 64 bits, else 32 bytes."""

DEFAULT_SEED: Final = "vllm-none-hash"
MAX_TOKEN: Final = (1 << 32) - 1
MAX_SHA256_TOKENS: Final = 8192
_TUPLE_PROBE: Final = ((1, (2, 3), ()), 190248630909402296)


@dataclass(frozen=True, slots=True)
class HashChain:
    """One way to hash chunks, with its first prefix."""

    name: str
    none_hash: Value
    step: Callable[[Value, Sequence[int]], Value]

    def number(self, value: Value) -> int:
        """The hash as the number that a lm:// key prints."""
        return int.from_bytes(value, "big") if isinstance(value, bytes) else value

    def extend(self, prefix: Value, tokens: Sequence[int]) -> Value:
        """The hash of the next chunk. Raises `ValueError` for a token outside 32 bits."""
        if any(not 0 <= token <= MAX_TOKEN for token in tokens):
            raise ValueError("token ids are 0 to 4294967295")
        return self.step(prefix, tokens)


def _fold(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _builtin(prefix: Value, tokens: Sequence[int]) -> Value:
    # Tuples of numbers hash alike in every CPython from 3.8 on, whatever its own seed is.
    return hash((prefix, tuple(tokens), ()))


def _sha256_cbor(prefix: Value, tokens: Sequence[int]) -> Value:
    return _fold(_sha256(_cbor([prefix, list(tokens), []])))


def _mp_sha256_cbor(prefix: Value, tokens: Sequence[int]) -> Value:
    return _sha256(_cbor([prefix, list(tokens), None]))


def _blake3(prefix: Value, tokens: Sequence[int]) -> Value:
    words = array.array("I", tokens)
    if sys.byteorder == "little":
        words.byteswap()
    head = prefix if isinstance(prefix, bytes) else prefix.to_bytes(32, "big")
    return blake3(head + words.tobytes()).digest()


def _serial_int(value: int) -> bytes:
    """A number in Python's serialisation, protocol 2 and up."""
    if 0 <= value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    length = value.bit_length() // 8 + 1
    return b"\x8a" + length.to_bytes(1, "little") + value.to_bytes(length, "little", signed=True)


def _serial(body: bytes) -> bytes:
    """A whole serialisation (protocol 5) of one frame. It is only ever written here."""
    frame = body + b"\x94."
    return b"\x80\x05\x95" + len(frame).to_bytes(8, "little") + frame


def _serial_text(text: str) -> bytes:
    data = text.encode("utf-8")
    return _serial(b"\x8c" + len(data).to_bytes(1, "little") + data)


def _serial_chunk(prefix: int, tokens: Sequence[int]) -> bytes:
    items = b"".join(map(_serial_int, tokens))
    if not tokens:
        inner = b")"
    elif len(tokens) <= 3:
        inner = items + b"\x85\x86\x87"[len(tokens) - 1 : len(tokens)] + b"\x94"
    else:
        inner = b"(" + items + b"t\x94"
    return _serial(_serial_int(prefix) + inner + b")\x87")


def _sha256_serial(prefix: Value, tokens: Sequence[int]) -> Value:
    if len(tokens) > MAX_SHA256_TOKENS or not isinstance(prefix, int):
        raise ValueError(f"sha256 hashes at most {MAX_SHA256_TOKENS} tokens per chunk")
    return _fold(_sha256(_serial_chunk(prefix, tokens)))


def _builtin_none(seed: str | None) -> int:
    number = int(seed) if seed is not None and seed.isascii() and seed.isdigit() else -1
    if not 0 <= number <= MAX_SEED or seed != str(number):
        raise ValueError(
            "hash_algo builtin needs none_hash_seed: the PYTHONHASHSEED that all peers share, a "
            f"plain number from 0 to {MAX_SEED}; without one every process hashes differently"
        )
    if hash(_TUPLE_PROBE[0]) != _TUPLE_PROBE[1]:
        raise ValueError("hash_algo builtin needs a 64-bit CPython")
    return text_hash(str(number), number)


ALGORITHMS: Final = ("vllm", "sha256_cbor", "sha256", "builtin", "blake3", "mp_sha256_cbor")


def hash_chain(algorithm: str, seed: str | None = None) -> HashChain:
    """The chain of this name (one of `ALGORITHMS`) and seed.

    Raises `ValueError`, with the way out in its text, for one that cannot be computed here.
    """
    text = DEFAULT_SEED if seed is None else seed
    if len(text.encode("utf-8")) > 255:
        raise ValueError("none_hash_seed is longer than 255 bytes")
    if algorithm in ("vllm", "sha256_cbor"):
        return HashChain("sha256_cbor", _fold(_sha256(_cbor(text))), _sha256_cbor)
    if algorithm == "sha256":
        return HashChain("sha256", _fold(_sha256(_serial_text(text))), _sha256_serial)
    if algorithm == "builtin":
        return HashChain("builtin", _builtin_none(seed), _builtin)
    if algorithm == "blake3":
        return HashChain("blake3", blake3(bytes(12)).digest(), _blake3)
    if algorithm == "mp_sha256_cbor":
        return HashChain("mp_sha256_cbor", _sha256(_cbor(text)), _mp_sha256_cbor)
    raise ValueError(f"unknown hash algorithm {algorithm!r}; one of {', '.join(ALGORITHMS)}")

# SPDX-License-Identifier: Apache-2.0
"""CPython's hash of a short text under a given PYTHONHASHSEED, without that interpreter.

LMCache's `builtin` chain begins with `hash(str(seed))`, which depends on the seed of the process
that computes it. CPython 3.11 and later: SipHash-1-3 (Aumasson and Bernstein, 2012, with one and
three rounds), key from a small linear congruential generator, all zeros for seed 0.
"""

from typing import Final

_MASK: Final = (1 << 64) - 1
MAX_SEED: Final = (1 << 32) - 1


def _rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & _MASK


def _round(v: list[int]) -> None:
    v[0] = (v[0] + v[1]) & _MASK
    v[2] = (v[2] + v[3]) & _MASK
    v[1] = _rotate(v[1], 13) ^ v[0]
    v[3] = _rotate(v[3], 16) ^ v[2]
    v[0] = _rotate(v[0], 32)
    v[2] = (v[2] + v[1]) & _MASK
    v[0] = (v[0] + v[3]) & _MASK
    v[1] = _rotate(v[1], 17) ^ v[2]
    v[3] = _rotate(v[3], 21) ^ v[0]
    v[2] = _rotate(v[2], 32)


def siphash13(k0: int, k1: int, data: bytes) -> int:
    """SipHash-1-3 of `data`, an unsigned 64-bit number."""
    v = [
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    ]
    whole = len(data) & ~7
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, whole, 8)]
    words.append((len(data) & 0xFF) << 56 | int.from_bytes(data[whole:], "little"))
    for word in words:
        v[3] ^= word
        _round(v)
        v[0] ^= word
    v[2] ^= 0xFF
    for _ in range(3):
        _round(v)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def seed_keys(seed: int) -> tuple[int, int]:
    """The SipHash key that CPython derives from PYTHONHASHSEED (0 to 4294967295)."""
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"PYTHONHASHSEED {seed} is outside 0 to {MAX_SEED}")
    if seed == 0:
        return 0, 0
    state, secret = seed, bytearray()
    for _ in range(16):
        state = (state * 214013 + 2531011) & 0xFFFFFFFF
        secret.append(state >> 16 & 0xFF)
    return int.from_bytes(secret[:8], "little"), int.from_bytes(secret[8:], "little")


def text_hash(text: str, seed: int) -> int:
    """`hash(text)` of a CPython with this PYTHONHASHSEED, for ASCII text."""
    data = text.encode("ascii")
    if not data:
        return 0
    value = siphash13(*seed_keys(seed), data)
    signed = value - (1 << 64) if value >> 63 else value
    return -2 if signed == -1 else signed

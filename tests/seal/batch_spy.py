# SPDX-License-Identifier: Apache-2.0
"""A libcrypto whose answers are changed, call by call, on their way to `batch.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from kvsafe.seal.batch import Native
from tests.seal.batch_rows import world_of
from tests.seal.rows import OTHER_KEY, put

_SIZE_AT = ctypes.POINTER(ctypes.c_size_t)
_POINTER = ctypes.c_void_p
KINDS: dict[str, Any] = {
    "EVP_MAC_CTX_new": ctypes.CFUNCTYPE(_POINTER, _POINTER),
    "EVP_MAC_CTX_free": ctypes.CFUNCTYPE(None, _POINTER),
    "EVP_MAC_CTX_set_params": ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER),
    "EVP_MAC_init": ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, ctypes.c_size_t, _POINTER),
    "EVP_MAC_update": ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, ctypes.c_size_t),
    "EVP_MAC_final": ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, _SIZE_AT, ctypes.c_size_t),
    "CRYPTO_memcmp": ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, ctypes.c_size_t),
}
FALLIBLE = ("EVP_MAC_CTX_set_params", "EVP_MAC_init", "EVP_MAC_update", "EVP_MAC_final")
STATES = ("EVP_MAC_CTX_new", "EVP_MAC_CTX_free")


Change = Callable[[int, Any, tuple[Any, ...]], Any]


def quiet(number: int, result: Any, arguments: tuple[Any, ...]) -> Any:
    """Nothing is changed: for the calls to be counted."""
    return result


def failing(at: int, told: int = 0) -> Change:
    """Call `at` is said to have failed: with `told`, which is not 1."""
    return lambda number, result, _: told if number == at else result


def shortening(at: int) -> Change:
    """The tag of call `at` of `EVP_MAC_final` is said to be a byte shorter."""

    def change(number: int, result: Any, arguments: tuple[Any, ...]) -> Any:
        arguments[2][0] -= number == at
        return result

    return change


def late_header() -> tuple[bytearray, bytes]:
    """A row with an authentic header of another key, and one of ours that nobody tagged.

    Behind either of them lie our slices.
    """
    world = world_of("two writers")
    row, ours = world.chunk(), world.chunk()
    put(ours, "sealed_at", 1)
    row[:4096] = world.chunk(OTHER_KEY)[:4096]
    return row, bytes(ours[:4096])


class Spied:
    """A `Native` whose calls of one function of libcrypto go through Python.

    `change(number, result, arguments)` is called after call `number` (from 0) and gives what C is
    told. The true call has been made, so that only a caller that looks at the result can tell.
    """

    def __init__(self, native: Native, name: str, change: Change) -> None:
        kind = KINDS[name]
        true = kind(getattr(native.crypto, name))
        self.calls = 0

        def call(*arguments: Any) -> Any:
            number, self.calls = self.calls, self.calls + 1
            return change(number, true(*arguments), arguments)

        door = kind(call)
        crypto: Any = type(native.crypto).from_buffer_copy(native.crypto)
        setattr(crypto, name, ctypes.cast(door, ctypes.c_void_p).value)
        # C may call it for as long as the table lives.
        crypto.kept = door
        self.native = Native(native.library, crypto)

# SPDX-License-Identifier: Apache-2.0
"""The door to `batch.c`: many rows opened in one call, without the interpreter's lock.

Its answer is yes only for a row that is exactly one that this engine would have sealed itself, and
that `Opener.open` accepts; for every other row the answer is "not here", and `Opener` opens it and
says what it is. So there is one judge of what is wrong, and a quick way for what is right. The
template that headers are compared with is a header that our own sealer has written.

Suite `aes256-gmac` only, whose parts are OpenSSL's: the libcrypto that Python's own `hashlib` has
loaded, by its documented functions (`EVP_MAC`, OpenSSL 3.0 and later). Where there is no C compiler
or no such library, and for rows so long that `cryptography`'s newer OpenSSL is faster, there is no
batch opener. Measured in `spec/decisions/0014-opening-in-batches.md`.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvsafe.native import load_beside, sizes_of
from kvsafe.seal.header import bitmap
from kvsafe.seal.layout import FIXED, MAX_KEY_BYTES, LayoutError, RowLayout
from kvsafe.seal.opening import Expectation, Opener
from kvsafe.seal.refusal import Refusal
from kvsafe.seal.sealing import HeaderSealer, SealSetting, SliceSealer, slice_context
from kvsafe.seal.suites import TAG_BYTES, Suite

MOST_ROW_BYTES = 256 << 10
"""Longer rows are opened one by one: their hash is all that counts, and there it is faster."""
MOST_HEADER_BYTES = 16384
"""`HEAD_MOST` of `batch.c`: of a header it makes a copy on its stack."""
MEANING = 1
"""Of `batch.c`: another number whenever it does something else with the same structures."""
TIME_AT = 40
"""Where a header says when it was sealed."""
LIBCRYPTO = "libcrypto.so.3"
_CALLS = (
    "EVP_MAC_CTX_new",
    "EVP_MAC_CTX_free",
    "EVP_MAC_CTX_set_params",
    "EVP_MAC_init",
    "EVP_MAC_update",
    "EVP_MAC_final",
    "CRYPTO_memcmp",
)


class _Crypto(ctypes.Structure):
    """`struct crypto`: functions and algorithms of libcrypto."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in (*_CALLS, "hmac", "gmac"))


class _Slice(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("context", ctypes.c_void_p),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("header_bytes", ctypes.c_int64),
        ("tail_at", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("key_bytes", ctypes.c_int64),
        ("slices", ctypes.c_int64),
        ("head", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("header_key", ctypes.c_void_p),
        ("slice_key", ctypes.c_void_p),
    )


class BatchOpener:
    """Opens rows of one engine, with keys of one length, many in a call. Thread-safe.

    Made by `batch_opener`, which tries it before it hands it out.
    """

    def __init__(self, native: "Native", want: Expectation, key_bytes: int) -> None:
        layout, ring = want.layout, want.keyring
        self._native = native
        self._key_bytes = key_bytes
        self._row_bytes = layout.row_bytes
        contexts = [
            _held(slice_context(want.identity_digest, 0, 0, place, bytes(key_bytes)))
            for place in layout.slices
        ]
        places = (_Slice * len(contexts))(
            *(
                _Slice(layout.header_bytes + place.offset, place.length, ctypes.addressof(context))
                for place, context in zip(layout.slices, contexts, strict=True)
            )
        )
        head = _held(sealed_row(want, bytes(key_bytes), 0, 0)[: layout.header_bytes])
        keys = [_held(ring.subkey(ring.active, purpose)) for purpose in ("header", "slice")]
        # What C is told the addresses of.
        self._kept = (contexts, places, head, keys)
        self._rows = _Rows(
            layout.header_bytes,
            layout.header_bytes + layout.payload_bytes,
            layout.row_bytes,
            key_bytes,
            len(contexts),
            ctypes.addressof(head),
            ctypes.addressof(places),
            *map(ctypes.addressof, keys),
        )

    def right(self, rows: Sequence[memoryview], keys: Sequence[bytes], epoch: int) -> list[bool]:
        """Per row (uint8, writable, contiguous) whether it is surely right for its key.

        False says nothing: `Opener.open` is to be asked. Raises `ValueError` for another number of
        keys than rows, `OverflowError` for no epoch, and `BufferError` or `TypeError` for memory
        that C cannot be given.
        """
        if len(rows) != len(keys):
            raise ValueError(f"{len(rows)} rows and {len(keys)} keys")
        if any(row.nbytes != self._row_bytes for row in rows) or any(
            len(key) != self._key_bytes for key in keys
        ):
            return [False] * len(rows)
        answers = (ctypes.c_uint8 * len(rows))()
        # They stay exported meanwhile, so that none is unmapped.
        held = [ctypes.c_char.from_buffer(row) for row in rows]
        self._native.library.kvsafe_open(
            ctypes.c_int64(len(rows)),
            (ctypes.c_void_p * len(rows))(*map(ctypes.addressof, held)),
            (ctypes.c_char_p * len(rows))(*keys),
            epoch.to_bytes(8, "little"),
            ctypes.byref(self._rows),
            ctypes.byref(self._native.crypto),
            answers,
        )
        return [answer == 1 for answer in answers]


@dataclass(frozen=True, slots=True)
class Native:
    """`batch.c` and the functions that it calls."""

    library: ctypes.CDLL
    crypto: _Crypto

    @classmethod
    def of(cls, library: ctypes.CDLL) -> "Native":
        """Raises `ValueError`, `AttributeError` or `OSError` for what does not fit together."""
        sizes = tuple(map(ctypes.sizeof, (_Crypto, _Slice, _Rows)))
        if sizes_of(library, "kvsafe_seal_sizes", 4) != (MEANING, *sizes):
            raise ValueError("a shared object of another version")
        library.kvsafe_open.restype = None
        return cls(library, _crypto(ctypes.CDLL(LIBCRYPTO)))


@lru_cache(maxsize=1)
def native() -> Native | None:
    """What was built beside this file; None where it was not, or there is no OpenSSL 3."""
    return load_beside(Path(__file__).parent, "_batch", Native.of)


def batch_opener(want: Expectation, key_bytes: int) -> BatchOpener | None:
    """A batch opener for rows of `want`, that was tried; None where rows are opened one by one."""
    layout = want.layout
    if (
        want.suite is not Suite.AES256_GMAC
        or layout.row_bytes > MOST_ROW_BYTES
        or layout.header_bytes > MOST_HEADER_BYTES
        or not 1 <= key_bytes <= MAX_KEY_BYTES
        or not _within_row(layout)
    ):
        return None
    found = native()
    if found is None:
        return None
    try:
        made = BatchOpener(found, want, key_bytes)
    except LayoutError:  # an engine that could not seal a row with such keys either
        return None
    return made if _knows_right_from_wrong(made, want, key_bytes) else None


def _within_row(layout: RowLayout) -> bool:
    """Whether C would stay inside a row: what a layout that was planned always says."""
    return layout.header_bytes + layout.payload_bytes <= layout.row_bytes and all(
        place.offset >= 0 and place.offset + place.length <= layout.payload_bytes
        for place in layout.slices
    )


def sealed_row(want: Expectation, key: bytes, epoch: int, generation: int) -> bytearray:
    """A whole row of zeros as this engine would seal it."""
    row = memoryview(bytearray(want.layout.row_bytes))
    setting = SealSetting(
        want.suite, want.keyring, want.layout, want.identity_document, want.identity_digest
    )
    for index in range(len(want.layout.slices)):
        SliceSealer(setting, index).seal_slice(row, key, epoch, generation)
    slots = want.layout.slots
    refusal = HeaderSealer(setting, want.geometry_document).seal(
        row, key, epoch, generation, bitmap(slots, range(slots))
    )
    if refusal is not None:
        raise ValueError(f"a row that was just sealed is refused: {refusal}")
    return bytearray(row)


def _knows_right_from_wrong(opener: BatchOpener, want: Expectation, key_bytes: int) -> bool:
    """Whether it says yes to a row of ours, and to nothing else that is tried.

    For a compiler, a library or a processor that does not do what it should, and for an engine
    whose own rows `Opener` does not open.
    """
    key, other, epoch = b"k" * key_bytes, b"o" * key_bytes, 5
    row = memoryview(sealed_row(want, key, epoch, 3))
    if isinstance(Opener(want).open(row, key, epoch), Refusal):
        return False
    asked = ((key, epoch), (other, epoch), (key, epoch + 1))
    if [opener.right([row], [name], at) for name, at in asked] != [[True], [False], [False]]:
        return False
    for at in _telling(want.layout):
        for tagged in (False, True):
            changed = memoryview(bytearray(row))
            changed[at] ^= 1
            if tagged:
                _tag_header(want, changed)
            if opener.right([changed], [key], epoch) != [at == TIME_AT and tagged]:
                return False
    return opener.right([row, row], [key, key], epoch) == [True, True]


def _tag_header(want: Expectation, row: memoryview) -> None:
    """Tag a header anew, as one does who has the key and no good intentions."""
    ring, at = want.keyring, want.layout.header_bytes - TAG_BYTES
    row[at : at + TAG_BYTES] = want.suite.tag(ring.subkey(ring.active, "header"), row[:at])


def _telling(layout: RowLayout) -> set[int]:
    """Bytes that a seal holds: of each part of the header, of its tags, of slices and tail.

    And the one of the time, which decides nothing.
    """
    record, end = layout.record_offset(0), layout.header_bytes + layout.payload_bytes
    head = {0, 24, 32, TIME_AT, 48, 80, FIXED.size, record - 1, record, record + 24, record + 63}
    ends = {
        layout.header_bytes + place.offset + at
        for place in layout.slices
        for at in (0, place.length - 1)
    }
    tail = {end, layout.row_bytes - 1} if end < layout.row_bytes else set()
    return head | ends | tail


def _crypto(libcrypto: ctypes.CDLL) -> _Crypto:
    """Raises `AttributeError` for a library without these functions, else `ValueError`."""
    calls = [ctypes.cast(getattr(libcrypto, name), ctypes.c_void_p).value for name in _CALLS]
    fetch = libcrypto.EVP_MAC_fetch
    fetch.restype = ctypes.c_void_p
    fetch.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    # What fails leaves no error behind for whoever uses the library next in this thread.
    libcrypto.ERR_set_mark()
    # Kept for as long as the process lives.
    algorithms = [fetch(None, name, None) for name in (b"HMAC", b"GMAC")]
    libcrypto.ERR_pop_to_mark()
    if not all(algorithms):
        raise ValueError("a libcrypto without HMAC or GMAC")
    return _Crypto(*calls, *algorithms)


def _held(data: bytes | bytearray) -> "ctypes.Array[ctypes.c_char]":
    """Bytes at an address that stays."""
    return (ctypes.c_char * len(data)).from_buffer_copy(data)

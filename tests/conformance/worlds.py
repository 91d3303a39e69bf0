# SPDX-License-Identifier: Apache-2.0
"""The same engine for both readers, and what each of them says about a row."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from conformance.reader.chunk_reader import Expected, Verdict, judge
from kvsafe.seal.cbor import encode
from kvsafe.seal.header import bitmap
from kvsafe.seal.keyring import Keyring, SealKey
from kvsafe.seal.layout import RowLayout
from kvsafe.seal.opening import Expectation, Opener
from kvsafe.seal.refusal import Refusal
from kvsafe.seal.sealing import HeaderSealer, SealSetting, SliceSealer
from kvsafe.seal.suites import Suite
from tests.conformance.rows import Draft

SUITES = ("aes256-gmac", "blake3-keyed", "hmac-sha256", "blake3")
SECRET = bytes((31 * i * i + 7 * i + 5) % 251 for i in range(32))
OLDER = bytes((17 * i * i + 3 * i + 11) % 251 for i in range(32))
KEY = bytes(range(100, 132)) + (1).to_bytes(4, "big")
IDENTITY = {"engine": "vllm", "layers": 28, "mla": False, "rope": {"theta": 1e6, "type": "default"}}
GEOMETRY = {"workers": [[[0, 1], b"\xa1\x61g\x02"]]}


class Both(NamedTuple):
    """What the two readers say: number of the refusal, 0 for a row that is accepted."""

    reader: int
    kvsafe: int


def content(seed: int, length: int) -> bytes:
    """Bytes that look like KV and differ from seed to seed."""
    return bytes((seed * 37 + i * 11 + i * i // 7) % 256 for i in range(length))


def layout(identity: bytes, key: bytes, slots: int, lengths: tuple[int, ...]) -> RowLayout:
    """kvsafe's own plan of a row."""
    return RowLayout.plan(
        identity_bytes=len(identity), key_bytes=len(key), slots=slots, slice_bytes=lengths
    )


def draft(suite: str, lengths: tuple[int, ...] = (300,), slots: int = 1) -> Draft:
    """A row that is right in every part, of an engine with one writer per length."""
    identity = encode(IDENTITY)
    return Draft(
        suite=suite,
        secret=SECRET,
        key=KEY,
        epoch=3,
        generation=7,
        identity=identity,
        geometry=encode(GEOMETRY),
        slots=slots,
        coverage=bitmap(slots, range(slots)),
        slices=tuple(content(rank, length) for rank, length in enumerate(lengths)),
        header_bytes=layout(identity, KEY, slots, lengths).header_bytes,
        sealed_at=1_700_000_000,
    )


def keyring(suite: str, secrets: tuple[bytes, ...]) -> Keyring:
    """kvsafe's ring of these secrets, the active one first."""
    if suite == "blake3":
        return Keyring.unkeyed()
    active, *older = map(SealKey.of, secrets)
    return Keyring(Suite.named(suite).label, active, name_secret=OLDER, older=older)


def seal_with_kvsafe(made: Draft) -> bytes:
    """The row that kvsafe's own sealers make of the content of `made`."""
    suite = Suite.named(made.suite)
    lengths = tuple(map(len, made.slices))
    place = layout(made.identity, made.key, made.slots, lengths)
    ring = keyring(made.suite, (made.secret,))
    setting = SealSetting(suite, ring, place, made.identity, suite.digest(made.identity))
    row = memoryview(bytearray(b"\xee") * place.row_bytes)
    row[place.header_bytes + place.payload_bytes :] = bytes(
        place.row_bytes - place.header_bytes - place.payload_bytes
    )
    for rank, (end, data) in enumerate(zip(accumulate(lengths), made.slices, strict=True)):
        start = place.header_bytes + end - len(data)
        row[start : start + len(data)] = data
        SliceSealer(setting, rank).seal_slice(row, made.key, made.epoch, made.generation)
    sealer = HeaderSealer(setting, made.geometry)
    no = sealer.seal(row, made.key, made.epoch, made.generation, made.coverage)
    if no is not None:
        raise ValueError(str(no))
    return bytes(row)


@lru_cache(maxsize=64)
def opener(expected: Expected) -> Opener:
    """kvsafe's opener with the same expectation."""
    suite = Suite.named(expected.suite)
    lengths = tuple(length for _, length in expected.slices)
    place = layout(expected.identity, expected.key, expected.slots, lengths)
    if (place.header_bytes, place.payload_bytes) != (expected.header_bytes, expected.payload_bytes):
        raise ValueError("the expectation is not one that kvsafe can plan")
    ring = keyring(expected.suite, expected.secrets)
    digest = suite.digest(expected.identity)
    return Opener(Expectation(suite, ring, place, expected.identity, digest, expected.geometry))


def ask(row: bytes, expected: Expected) -> Both:
    """Let both readers judge the row."""
    found: Verdict = judge(row, expected)
    answer = opener(expected).open(
        memoryview(bytearray(row)), expected.key, expected.epoch, expected.wanted
    )
    return Both(found.number, answer.number if isinstance(answer, Refusal) else 0)

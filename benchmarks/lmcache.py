# SPDX-License-Identifier: Apache-2.0
"""Our lm:// client against LMCache's own, on one server of LMCache's, in one run.

    conformance/lmcache/setup && python -m benchmarks.lmcache [--json] [--rounds N]

`times` is theirs / ours per round, median and range: above 1.0 we are faster. A put ends, on both
sides, when the server has said that it has the last chunk. What a reader of ours does after the
bytes are here is part of its time: `header` compares the reply with what was asked, `peer` looks
at the values too (trust: peer), `attested` fetches the companion as well and opens the chunk in
all ten steps (trust: attested). LMCache's client checks nothing.

Ours moves chunks as the tier does: each by itself, companion first, with the tier's four threads.
LMCache's own has one connection and asks for one chunk after the other, as its engine does.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy

from benchmarks.report import arguments, paired, show, timed
from benchmarks.seal_open import GEOMETRY, IDENTITY
from conformance.lmcache.peers.servers import ROOT, NotHere, lm_server, peer_python
from conformance.lmcache.wire import pattern
from kvsafe.lmcache.answers import ChunkShape, Fetch, Found, Offer
from kvsafe.lmcache.companion import Companions
from kvsafe.lmcache.content import judge_content
from kvsafe.lmcache.frames import Dtype
from kvsafe.lmcache.links import LinkSetting
from kvsafe.lmcache.lmclient import LmClient
from kvsafe.lmcache.wire import Address
from kvsafe.seal.header import bitmap
from kvsafe.seal.keyring import DEFAULT_SUITE, Keyring, SealKey
from kvsafe.seal.layout import RowLayout
from kvsafe.seal.opening import Expectation, Opener
from kvsafe.seal.refusal import Refusal
from kvsafe.seal.sealing import HeaderSealer, SealSetting, SliceSealer
from kvsafe.seal.suites import Suite

DIMS = (2, 4, 256, 256)
MIB = math.prod(DIMS) * 2
SHAPE = ChunkShape(1, 3, DIMS, MIB)
COUNTS = (1, 16)
KEYS = 64
THREADS = 4


class Theirs:
    """LMCache's client in its own environment, one line per question."""

    def __init__(self, address: tuple[str, int]) -> None:
        command = [
            str(peer_python()),
            "-m",
            "benchmarks.lmcache_theirs",
            address[0],
            str(address[1]),
        ]
        self._process = subprocess.Popen(
            [*command, *map(str, DIMS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "LMCACHE_TRACK_USAGE": "false"},
        )

    def time(self, verb: str, first: int, count: int) -> float:
        """Seconds of one call; raises RuntimeError when it did not do its work."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipes")
        self._process.stdin.write(f"{verb} {first} {count}\n")
        self._process.stdin.flush()
        took = float(self._process.stdout.readline() or "nan")
        if math.isnan(took):
            raise RuntimeError(f"LMCache's client failed at {verb}")
        return took

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Sealed:
    """One sealed row of 1 MiB, the opener for it, and its companions."""

    def __init__(self) -> None:
        suite, self.key = Suite.named(DEFAULT_SUITE), os.urandom(36)
        keyring = Keyring(suite.label, SealKey.of(os.urandom(32)), name_secret=os.urandom(32))
        digest = suite.digest(IDENTITY)
        layout = RowLayout.plan(
            identity_bytes=len(IDENTITY), key_bytes=36, slots=1, slice_bytes=(MIB,)
        )
        self._layout = layout
        self._place(memoryview(bytearray(layout.row_bytes)))
        self.payload[:] = _numbers()
        setting = SealSetting(suite, keyring, layout, IDENTITY, digest)
        SliceSealer(setting, 0).seal_slice(self.row, self.key, 0, 1)
        HeaderSealer(setting, GEOMETRY).seal(self.row, self.key, 0, 1, bitmap(1, [0]))
        self.companions = Companions(suite, keyring, layout.header_bytes)
        self._opener = Opener(Expectation(suite, keyring, layout, IDENTITY, digest, GEOMETRY))

    def copy(self) -> Sealed:
        """Another row with the same chunk."""
        other = copy(self)
        other._place(memoryview(bytearray(self.row)))
        return other

    def _place(self, row: memoryview) -> None:
        first = self._layout.header_bytes
        self.row, self.header = row, row[:first]
        self.payload = row[first : first + MIB]

    def open(self, companion: memoryview, chunk: memoryview, name: str) -> None:
        """Judge the companion, put the row together, open it; raises when it is refused."""
        refusal = self.companions.judge(companion, [(name, MIB)])
        self.header[:] = companion[: len(self.header)]
        self.payload[:] = chunk
        if refusal is not None or isinstance(
            self._opener.open(self.row, self.key, 0, (0,)), Refusal
        ):
            raise RuntimeError("our own chunk was refused")


class Ours:
    """Our client, one row and one companion per chunk, as many threads as the tier has."""

    def __init__(self, address: tuple[str, int]) -> None:
        setting = LinkSetting(Address(*address), connections=THREADS, deadline_s=60.0)
        self._client = LmClient(setting)
        self._threads = ThreadPoolExecutor(THREADS)
        sealed = Sealed()
        self._rows = [sealed, *(sealed.copy() for _ in range(max(COUNTS) - 1))]
        self._into = [memoryview(bytearray(MIB)) for _ in self._rows]
        length = sealed.companions.length
        self._tails = [memoryview(bytearray(length)) for _ in self._rows]
        self._small = ChunkShape(4, 6, (length, 0, 0, 0), length)

    def put(self, at: int, key: str) -> None:
        """Store a chunk."""
        self._expect(self._client.store([Offer(key, SHAPE, self._rows[at].payload)]), Found.STORED)

    def put_attested(self, at: int, key: str) -> None:
        """Store chunk and companion; the row is sealed before, in the engine's own time."""
        row = self._rows[at]
        companion = row.companions.make(row.header, [(key, MIB)])
        offers = [
            Offer(key, SHAPE, row.payload),
            Offer(_beside(key), self._small, memoryview(companion)),
        ]
        self._expect(self._client.store(offers), Found.STORED)

    def get(self, at: int, key: str) -> None:
        """Fetch a chunk."""
        self._expect(self._client.fetch([Fetch(key, SHAPE, self._into[at])]), Found.HIT)

    def get_peer(self, at: int, key: str) -> None:
        """Fetch a chunk and look at its values."""
        self.get(at, key)
        if judge_content(self._into[at], Dtype.BFLOAT16, DIMS) is not None:
            raise RuntimeError("values were refused")

    def get_attested(self, at: int, key: str) -> None:
        """Fetch companion and chunk, and open."""
        items = [
            Fetch(_beside(key), self._small, self._tails[at]),
            Fetch(key, SHAPE, self._into[at]),
        ]
        self._expect(self._client.fetch(items), Found.HIT)
        self._rows[at].open(self._tails[at], self._into[at], key)

    def all_of(self, action: Callable[[int, str], None], first: int, count: int) -> None:
        """Do it for so many chunks, from key number `first` on."""
        keys = [_key(first + at) for at in range(count)]
        if count == 1:
            action(0, keys[0])
            return
        for _ in self._threads.map(action, range(count), keys):
            pass

    def _expect(self, answers: Sequence[object], wanted: Found) -> None:
        if any(answer is not wanted for answer in answers):
            raise RuntimeError(f"our client: {answers}")

    def close(self) -> None:
        """Let go of threads and connections."""
        self._threads.shutdown()
        self._client.close()


def _numbers() -> bytes:
    """A payload that a model could have made: no infinities, no zero tokens."""
    return pattern(MIB, 1).translate(bytes((byte & 0x3F) | 1 for byte in range(256)))


def _key(number: int) -> str:
    return f"bench@1@0@{number:x}@bfloat16"


def _beside(key: str) -> str:
    return key.replace("@bfloat16", "@uint8@kvsafe%1")


def main() -> int:
    """Start the server, take turns, print."""
    options = arguments("our lm:// client against LMCache's", rounds=15)
    rows: list[dict[str, object]] = []
    try:
        with lm_server() as address:
            ours, theirs = Ours(address), Theirs(address)
            try:
                for count in COUNTS:
                    rows += _measure(ours, theirs, count, options.rounds)
            finally:
                ours.close()
                theirs.close()
    except NotHere as error:
        print(f"lmcache benchmark left out: {error}", file=sys.stderr)
        return 0
    show(rows, as_json=options.json)
    return 0


def _measure(ours: Ours, theirs: Theirs, count: int, rounds: int) -> list[dict[str, object]]:
    kinds: tuple[tuple[str, str, Callable[[int, str], None]], ...] = (
        ("put", "header", ours.put),
        ("put", "attested", ours.put_attested),
        ("get", "header", ours.get),
        ("get", "peer", ours.get_peer),
        ("get", "attested", ours.get_attested),
    )
    for first in range(0, KEYS, max(COUNTS)):
        ours.all_of(ours.put_attested, first, max(COUNTS))
    rows: list[dict[str, object]] = []
    for verb, checks, action in kinds:
        found = paired(
            lambda action=action: timed(lambda: ours.all_of(action, 0, count)),  # type: ignore[misc]
            lambda verb=verb: theirs.time(verb, KEYS if verb == "put" else 0, count),  # type: ignore[misc]
            rounds,
        )
        speed = count * MIB / (1 << 20)
        rows.append(
            {
                "call": verb,
                "chunks": count,
                "checks": checks,
                "ours_MiB_s": speed / found.ours,
                "theirs_MiB_s": speed / found.theirs,
                "times": 1 / found.ratio,
                "low": 1 / found.ratio_high,
                "high": 1 / found.ratio_low,
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())

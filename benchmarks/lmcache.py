# SPDX-License-Identifier: Apache-2.0
"""Our lm:// client against LMCache's own, on one server of LMCache's, in one run.

    conformance/lmcache/setup && python -m benchmarks.lmcache [--json] [--rounds N]

`times` is theirs / ours per round, median and range: above 1.0 we are faster. A put ends, on both
sides, when the server has said that it has the last chunk. What a reader of ours does after the
bytes are here is part of its time: `header` compares the reply with what was asked, `peer` looks
at the values too (trust: peer), `attested` fetches the companion as well and opens the chunk in
all ten steps (trust: attested). LMCache's client checks nothing.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

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
from kvsafe.seal.keyring import Keyring, SealKey
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
        suite, self.key = Suite.BLAKE3_KEYED, os.urandom(36)
        keyring = Keyring("blake3-keyed", SealKey.of(os.urandom(32)), name_secret=os.urandom(32))
        digest = suite.digest(IDENTITY)
        layout = RowLayout.plan(
            identity_bytes=len(IDENTITY), key_bytes=36, slots=1, slice_bytes=(MIB,)
        )
        self.row = memoryview(bytearray(layout.row_bytes))
        self.header = self.row[: layout.header_bytes]
        self.payload = self.row[layout.header_bytes : layout.header_bytes + MIB]
        self.payload[:] = _numbers()
        setting = SealSetting(suite, keyring, layout, IDENTITY, digest)
        SliceSealer(setting, 0).seal_slice(self.row, self.key, 0, 1)
        HeaderSealer(setting, GEOMETRY).seal(self.row, self.key, 0, 1, bitmap(1, [0]))
        self.companions = Companions(suite, keyring, layout.header_bytes)
        self._opener = Opener(Expectation(suite, keyring, layout, IDENTITY, digest, GEOMETRY))

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
    """Our client, one row and one companion per chunk in flight."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._client = LmClient(LinkSetting(Address(*address), connections=1, deadline_s=60.0))
        self._sealed = Sealed()
        self._rows = [memoryview(bytearray(MIB)) for _ in range(max(COUNTS))]
        length = self._sealed.companions.length
        self._tails = [memoryview(bytearray(length)) for _ in self._rows]
        self._small = ChunkShape(4, 6, (length, 0, 0, 0), length)

    def put(self, first: int, count: int) -> None:
        """Store chunks."""
        keys = [_key(first + at) for at in range(count)]
        self._expect(
            self._client.store([Offer(key, SHAPE, self._sealed.payload) for key in keys]),
            Found.STORED,
        )

    def put_attested(self, first: int, count: int) -> None:
        """Store chunks and their companions; the row is sealed before, in the engine's own time."""
        offers = []
        for at in range(count):
            key = _key(first + at)
            companion = self._sealed.companions.make(self._sealed.header, [(key, MIB)])
            offers.append(Offer(key, SHAPE, self._sealed.payload))
            offers.append(Offer(_beside(key), self._small, memoryview(companion)))
        self._expect(self._client.store(offers), Found.STORED)

    def get(self, first: int, count: int) -> None:
        """Fetch chunks."""
        items = [Fetch(_key(first + at), SHAPE, self._rows[at]) for at in range(count)]
        self._expect(self._client.fetch(items), Found.HIT)

    def get_peer(self, first: int, count: int) -> None:
        """Fetch chunks and look at their values."""
        self.get(first, count)
        for row in self._rows[:count]:
            if judge_content(row, Dtype.BFLOAT16, DIMS) is not None:
                raise RuntimeError("values were refused")

    def get_attested(self, first: int, count: int) -> None:
        """Fetch chunks and companions, and open."""
        items = []
        for at in range(count):
            key = _key(first + at)
            items.append(Fetch(key, SHAPE, self._rows[at]))
            items.append(Fetch(_beside(key), self._small, self._tails[at]))
        self._expect(self._client.fetch(items), Found.HIT)
        for at in range(count):
            self._sealed.open(self._tails[at], self._rows[at], _key(first + at))

    def _expect(self, answers: Sequence[object], wanted: Found) -> None:
        if any(answer is not wanted for answer in answers):
            raise RuntimeError(f"our client: {answers}")

    def close(self) -> None:
        """Let go of the connection."""
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
    kinds: tuple[tuple[str, str, Callable[[int, int], None]], ...] = (
        ("put", "header", ours.put),
        ("put", "attested", ours.put_attested),
        ("get", "header", ours.get),
        ("get", "peer", ours.get_peer),
        ("get", "attested", ours.get_attested),
    )
    ours.put_attested(0, KEYS)
    rows: list[dict[str, object]] = []
    for verb, checks, action in kinds:
        found = paired(
            lambda action=action: timed(lambda: action(0, count)),  # type: ignore[misc]
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

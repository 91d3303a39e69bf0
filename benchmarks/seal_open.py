# SPDX-License-Identifier: Apache-2.0
"""Seal and open against the bare hash of the suite over the same payload bytes, one thread.

    python -m benchmarks.seal_open [--json] [--rounds N]

`of_bare` is the throughput of seal or open as a part of the bare tag's of the same suite: 1.00
would be free. `of_blake3` is the same against bare BLAKE3, whatever the suite.
"""

import hashlib
import os
import sys
from functools import partial

from blake3 import blake3

from benchmarks.report import arguments, paired, show, timed
from kvsafe.seal.cbor import encode
from kvsafe.seal.header import bitmap
from kvsafe.seal.keyring import DEFAULT_SUITE, Keyring, SealKey
from kvsafe.seal.layout import RowLayout
from kvsafe.seal.opening import Expectation, Opener
from kvsafe.seal.sealing import HeaderSealer, SealSetting, SliceSealer
from kvsafe.seal.suites import Suite, gmac

KIB = 1024
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
IDENTITY = encode({"document": "x" * 1500})
GEOMETRY = encode({"document": "y" * 400})


class Bench:
    """One suite at one payload size: a row that can be sealed and opened again and again."""

    def __init__(self, suite: Suite, payload: int) -> None:
        self.suite = suite
        keyring = _keyring(suite)
        layout = RowLayout.plan(
            identity_bytes=len(IDENTITY), key_bytes=36, slots=1, slice_bytes=(payload,)
        )
        setting = SealSetting(suite, keyring, layout, IDENTITY, suite.digest(IDENTITY))
        self.slice_sealer = SliceSealer(setting, 0)
        self.header_sealer = HeaderSealer(setting, GEOMETRY)
        self.expectation = Expectation(
            suite, keyring, layout, IDENTITY, suite.digest(IDENTITY), GEOMETRY
        )
        self.opener = Opener(self.expectation)
        self.row = memoryview(bytearray(os.urandom(layout.row_bytes)))
        self.payload = self.row[layout.header_bytes : layout.header_bytes + payload]
        self.key = os.urandom(36)
        self.secret = os.urandom(32)
        self.repeat = max(1, (32 << 20) // payload)
        self.seal()

    def seal(self) -> None:
        """Tag the slice and close the header."""
        self.slice_sealer.seal_slice(self.row, self.key, 0, 1)
        self.header_sealer.seal(self.row, self.key, 0, 1, bitmap(1, [0]))

    def open(self) -> None:
        """All ten steps."""
        self.opener.open(self.row, self.key, 0, (0,))

    def bare(self) -> None:
        """The hash of the suite over the payload, and nothing else."""
        if self.suite is Suite.AES256_GMAC:
            gmac(self.secret, self.payload)
        elif self.suite is Suite.HMAC_SHA256:
            hashlib.sha256(self.payload).digest()
        elif self.suite is Suite.BLAKE3:
            blake3(self.payload).digest()
        else:
            blake3(self.payload, key=self.secret).digest()

    def bare_blake3(self) -> None:
        """BLAKE3 over the payload, whatever the suite is."""
        blake3(self.payload).digest()

    def time(self, name: str) -> float:
        """Seconds per call."""
        action = getattr(self, name)
        return timed(lambda: [action() for _ in range(self.repeat)]) / self.repeat


def _keyring(suite: Suite) -> Keyring:
    if suite is Suite.BLAKE3:
        return Keyring.unkeyed()
    return Keyring(
        suite.label,
        SealKey.of(os.urandom(32)),
        name_secret=os.urandom(32),
    )


def main() -> int:
    """Run and print."""
    options = arguments("seal and open against the bare hash", 15)
    rows: list[dict[str, object]] = []
    for suite in Suite:
        for size in SIZES:
            bench = Bench(suite, size)
            for name in ("seal", "open"):
                result = paired(
                    partial(bench.time, name), partial(bench.time, "bare"), options.rounds
                )
                plain = paired(
                    partial(bench.time, name), partial(bench.time, "bare_blake3"), options.rounds
                )
                rows.append(
                    {
                        "suite": suite.label,
                        "payload_kib": size // KIB,
                        "what": name,
                        "us": result.ours * 1e6,
                        "bare_us": result.theirs * 1e6,
                        "gb_per_s": size / result.ours / 1e9,
                        "of_blake3": 1 / plain.ratio,
                        "of_bare": 1 / result.ratio,
                        "low": 1 / result.ratio_high,
                        "high": 1 / result.ratio_low,
                    }
                )
    show(rows, as_json=options.json)
    if not options.json:
        bench = Bench(Suite.named(DEFAULT_SUITE), SIZES[0])
        seconds = timed(
            lambda: [bench.opener.open_header(bench.row, bench.key, 0) for _ in range(20000)]
        )
        print(f"header-only checks: {20000 / seconds:,.0f} per second, one thread")
    return 0


if __name__ == "__main__":
    sys.exit(main())

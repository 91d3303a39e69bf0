# SPDX-License-Identifier: Apache-2.0
"""How fast this processor makes tags: the suite that is right on one machine is slow on another."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvsafe.cli.doctor.finding import Finding, ok, warn
from kvsafe.seal.batch import LIBCRYPTO, native
from kvsafe.seal.suites import Suite

__all__ = ["examine_opening", "examine_suite", "judge_suite"]

_BODY_BYTES = 1 << 20
_TRIES = 7
_MUCH = 2.0
"""How many times faster another suite must be to be worth a word: other work is in the figures."""


def examine_suite(suite: Suite) -> Finding:
    """Tag 1 MiB in every keyed suite; some twenty milliseconds in all."""
    return judge_suite(suite, {each: _gb_per_s(each) for each in Suite if each.keyed})


def examine_opening(suite: Suite) -> Finding:
    """Whether small rows that a disk brings are opened many in one call."""
    name = "opening of rows"
    if suite is not Suite.AES256_GMAC:
        return ok(name, f"one by one, as with every suite but {Suite.AES256_GMAC.label}")
    if native() is not None:
        return ok(name, "small rows of kvsafe-fs are opened many in one call")
    said = "small rows are opened one by one, more slowly: kvsafe's C object does not load"
    return warn(name, said, f"install a C compiler and OpenSSL 3 ({LIBCRYPTO}), then kvsafe anew")


def judge_suite(suite: Suite, speeds: Mapping[Suite, float]) -> Finding:
    """Whether a keyed suite is much faster here than the one in use. Speeds in GB/s and thread."""
    name = f"suite {suite.label}"
    said = ", ".join(f"{each.label} {speed:.1f}" for each, speed in speeds.items())
    said = f"GB/s and thread here: {said}"
    best = max(speeds, key=lambda each: speeds[each])
    if suite not in speeds or speeds[best] < _MUCH * speeds[suite]:
        return ok(name, said)
    todo = f"suite: {best.label}, if nothing forbids it (chunks of another suite are misses)"
    return warn(name, said, todo)


def _gb_per_s(suite: Suite) -> float:
    key, body = bytes(32), memoryview(bytes(_BODY_BYTES))
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        suite.tag_slice(key, b"speed", body)
        seconds.append(time.perf_counter() - start)
    return _BODY_BYTES / max(min(seconds), 1e-9) / 1e9

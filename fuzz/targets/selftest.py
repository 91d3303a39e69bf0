# SPDX-License-Identifier: Apache-2.0
"""A target with every fault that the runner has to notice. It is in no list and in no campaign."""

from __future__ import annotations

import os
import signal
import time

from fuzz.target import Finding, Target

_MIB = 1 << 20


class SelfTest(Target):
    """The first byte says what goes wrong; 0, or none, is quiet."""

    name = "selftest"
    max_len = 32
    seconds = 1.0
    memory_mib = 64

    def once(self, data: bytes) -> None:
        what = data[0] if data else 0
        if what == ord("r"):
            raise ValueError("undocumented")
        if what == ord("f"):
            raise Finding("accepted", "what nobody sealed")
        if what == ord("h"):
            _wait()
        elif what == ord("d"):
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            _wait()
        elif what == ord("m"):
            bytearray(200 * _MIB)
        elif what == ord("l"):
            bytearray(64 << 30)
        elif what == ord("c"):
            os.abort()
        elif what == ord("x"):
            os._exit(3)

    def seeds(self) -> list[bytes]:
        return []


def _wait() -> None:
    until = time.monotonic() + 600
    while time.monotonic() < until:
        time.sleep(0.02)

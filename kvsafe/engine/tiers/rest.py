# SPDX-License-Identifier: Apache-2.0
"""For how long tiers may keep an engine awake that has nothing else to do.

While a tier says that it has work, vLLM's engine goes on stepping. A tier that hangs says so for
ever, also of jobs that were given up, and an idle server would burn a core for it.
"""

import time


class Rest:
    """When an idle engine may sleep. One thread (the scheduler's)."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._quiet_since: float | None = None

    def disturb(self) -> None:
        """There is work of our own."""
        self._quiet_since = None

    def keeps_awake(self, pending: bool) -> bool:
        """There is none. Whether tiers that say so (`pending`) still keep the engine stepping.

        What they report later is heard at the steps of the next request.
        """
        if not pending:
            self._quiet_since = None
            return False
        now = time.monotonic()
        if self._quiet_since is None:
            self._quiet_since = now
        return now - self._quiet_since <= self._patience_s

# SPDX-License-Identifier: Apache-2.0
"""A slice proof whose answers the test chooses."""

import threading
from collections.abc import Callable
from typing import Any

from kvsafe.device import RowPlan


class ScriptedProof:
    """Logs (step, row); `answers[(step, row)]` is a refusal, or a callable that makes one."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, int], Any] = {}
        self.log: list[tuple[str, int]] = []
        self._lock = threading.Lock()

    def before_load(self, row: RowPlan) -> object | None:
        return self._answer("before_load", row)

    def fence(self, row: RowPlan) -> object | None:
        return self._answer("fence", row)

    def after_store(self, row: RowPlan) -> object | None:
        return self._answer("after_store", row)

    def _answer(self, step: str, row: RowPlan) -> object | None:
        with self._lock:
            self.log.append((step, row.row))
        answer = self.answers.get((step, row.row))
        return answer() if callable(answer) else answer


def raising(error: type[BaseException]) -> Callable[[], object]:
    def answer() -> object:
        raise error("secret text that must not travel")

    return answer


class Gate:
    """A proof answer that waits until the test opens it, and tells when it was reached."""

    def __init__(self, value: object | None = None) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.value = value

    def __call__(self) -> object | None:
        self.reached.set()
        self.opened.wait(20)
        return self.value

# SPDX-License-Identifier: Apache-2.0
"""Sealing off the scheduler's thread: batches of finished stores, closed by a proof thread.

A store is not ready before it is sealed, so nothing waits on this but readiness itself; the
scheduler's thread only hands a batch over and, once per step, takes back what is done.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvsafe.seal.refusal import Refusal, RefusalKind

SealOne = Callable[[OffloadKey], Refusal | None]
DRAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class SealedBatch:
    """The keys of one store, and why some of them could not be sealed."""

    keys: tuple[OffloadKey, ...]
    req_context: ReqContext
    refusals: dict[OffloadKey, Refusal]


@dataclass(frozen=True, slots=True)
class _Pending:
    keys: tuple[OffloadKey, ...]
    req_context: ReqContext
    answer: "Future[dict[OffloadKey, Refusal]]"


class SealWork:
    """Batches on their way to being sealed, in the order in which they were handed over."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._pending: deque[_Pending] = deque()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def submit(
        self, keys: Collection[OffloadKey], req_context: ReqContext, seal_one: SealOne
    ) -> None:
        """Hand a batch over. `seal_one` runs in a thread and touches nothing but rows."""
        batch = tuple(keys)
        answer = self._threads.submit(_seal_all, batch, seal_one)
        self._pending.append(_Pending(batch, req_context, answer))

    def finished(self) -> Iterator[SealedBatch]:
        """Batches that are done, oldest first; one that is not yet done holds back the rest."""
        while self._pending and self._pending[0].answer.done():
            yield self._take()

    def drain(self) -> Iterator[SealedBatch]:
        """All batches, waiting for each. Raises `TimeoutError` when sealing hangs."""
        while self._pending:
            self._pending[0].answer.result(timeout=DRAIN_S)
            yield self._take()

    def _take(self) -> SealedBatch:
        pending = self._pending.popleft()
        return SealedBatch(pending.keys, pending.req_context, pending.answer.result())


def _seal_all(keys: tuple[OffloadKey, ...], seal_one: SealOne) -> dict[OffloadKey, Refusal]:
    refusals: dict[OffloadKey, Refusal] = {}
    for key in keys:
        try:
            refusal = seal_one(key)
        except Exception as exc:  # what cannot be sealed never becomes ready
            refusal = Refusal.of(RefusalKind.COPY_FAULT, "seal", "sealed", type(exc).__name__)
        if refusal is not None:
            refusals[key] = refusal
    return refusals

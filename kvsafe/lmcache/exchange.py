# SPDX-License-Identifier: Apache-2.0
"""Requests in windows, replies in the same order: the way both clients talk.

The first reply that is not what its request asked for ends the connection. What was still to come
on it is asked for once more on a fresh one, and so is everything when a connection turns out to
be dead before its first reply; a deadline that passed ends the call. A reply that began and did
not end is a refusal (torn, or late) and is not asked for again.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from kvsafe.lmcache.answers import Answer, Fetch, Found, Lost
from kvsafe.lmcache.links import Links
from kvsafe.lmcache.wire import Deadline, Wire, WireError
from kvsafe.seal.refusal import Refusal, RefusalKind

ATTEMPTS: Final = 2

Pieces = list[bytes | memoryview]


class Reader(Protocol):
    """What reads the replies of one connection, one window at a time."""

    @property
    def empty(self) -> bool:
        """Whether no byte beyond the replies asked for has been read."""
        ...


R = TypeVar("R", bound=Reader)


class Exchange(NamedTuple, Generic[R]):
    """How one kind of request is asked and answered.

    Attributes:
        window: most requests under way on one connection. Their bytes, values left out, must fit
            the buffers of a socket, so that sending never waits for replies to be read.
        ask: the bytes of the requests with these indexes.
        take: reads the reply to the request with this index.
    """

    window: int
    reader: Callable[[Wire], R]
    ask: Callable[[Sequence[int]], Pieces]
    take: Callable[[R, int, Deadline], Answer]


def run(links: Links, exchange: Exchange[R], answers: list[Answer | None]) -> list[Answer]:
    """Answer every request whose place in `answers` is None, or say why not. Never raises."""
    deadline = Deadline(links.setting.deadline_s)
    why: Lost | None = None
    for _ in range(ATTEMPTS):
        if None not in answers:
            break
        try:
            with links.borrow(deadline) as wire:
                _talk(wire, exchange, answers, deadline)
        except WireError as error:
            # The first reason says most: a second try may not even have been made.
            why = why or Lost(error.why, error.late)
            if error.late:
                break
    rest = why or Lost("not asked")
    return [rest if answer is None else answer for answer in answers]


def _talk(
    wire: Wire, exchange: Exchange[R], answers: list[Answer | None], deadline: Deadline
) -> None:
    todo = [at for at, answer in enumerate(answers) if answer is None]
    for first in range(0, len(todo), exchange.window):
        part = todo[first : first + exchange.window]
        wire.send(exchange.ask(part), deadline)
        reader = exchange.reader(wire)
        for at in part:
            answers[at] = answer = _judged(exchange, reader, at, deadline)
            if isinstance(answer, Refusal):
                raise WireError(f"refusal {answer.number}")
            wire.served += 1
        if not reader.empty:
            raise WireError("bytes that nobody asked for")


def _judged(exchange: Exchange[R], reader: R, at: int, deadline: Deadline) -> Answer:
    try:
        return exchange.take(reader, at, deadline)
    except WireError as error:
        if not error.begun:
            raise
        kind = RefusalKind.PEER_LATE if error.late else RefusalKind.PEER_TORN
        return Refusal.of(kind, "reply", "all of it", error.why)


def require_room(data: memoryview, length: int) -> None:
    """Raises `ValueError` unless `data` has exactly `length` bytes, one after the other."""
    if data.nbytes != length or data.ndim != 1 or data.itemsize != 1:
        raise ValueError(f"a buffer of {data.nbytes} bytes for {length}")


def wipe_misses(items: Sequence[Fetch], answers: list[Answer]) -> list[Answer]:
    """No byte of a value that was not taken whole stays behind."""
    for item, answer in zip(items, answers, strict=True):
        if answer is not Found.HIT:
            item.into[:] = bytes(len(item.into))
    return answers

# SPDX-License-Identifier: Apache-2.0
"""One connection to a peer: every call has a deadline, and bytes go where the caller says.

Nothing is allocated from what a peer declares: reads fill a buffer that the caller has made for
what it expects. A connection that broke a rule is never used again, since nothing says where its
next reply begins.
"""

import contextlib
import math
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_IOV: Final = 64
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)
"""Linux only."""
_TAIL: Final = 1 << 18
_PIECE: Final = 1 << 17
_MOST: Final = 1 << 20


class WireError(OSError):
    """The connection is of no use any more. `begun`: bytes of the reply had arrived."""

    def __init__(self, why: str, *, late: bool = False, begun: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.late = late
        self.begun = begun


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer listens: a host name or an address literal, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Deadline:
    """A moment by which something must have ended."""

    __slots__ = ("_at",)

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self, *, begun: bool = False) -> float:
        """Seconds left, above 0. Raises `WireError` when there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise WireError("deadline", late=True, begun=begun)
        return left

    def sooner(self, seconds: float) -> "Deadline":
        """The earlier of this deadline and one in so many seconds."""
        other = Deadline(seconds)
        other._at = min(other._at, self._at)
        return other


class Wire:
    """A TCP connection used by one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        # Calls are tried first and waited for only when they must be: most need no wait.
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._incoming = select.poll()
        self._incoming.register(connected, select.POLLIN)
        self._least = 1
        self.served = 0
        """Replies read in full on this connection."""

    @classmethod
    def connect(cls, address: Address, deadline: Deadline) -> "Wire":
        """Connect to the first address of the host that answers. Raises `WireError`.

        Name resolution has no deadline of its own: use an address literal, or a resolver that
        answers from this machine, where that matters.
        """
        try:
            made = socket.create_connection((address.host, address.port), deadline.left())
        except TimeoutError:
            raise WireError("no connection in time", late=True) from None
        except (OSError, UnicodeError) as error:
            raise WireError(f"no connection: {type(error).__name__}") from None
        return cls(made)

    def send(self, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        """Send all parts one after the other, without joining them."""
        rest = [memoryview(part).cast("B") for part in parts if len(part)]
        while rest:
            left = deadline.left()
            try:
                sent = self._socket.sendmsg(rest[:_IOV])
            except BlockingIOError:
                if not self._writable(left):
                    raise WireError("the peer takes nothing", late=True) from None
                continue
            except OSError as error:
                raise WireError(f"sending failed: {type(error).__name__}") from None
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]

    def read_some(self, into: memoryview, deadline: Deadline, *, begun: bool = False) -> int:
        """Read at least one byte and at most `into`."""
        return self._read(into, 1, deadline, begun=begun)

    def _read(self, into: memoryview, least: int, deadline: Deadline, *, begun: bool) -> int:
        """Read some of `into`, preferably when `least` bytes have come. Never returns 0."""
        left = deadline.left(begun=begun)
        in_time = least == 1 or self._readable(least, left)
        # What came until the deadline is read too: whether a reply had begun must be known.
        while (count := self._receive(into, begun=begun)) is None:
            if not in_time:
                raise WireError("silence", late=True, begun=begun)
            in_time = self._readable(least, deadline.left(begun=begun))
        if count == 0:
            raise WireError("the peer closed the connection", begun=begun)
        self._acknowledge()
        return count

    def _receive(self, into: memoryview, *, begun: bool) -> int | None:
        """What is there now; None when nothing is."""
        try:
            return self._socket.recv_into(into)
        except BlockingIOError:
            return None
        except OSError as error:
            raise WireError(f"reading failed: {type(error).__name__}", begun=begun) from None

    def _acknowledge(self) -> None:
        """Have what was read acknowledged at once, not with the usual delay.

        LMCache's server leaves Nagle's algorithm on and answers in small pieces: each waits until
        the one before is acknowledged, 40 ms on Linux for every window of requests. The kernel
        leaves this mode by itself, so it is asked for anew each time. It only makes things faster:
        where it cannot be had, nothing is wrong.
        """
        if _QUICKACK is not None:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)

    def _writable(self, seconds: float) -> bool:
        """Wait until a call can go on, or fail. False when the time is over."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(math.ceil(seconds * 1000)))

    def _readable(self, least: int, seconds: float) -> bool:
        """Wait until `least` bytes or the end have come. False when the time is over.

        That many at once costs one wait instead of one for every packet. It is a wish: the kernel
        wakes us earlier when its buffers are full, or always where it does not know the option.
        """
        if least != self._least:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least
        return bool(self._incoming.poll(math.ceil(seconds * 1000)))

    def read_exactly(self, into: memoryview, deadline: Deadline, *, begun: bool = False) -> None:
        """Fill `into`, neither more nor less."""
        done = 0
        while done < len(into):
            rest = into[done:]
            done += self._read(rest, _least(len(rest)), deadline, begun=begun or done > 0)

    def quiet(self) -> bool:
        """Whether nothing waits to be read. Bytes that nobody asked for, or an end, say no."""
        try:
            return not self._readable(1, 0.0)
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        """End the connection. May be called twice."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _least(rest: int) -> int:
    """How many bytes to wait for when `rest` are still to come.

    Never for the last ones: a peer with Nagle's algorithm holds them back until what it sent
    before is acknowledged, and that is done quickest by reading it.
    """
    if rest > 2 * _TAIL:
        return min(rest - _TAIL, _MOST)
    return _PIECE if rest > _PIECE else 1

# SPDX-License-Identifier: Apache-2.0
"""One connection of a suite to the server under test: every wait has an end, every end a name."""

from __future__ import annotations

import contextlib
import socket
import time

__all__ = ["Channel", "Closed", "Silent", "Trouble"]

_STRAY_S = 0.03


class Trouble(Exception):
    """The conversation ended early; the text is the outcome as cases name it."""


class Closed(Trouble):
    """The server closed or reset the connection."""


class Silent(Trouble):
    """The server neither answered nor read within the patience."""


class Channel:
    """A connection under a deadline per call, not per packet: dripping counts as silence."""

    def __init__(self, address: tuple[str, int], patience_s: float) -> None:
        self._patience_s = patience_s
        self._sock = socket.create_connection(address, timeout=patience_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """Send all of `data`; raises `Closed` or `Silent`."""
        view, end = memoryview(data), time.monotonic() + self._patience_s
        while view:
            try:
                self._left(end)
                view = view[self._sock.send(view) :]
            except TimeoutError as error:
                raise Silent("silent") from error
            except OSError as error:
                raise Closed("closed") from error

    def read(self, length: int) -> bytes:
        """Exactly `length` bytes; raises `Closed` or `Silent`."""
        parts, end = bytearray(), time.monotonic() + self._patience_s
        while len(parts) < length:
            parts += self._some(min(1 << 20, length - len(parts)), end)
        return bytes(parts)

    def read_line(self, limit: int = 4096) -> bytes:
        """Bytes up to CR LF without it; raises `Closed`, `Silent`, or `Trouble` past `limit`."""
        line, end = bytearray(), time.monotonic() + self._patience_s
        while not line.endswith(b"\r\n"):
            line += self._some(1, end)
            if len(line) > limit:
                raise Trouble("endless line")
        return bytes(line[:-2])

    def stray(self) -> bool:
        """Whether bytes are there that no question explains."""
        self._sock.settimeout(_STRAY_S)
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def close(self) -> None:
        """Leave."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _some(self, length: int, end: float) -> bytes:
        try:
            self._left(end)
            part = self._sock.recv(length)
        except TimeoutError as error:
            raise Silent("silent") from error
        except OSError as error:
            raise Closed("closed") from error
        if not part:
            raise Closed("closed")
        return part

    def _left(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)

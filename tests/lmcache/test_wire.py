# SPDX-License-Identifier: Apache-2.0
"""One connection: what was read is acknowledged at once, and deadlines end every wait."""

import errno
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvsafe.lmcache import wire as module
from kvsafe.lmcache.wire import Deadline, Wire, WireError

PATIENT_S, SHORT_S = 20.0, 0.2
QUICKACK = getattr(socket, "TCP_QUICKACK", None)


class Watched(socket.socket):
    """A socket that notes which options are set between its reads, and may refuse one."""

    seen: list[str | int]
    refused: int | None = None

    def setsockopt(self, level: int, name: int, value: Any, /) -> None:  # type: ignore[override]
        """Note the option's number."""
        self.seen.append(name)
        if name == self.refused:
            raise OSError(errno.ENOPROTOOPT, "no such option")
        super().setsockopt(level, name, value)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Note that bytes were read."""
        count = super().recv_into(buffer, nbytes, flags)
        self.seen.append("read")
        return count


@pytest.fixture
def ends() -> Iterator[tuple[Watched, socket.socket]]:
    """Our end of a connection, watched, and the peer's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    watched = Watched(fileno=ours.detach())
    watched.seen = []
    yield watched, theirs
    watched.close()
    theirs.close()


def read(wire: Wire, count: int, seconds: float = PATIENT_S) -> bytes:
    """So many bytes from the wire."""
    into = bytearray(count)
    wire.read_exactly(memoryview(into), Deadline(seconds))
    return bytes(into)


@pytest.mark.skipif(QUICKACK is None, reason="this system has no TCP_QUICKACK")
def test_every_read_is_acknowledged_at_once(ends: tuple[Watched, socket.socket]) -> None:
    ours, theirs = ends
    wire = Wire(ours)
    for part in (b"head", b"body"):
        ours.seen.clear()
        theirs.sendall(part)
        assert read(wire, 4) == part
        # As many as there were reads: the kernel forgets the wish after a while.
        assert ours.seen == ["read", QUICKACK] * (len(ours.seen) // 2)
        assert ours.seen


@pytest.mark.skipif(QUICKACK is None, reason="this system has no TCP_QUICKACK")
def test_a_system_that_refuses_the_option_is_served_all_the_same(
    ends: tuple[Watched, socket.socket],
) -> None:
    ours, theirs = ends
    wire = Wire(ours)
    ours.refused = QUICKACK
    theirs.sendall(b"head")
    assert read(wire, 4) == b"head"
    assert QUICKACK in ours.seen


def test_a_system_without_the_option_is_served_too(
    ends: tuple[Watched, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    monkeypatch.setattr(module, "_QUICKACK", None)
    wire = Wire(ours)
    theirs.sendall(b"head")
    assert read(wire, 4) == b"head"
    assert QUICKACK not in ours.seen


def test_a_read_waits_for_bytes_and_for_no_longer_than_its_deadline(
    ends: tuple[Watched, socket.socket],
) -> None:
    ours, theirs = ends
    wire = Wire(ours)
    with pytest.raises(WireError, match="silence") as silent:
        read(wire, 4, SHORT_S)
    assert silent.value.late and not silent.value.begun
    theirs.sendall(b"he")
    with pytest.raises(WireError, match=r"silence|deadline") as torn:
        read(wire, 4, SHORT_S)
    assert torn.value.late and torn.value.begun
    theirs.close()
    with pytest.raises(WireError, match="closed"):
        read(wire, 4)


def test_a_peer_that_takes_nothing_ends_a_send_at_its_deadline(
    ends: tuple[Watched, socket.socket],
) -> None:
    wire = Wire(ends[0])
    with pytest.raises(WireError, match=r"takes nothing|deadline") as stuck:
        wire.send([bytes(1 << 20)] * 64, Deadline(SHORT_S))
    assert stuck.value.late


def test_parts_arrive_in_order_however_they_are_cut(ends: tuple[Watched, socket.socket]) -> None:
    ours, theirs = ends
    parts = [bytes([number]) * (number * 37) for number in range(200)]
    Wire(ours).send(parts, Deadline(PATIENT_S))
    whole, got = b"".join(parts), b""
    while len(got) < len(whole):
        got += theirs.recv(1 << 16)
    assert got == whole


LARGE = 1 << 20
LOWAT = socket.SO_RCVLOWAT


def sent(theirs: socket.socket, data: bytes) -> threading.Thread:
    """Data on its way: more than the kernel's buffers may hold."""
    thread = threading.Thread(target=theirs.sendall, args=(data,), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("refused", [None, LOWAT])
def test_a_large_value_is_waited_for_and_then_single_bytes_are_seen_again(
    ends: tuple[Watched, socket.socket], refused: int | None
) -> None:
    ours, theirs = ends
    ours.refused = refused
    wire, value = Wire(ours), bytes(range(256)) * (LARGE // 256)
    for _ in range(3):
        thread = sent(theirs, value)
        assert read(wire, LARGE) == value
        thread.join(PATIENT_S)
    assert LOWAT in ours.seen
    assert wire.quiet()
    theirs.sendall(b"x")
    assert select.select([ours], [], [], PATIENT_S)[0]
    assert not wire.quiet()
    assert read(wire, 1) == b"x"


@pytest.mark.parametrize("closes", [False, True])
def test_a_large_value_that_does_not_come_whole_had_begun(
    ends: tuple[Watched, socket.socket], closes: bool
) -> None:
    ours, theirs = ends
    wire = Wire(ours)
    theirs.sendall(b"only this")
    if closes:
        theirs.close()
    with pytest.raises(WireError, match="closed" if closes else r"silence|deadline") as torn:
        read(wire, LARGE, PATIENT_S if closes else SHORT_S)
    assert torn.value.begun
    assert torn.value.late is not closes


def test_the_last_bytes_are_never_waited_for_all_at_once() -> None:
    for rest in (1, 36, 4096, 1 << 17, (1 << 17) + 1, 1 << 18, 1 << 19, LARGE, 100 * LARGE):
        assert 1 <= module._least(rest) <= max(1, rest - 1)
        assert module._least(rest) <= LARGE

# SPDX-License-Identifier: Apache-2.0
"""The lm:// client: what is its protocol's own. What it shares is in `test_clients`."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from kvsafe.lmcache import Fetch, Found, Lost
from kvsafe.lmcache.frames import FAIL, Reply, Request
from kvsafe.seal.refusal import RefusalKind
from tests.lmcache.schemes import LM, SHORT_S, number_of
from tests.support.peers import Hangup, LmServer


@pytest.fixture
def server() -> Iterator[LmServer]:
    """An honest server."""
    with contextlib.closing(LM.server()) as made:
        yield made


def test_it_tells_that_it_is_well_and_removes_nothing(server: LmServer) -> None:
    with LM.client_of(server.address) as client:
        client.store([LM.offer(0)])
        assert client.health(LM.key(0)) is Found.HIT
        assert isinstance(client.remove([LM.key(0)])[0], Lost)
        assert client.look([LM.key(0)]) == [Found.HIT]
    assert server.connections == 1


def test_a_server_that_drips_is_bound_by_the_whole_deadline(server: LmServer) -> None:
    """Were each byte given the whole deadline, this call would take half a minute."""
    release = threading.Event()

    def drip(conn: socket.socket) -> None:
        conn.recv(186)
        with contextlib.suppress(OSError):
            while not release.wait(0.1):
                conn.sendall(b"\0")

    server.serve = drip  # type: ignore[method-assign]
    with LM.client_of(server.address, SHORT_S) as client:
        answer = client.fetch([LM.fetch(0)])[0]
    release.set()
    # Each byte comes in time; all of them together do not.
    assert number_of(answer) == RefusalKind.PEER_LATE


def test_a_store_that_breaks_off_is_done_again_whole(server: LmServer) -> None:
    """A server keeps what an interrupted PUT left; the value must not stay so."""
    broke: list[bool] = []

    def hook(request: Request, honest: bytes) -> bytes:
        if not broke:
            broke.append(True)
            server.values[LM.key(0)].data = b"torn"
            raise Hangup
        return honest

    server.hook = hook
    with LM.client_of(server.address) as client:
        assert client.store([LM.offer(0)]) == [Found.STORED]
        assert client.fetch([LM.fetch(0)]) == [Found.HIT]
    assert broke
    assert server.values[LM.key(0)].data == LM.data(0)


def test_a_store_that_the_server_denies_is_not_stored(server: LmServer) -> None:
    nothing = Reply(FAIL, 0, 1, 2, (0, 0, 0, 0), 0).encode()
    server.hook = lambda request, honest: nothing
    with LM.client_of(server.address) as client:
        assert isinstance(client.store([LM.offer(0)])[0], Lost)


def test_key_texts_over_the_limit_are_refused_without_asking(server: LmServer) -> None:
    with LM.client_of(server.address) as client:
        client.store([LM.offer(0)])
        long = Fetch("k" * 151, LM.shape, memoryview(bytearray(LM.shape.length)))
        answers = client.fetch([long, LM.fetch(0)])
    assert number_of(answers[0]) == RefusalKind.PEER_KEY
    assert answers[1] is Found.HIT
    assert all(len(key) < 151 for _, key in server.asked)

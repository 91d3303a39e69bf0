# SPDX-License-Identifier: Apache-2.0
"""The RESP client: what is its protocol's own. What it shares is in `test_clients`."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsafe.lmcache import Found, LinkSetting, Lost, RespSetting
from kvsafe.lmcache.resp import MAX_LINE, ReplyReader, read_count, read_status, read_value
from kvsafe.lmcache.wire import Deadline, WireError
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.lmcache.schemes import PATIENT_S, RESP, number_of
from tests.support.peers import RespServer


@pytest.fixture
def server() -> Iterator[RespServer]:
    """An honest server."""
    with contextlib.closing(RESP.server()) as made:
        yield made


def test_it_answers_a_ping_and_removes(server: RespServer) -> None:
    with RESP.client_of(server.address) as client:
        assert client.ping() is Found.STORED
        client.store([RESP.offer(0), RESP.offer(1)])
        assert client.remove([RESP.key(0), RESP.key(999)]) == [Found.ABSENT] * 2
        gone = RESP.fetch(0)
        assert client.fetch([gone, RESP.fetch(1)]) == [Found.ABSENT, Found.HIT]
        assert bytes(gone.into) == bytes(RESP.shape.length)
    assert server.connections == 1


def test_login_database_and_time_to_live(server: RespServer) -> None:
    server.password = b"secret"
    with RESP.client_of(
        server.address, username="kv", password="secret", database=3, ttl_s=60
    ) as client:
        assert client.store([RESP.offer(0)]) == [Found.STORED]
    assert server.asked[:2] == [[b"AUTH", b"kv", b"secret"], [b"SELECT", b"3"]]
    assert server.asked[2][:1] + server.asked[2][3:] == [b"SET", b"EX", b"60"]
    assert "secret" not in repr(RespSetting(LinkSetting(server.address), "kv", "secret"))


@pytest.mark.parametrize("password", [None, "wrong"])
def test_a_server_that_does_not_know_us_gives_no_answer(
    server: RespServer, password: str | None
) -> None:
    server.password = b"secret"
    with RESP.client_of(server.address, password=password) as client:
        answer = client.look([RESP.key(0)])[0]
    assert isinstance(answer, Lost)
    assert "NOAUTH" in answer.why or "WRONGPASS" in answer.why


@pytest.mark.parametrize("word", [b"OOM", b"LOADING", b"READONLY", b"MOVED"])
def test_an_error_is_no_answer_and_the_connection_stays(server: RespServer, word: bytes) -> None:
    with RESP.client_of(server.address) as client:
        server.hook = lambda parts, honest: b"-%s not now\r\n" % word
        for answer in (client.store([RESP.offer(0)])[0], client.fetch([RESP.fetch(0)])[0]):
            assert isinstance(answer, Lost)
            assert word.decode() in answer.why
            assert "not now" not in answer.why
        server.hook = None
        assert client.store([RESP.offer(0)]) == [Found.STORED]
    assert server.connections == 1


@pytest.mark.parametrize("reply", [b":2\r\n", b":-1\r\n", b":01\r\n", b"+1\r\n", b":1x\r\n"])
def test_counts_that_no_server_gives(server: RespServer, reply: bytes) -> None:
    server.hook = lambda parts, honest: reply
    with RESP.client_of(server.address) as client:
        assert number_of(client.look([RESP.key(0)])[0]) == RefusalKind.PEER_REPLY


class Tape:
    """A connection that replays bytes in pieces of a given size, then ends."""

    def __init__(self, data: bytes, piece: int) -> None:
        self._data = data
        self._piece = piece

    def read_some(self, into: memoryview, deadline: Deadline, *, begun: bool = False) -> int:
        """The next piece."""
        part = self._data[: min(self._piece, len(into))]
        if not part:
            raise WireError("the peer closed the connection", begun=begun)
        into[: len(part)] = part
        self._data = self._data[len(part) :]
        return len(part)

    def read_exactly(self, into: memoryview, deadline: Deadline, *, begun: bool = False) -> None:
        """Fill `into`."""
        done = 0
        while done < len(into):
            done += self.read_some(into[done:], deadline, begun=True)


@given(
    st.one_of(
        st.binary(max_size=80),
        st.text("+-:$*0123456789\r\nOKab ", max_size=40).map(str.encode),
    ),
    st.integers(1, 40),
)
def test_any_bytes_are_an_answer_a_refusal_or_an_end(data: bytes, piece: int) -> None:
    takes: list[Callable[[ReplyReader, Deadline], object]] = [
        lambda reader, deadline: read_status(reader, deadline),
        lambda reader, deadline: read_count(reader, deadline, 1),
        lambda reader, deadline: read_value(reader, memoryview(bytearray(8)), deadline),
    ]
    for take in takes:
        reader = ReplyReader(Tape(data, piece))  # type: ignore[arg-type]
        with contextlib.suppress(WireError):
            answer = take(reader, Deadline(PATIENT_S))
            assert isinstance(answer, Found | Lost | Refusal | int)


@given(st.binary(min_size=1, max_size=300), st.integers(1, 50), st.integers(0, 5))
def test_values_come_out_whatever_the_pieces(value: bytes, piece: int, more: int) -> None:
    reply = b"$%d\r\n%s\r\n" % (len(value), value)
    reader = ReplyReader(Tape(reply * (more + 1), piece))  # type: ignore[arg-type]
    for _ in range(more + 1):
        into = bytearray(len(value))
        assert read_value(reader, memoryview(into), Deadline(PATIENT_S)) is Found.HIT
        assert bytes(into) == value
    assert reader.empty


def test_a_line_as_long_as_allowed_is_read() -> None:
    tape = Tape(b"-ERR " + b"x" * (MAX_LINE - 10) + b"\r\n", 100)
    answer = read_status(ReplyReader(tape), Deadline(PATIENT_S))  # type: ignore[arg-type]
    assert isinstance(answer, Lost)

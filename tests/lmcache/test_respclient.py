# SPDX-License-Identifier: Apache-2.0
"""The RESP client against an honest server, and against everything a server can do wrong."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsafe.lmcache import (
    Address,
    Answer,
    ChunkShape,
    Fetch,
    Found,
    LinkSetting,
    Lost,
    Offer,
    RespClient,
    RespSetting,
)
from kvsafe.lmcache.resp import MAX_LINE, ReplyReader, read_count, read_status, read_value
from kvsafe.lmcache.respclient import FETCH_WINDOW
from kvsafe.lmcache.wire import Deadline, WireError
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.support.peers import SILENCE, Hangup, RespServer

SHAPE = ChunkShape(0, 0, (0, 0, 0, 0), 5000)
PATIENT_S, SHORT_S = 20.0, 0.4


def key_of(number: int) -> str:
    """A key text."""
    return f"model@01000100@0@{number:064x}"


def data_of(number: int) -> bytes:
    """The value that belongs to a key; it holds line ends, which must not matter."""
    return (b"%d\r\n$-1\r\n" % number + b"\r\n" * SHAPE.length)[: SHAPE.length]


def fetch_of(number: int) -> Fetch:
    """A request with a stained buffer."""
    return Fetch(key_of(number), SHAPE, memoryview(bytearray(b"\xee" * SHAPE.length)))


def offer_of(number: int) -> Offer:
    """A value to store."""
    return Offer(key_of(number), SHAPE, memoryview(data_of(number)))


@pytest.fixture
def server() -> Iterator[RespServer]:
    """An honest server."""
    made = RespServer()
    yield made
    made.close()


@contextlib.contextmanager
def client_of(
    address: Address, deadline_s: float = PATIENT_S, **options: object
) -> Iterator[RespClient]:
    """A client, closed at the end."""
    link = LinkSetting(address, 2, deadline_s=deadline_s, backoff_s=0.01, backoff_limit_s=0.05)
    client = RespClient(RespSetting(link, **options))  # type: ignore[arg-type]
    try:
        yield client
    finally:
        client.close()


def number_of(answer: Answer) -> int | None:
    """The number of a refusal."""
    return answer.number if isinstance(answer, Refusal) else None


def test_what_goes_in_comes_out(server: RespServer) -> None:
    with client_of(server.address) as client:
        numbers = range(2 * FETCH_WINDOW + 1)
        assert client.ping() is Found.STORED
        assert client.look([key_of(n) for n in numbers]) == [Found.ABSENT] * len(numbers)
        assert client.store([offer_of(n) for n in numbers]) == [Found.STORED] * len(numbers)
        assert client.look([key_of(n) for n in numbers]) == [Found.HIT] * len(numbers)
        items = [fetch_of(n) for n in numbers]
        assert client.fetch(items) == [Found.HIT] * len(numbers)
        assert [bytes(item.into) for item in items] == [data_of(n) for n in numbers]
        assert client.remove([key_of(0), key_of(999)]) == [Found.ABSENT] * 2
        gone = fetch_of(0)
        assert client.fetch([gone, fetch_of(1)]) == [Found.ABSENT, Found.HIT]
        assert bytes(gone.into) == bytes(SHAPE.length)
    assert server.connections == 1


def test_login_database_and_time_to_live(server: RespServer) -> None:
    server.password = b"secret"
    with client_of(
        server.address, username="kv", password="secret", database=3, ttl_s=60
    ) as client:
        assert client.store([offer_of(0)]) == [Found.STORED]
    assert server.asked[:2] == [[b"AUTH", b"kv", b"secret"], [b"SELECT", b"3"]]
    assert server.asked[2][:1] + server.asked[2][3:] == [b"SET", b"EX", b"60"]
    assert "secret" not in repr(RespSetting(LinkSetting(server.address), "kv", "secret"))


@pytest.mark.parametrize("password", [None, "wrong"])
def test_a_server_that_does_not_know_us_gives_no_answer(
    server: RespServer, password: str | None
) -> None:
    server.password = b"secret"
    with client_of(server.address, password=password) as client:
        answer = client.look([key_of(0)])[0]
    assert isinstance(answer, Lost)
    assert "NOAUTH" in answer.why or "WRONGPASS" in answer.why


def _to_get(reply: Callable[[bytes], bytes]) -> Callable[[list[bytes], bytes], bytes]:
    return lambda parts, honest: reply(honest) if parts[0] == b"GET" else honest


def _header(honest: bytes, line: bytes) -> bytes:
    return line + honest[honest.index(b"\r\n") :]


LIES = {
    "shorter": (lambda h: _header(h, b"$4999"), RefusalKind.PEER_LENGTH),
    "longer": (lambda h: _header(h, b"$5001"), RefusalKind.PEER_LENGTH),
    "half a gigabyte": (lambda h: b"$536870912\r\n", RefusalKind.PEER_LENGTH),
    "endless digits": (lambda h: b"$" + b"9" * 400 + b"\r\n", RefusalKind.PEER_LENGTH),
    "negative": (lambda h: b"$-2\r\n", RefusalKind.PEER_LENGTH),
    "no number": (lambda h: b"$5_000\r\n" + h[7:], RefusalKind.PEER_LENGTH),
    "spaces": (lambda h: b"$ 5000\r\n" + h[7:], RefusalKind.PEER_LENGTH),
    "an integer": (lambda h: b":1\r\n", RefusalKind.PEER_REPLY),
    "an array": (lambda h: b"*1000000\r\n", RefusalKind.PEER_REPLY),
    "a push": (lambda h: b">2\r\n", RefusalKind.PEER_REPLY),
    "an empty line": (lambda h: b"\r\n", RefusalKind.PEER_REPLY),
    "a line without end": (lambda h: b"$" + b"1" * 10000, RefusalKind.PEER_REPLY),
    "no end behind the value": (lambda h: h[:-2] + b"xx", RefusalKind.PEER_REPLY),
}


@pytest.mark.parametrize("name", LIES)
def test_a_reply_that_does_not_match_is_refused_and_the_connection_dropped(
    server: RespServer, name: str
) -> None:
    reply, kind = LIES[name]
    with client_of(server.address) as client:
        client.store([offer_of(0), offer_of(1)])
        server.hook = _to_get(reply)
        item = fetch_of(0)
        assert number_of(client.fetch([item])[0]) == kind
        assert bytes(item.into) == bytes(SHAPE.length)
        server.hook = None
        again = fetch_of(1)
        assert client.fetch([again]) == [Found.HIT]
        assert bytes(again.into) == data_of(1)
    assert server.connections == 2


@pytest.mark.parametrize("cut", [1, 6, 8, 2000, 7 + 5000, 7 + 5001])
def test_a_reply_that_ends_early_is_torn(server: RespServer, cut: int) -> None:
    def hook(parts: list[bytes], honest: bytes) -> bytes:
        if parts[0] == b"GET":
            raise Hangup(honest[:cut])
        return honest

    with client_of(server.address) as client:
        client.store([offer_of(0)])
        server.hook = hook
        item = fetch_of(0)
        assert number_of(client.fetch([item])[0]) == RefusalKind.PEER_TORN
        assert bytes(item.into) == bytes(SHAPE.length)


@pytest.mark.parametrize("word", [b"OOM", b"LOADING", b"READONLY", b"MOVED"])
def test_an_error_is_no_answer_and_the_connection_stays(server: RespServer, word: bytes) -> None:
    with client_of(server.address) as client:
        server.hook = lambda parts, honest: b"-%s not now\r\n" % word
        for answer in (client.store([offer_of(0)])[0], client.fetch([fetch_of(0)])[0]):
            assert isinstance(answer, Lost)
            assert word.decode() in answer.why
            assert "not now" not in answer.why
        server.hook = None
        assert client.store([offer_of(0)]) == [Found.STORED]
    assert server.connections == 1


def test_silence_and_stalls_are_bound_by_the_deadline(server: RespServer) -> None:
    with client_of(server.address, SHORT_S) as client:
        client.store([offer_of(0)])
        server.hook = lambda parts, honest: SILENCE
        answer = client.look([key_of(0)])[0]
        assert isinstance(answer, Lost)
        assert answer.late
        server.hook = lambda parts, honest: honest[:100]
        assert number_of(client.fetch([fetch_of(0)])[0]) == RefusalKind.PEER_LATE


def test_more_than_was_asked_for_ends_the_connection(server: RespServer) -> None:
    with client_of(server.address) as client:
        client.store([offer_of(0)])
        server.hook = lambda parts, honest: honest + b":1\r\n"
        client.look([key_of(0)])
        server.hook = None
        assert client.look([key_of(7)]) == [Found.ABSENT]
    assert server.connections == 2


@pytest.mark.parametrize("reply", [b":2\r\n", b":-1\r\n", b":01\r\n", b"+1\r\n", b":1x\r\n"])
def test_counts_that_no_server_gives(server: RespServer, reply: bytes) -> None:
    server.hook = lambda parts, honest: reply
    with client_of(server.address) as client:
        assert number_of(client.look([key_of(0)])[0]) == RefusalKind.PEER_REPLY


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

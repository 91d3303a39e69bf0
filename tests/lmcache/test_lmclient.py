# SPDX-License-Identifier: Apache-2.0
"""The lm:// client against an honest server, and against everything a server can do wrong."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvsafe.lmcache import (
    Address,
    Answer,
    ChunkShape,
    Dtype,
    Fetch,
    Fmt,
    Found,
    LinkSetting,
    LmClient,
    Lost,
    Offer,
    chunk_shape,
)
from kvsafe.lmcache.frames import FAIL, OK, Command, Reply, Request
from kvsafe.lmcache.lmclient import FETCH_WINDOW
from kvsafe.seal.refusal import Refusal, RefusalKind
from tests.support.peers import SILENCE, Hangup, LmServer

SHAPE = chunk_shape(Fmt.KV_2LTD, Dtype.BFLOAT16, (2, 1, 16, 32))
PATIENT_S, SHORT_S = 20.0, 0.4
STAIN = 0xEE


def key_of(number: int) -> str:
    """A key text."""
    return f"model@1@0@{number + 1:x}@bfloat16"


def data_of(number: int) -> bytes:
    """The value that belongs to a key."""
    return bytes([number + 1]) * SHAPE.length


def fetch_of(number: int, shape: ChunkShape = SHAPE) -> Fetch:
    """A request with a stained buffer: what is not overwritten shows."""
    return Fetch(key_of(number), shape, memoryview(bytearray([STAIN]) * shape.length))


def offer_of(number: int) -> Offer:
    """A value to store."""
    return Offer(key_of(number), SHAPE, memoryview(data_of(number)))


@pytest.fixture
def server() -> Iterator[LmServer]:
    """An honest server."""
    made = LmServer()
    yield made
    made.close()


@contextlib.contextmanager
def client_of(
    address: Address, deadline_s: float = PATIENT_S, connections: int = 2
) -> Iterator[LmClient]:
    """A client, closed at the end."""
    client = LmClient(
        LinkSetting(
            address, connections, deadline_s=deadline_s, backoff_s=0.01, backoff_limit_s=0.05
        )
    )
    try:
        yield client
    finally:
        client.close()


def number_of(answer: Answer) -> int | None:
    """The number of a refusal."""
    return answer.number if isinstance(answer, Refusal) else None


def test_what_goes_in_comes_out(server: LmServer) -> None:
    with client_of(server.address) as client:
        numbers = range(3 * FETCH_WINDOW)
        assert client.look([key_of(n) for n in numbers]) == [Found.ABSENT] * len(numbers)
        assert client.fetch([fetch_of(0)]) == [Found.ABSENT]
        assert client.store([offer_of(n) for n in numbers]) == [Found.STORED] * len(numbers)
        assert client.look([key_of(n) for n in numbers]) == [Found.HIT] * len(numbers)
        items = [fetch_of(n) for n in numbers]
        assert client.fetch(items) == [Found.HIT] * len(numbers)
        assert [bytes(item.into) for item in items] == [data_of(n) for n in numbers]
        assert client.health(key_of(0)) is Found.HIT
        assert isinstance(client.remove([key_of(0)])[0], Lost)
    assert server.connections == 1


def test_a_miss_in_the_middle_leaves_the_order_alone(server: LmServer) -> None:
    with client_of(server.address) as client:
        client.store([offer_of(0), offer_of(2)])
        items = [fetch_of(n) for n in range(3)]
        assert client.fetch(items) == [Found.HIT, Found.ABSENT, Found.HIT]
        assert [bytes(item.into) for item in items] == [data_of(0), bytes(SHAPE.length), data_of(2)]


def _reply(**wrong: object) -> Callable[[Request, bytes], bytes]:
    """A hook that answers GET with a header that differs from the honest one."""

    def hook(request: Request, honest: bytes) -> bytes:
        if request.command != Command.GET:
            return honest
        good = Reply(OK, SHAPE.length, SHAPE.fmt, SHAPE.dtype, SHAPE.dims, 0)
        lie = good._replace(**wrong)  # type: ignore[arg-type]
        return lie.encode() + honest[36 : 36 + max(0, min(lie.length, SHAPE.length))]

    return hook


LIES = {
    "another code": (_reply(code=7), RefusalKind.PEER_CODE),
    "shorter": (_reply(length=SHAPE.length - 64), RefusalKind.PEER_LENGTH),
    "longer": (_reply(length=SHAPE.length + 64), RefusalKind.PEER_LENGTH),
    "two gigabytes": (_reply(length=2**31 - 1), RefusalKind.PEER_LENGTH),
    "negative": (_reply(length=-5), RefusalKind.PEER_LENGTH),
    "absent with a value": (_reply(code=FAIL), RefusalKind.PEER_LENGTH),
    "another format": (_reply(fmt=Fmt.KV_T2D), RefusalKind.PEER_FORMAT),
    "another type": (_reply(dtype=Dtype.FLOAT16), RefusalKind.PEER_DTYPE),
    "another shape of equal size": (_reply(dims=(2, 16, 1, 32)), RefusalKind.PEER_SHAPE),
    "negative dimensions": (_reply(dims=(-2, -1, 16, 32)), RefusalKind.PEER_SHAPE),
}


@pytest.mark.parametrize("name", LIES)
def test_a_reply_that_does_not_match_is_refused_and_the_connection_dropped(
    server: LmServer, name: str
) -> None:
    hook, kind = LIES[name]
    with client_of(server.address) as client:
        client.store([offer_of(0), offer_of(1)])
        server.hook = hook
        item = fetch_of(0)
        answer = client.fetch([item])[0]
        assert number_of(answer) == kind
        assert bytes(item.into) == bytes(SHAPE.length)
        server.hook = None
        again = fetch_of(1)
        assert client.fetch([again]) == [Found.HIT]
        assert bytes(again.into) == data_of(1)
    assert server.connections == 2


@pytest.mark.parametrize("cut", [1, 35, 36, 37, 36 + SHAPE.length // 2, 35 + SHAPE.length])
def test_a_reply_that_ends_early_is_torn(server: LmServer, cut: int) -> None:
    def hook(request: Request, honest: bytes) -> bytes:
        if request.command == Command.GET:
            raise Hangup(honest[:cut])
        return honest

    with client_of(server.address) as client:
        client.store([offer_of(0)])
        server.hook = hook
        item = fetch_of(0)
        assert number_of(client.fetch([item])[0]) == RefusalKind.PEER_TORN
        assert bytes(item.into) == bytes(SHAPE.length)
        server.hook = None
        assert client.fetch([fetch_of(0)]) == [Found.HIT]


def test_silence_before_a_reply_is_no_answer_within_the_deadline(server: LmServer) -> None:
    server.hook = lambda request, honest: SILENCE
    with client_of(server.address, SHORT_S) as client:
        answer = client.look([key_of(0)])[0]
        assert isinstance(answer, Lost)
        assert answer.late


def test_a_reply_that_stalls_is_late(server: LmServer) -> None:
    with client_of(server.address, SHORT_S) as client:
        client.store([offer_of(0)])
        server.hook = lambda request, honest: honest[:100]
        item = fetch_of(0)
        assert number_of(client.fetch([item])[0]) == RefusalKind.PEER_LATE
        assert bytes(item.into) == bytes(SHAPE.length)


def test_a_server_that_drips_is_bound_by_the_whole_deadline(server: LmServer) -> None:
    """Were each byte given the whole deadline, this call would take half a minute."""
    release = threading.Event()

    def drip(conn: socket.socket) -> None:
        conn.recv(186)
        with contextlib.suppress(OSError):
            while not release.wait(0.1):
                conn.sendall(b"\0")

    server.serve = drip  # type: ignore[method-assign]
    with client_of(server.address, SHORT_S) as client:
        answer = client.fetch([fetch_of(0)])[0]
    release.set()
    # Each byte comes in time; all of them together do not.
    assert number_of(answer) == RefusalKind.PEER_LATE


def test_a_server_that_takes_nothing_is_bound_by_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        shape = chunk_shape(Fmt.KV_2LTD, Dtype.BFLOAT16, (2, 16, 256, 512))
        offer = Offer(key_of(0), shape, memoryview(bytearray(shape.length)))
        with client_of(Address("127.0.0.1", deaf.getsockname()[1]), SHORT_S) as client:
            answer = client.store([offer] * 4)[0]
    assert isinstance(answer, Lost)
    assert answer.late


def test_bytes_that_nobody_asked_for_end_the_connection(server: LmServer) -> None:
    extra = Reply(OK, 0, 1, 2, (0, 0, 0, 0), 0).encode()
    with client_of(server.address) as client:
        client.store([offer_of(0)])
        server.hook = lambda request, honest: honest + extra
        assert client.fetch([fetch_of(0)]) == [Found.HIT]
        server.hook = None
        time.sleep(0.05)
        # The stray reply says "here it is"; read as the answer to this it would be a lie.
        assert client.look([key_of(7)]) == [Found.ABSENT]
    assert server.connections == 2


def test_after_a_lie_in_a_window_the_rest_is_asked_for_elsewhere(server: LmServer) -> None:
    lied: list[str] = []

    def hook(request: Request, honest: bytes) -> bytes:
        if request.command == Command.GET and request.key == key_of(1) and not lied:
            lied.append(request.key)
            return _reply(dtype=Dtype.FLOAT16)(request, honest)
        return honest

    with client_of(server.address) as client:
        client.store([offer_of(n) for n in range(4)])
        server.hook = hook
        items = [fetch_of(n) for n in range(4)]
        answers = client.fetch(items)
    assert [number_of(answer) for answer in answers] == [None, RefusalKind.PEER_DTYPE, None, None]
    for number in (0, 2, 3):
        assert answers[number] is Found.HIT
        assert bytes(items[number].into) == data_of(number)
    assert bytes(items[1].into) == bytes(SHAPE.length)


def test_a_connection_that_died_while_idle_costs_nothing(server: LmServer) -> None:
    with client_of(server.address) as client:
        client.store([offer_of(0)])
        server.drop_all()
        assert client.fetch([fetch_of(0)]) == [Found.HIT]
    assert server.connections == 2


def test_a_store_that_breaks_off_is_done_again_whole(server: LmServer) -> None:
    """A server keeps what an interrupted PUT left; the value must not stay so."""
    broke: list[bool] = []

    def hook(request: Request, honest: bytes) -> bytes:
        if not broke:
            broke.append(True)
            server.values[key_of(0)].data = b"torn"
            raise Hangup
        return honest

    server.hook = hook
    with client_of(server.address) as client:
        assert client.store([offer_of(0)]) == [Found.STORED]
        assert client.fetch([fetch_of(0)]) == [Found.HIT]
    assert broke
    assert server.values[key_of(0)].data == data_of(0)


def test_a_store_that_the_server_denies_is_not_stored(server: LmServer) -> None:
    nothing = Reply(FAIL, 0, 1, 2, (0, 0, 0, 0), 0).encode()
    server.hook = lambda request, honest: nothing
    with client_of(server.address) as client:
        assert isinstance(client.store([offer_of(0)])[0], Lost)


def test_nobody_there_is_no_answer_and_soon_not_even_asked(server: LmServer) -> None:
    server.close()
    with client_of(server.address) as client:
        for _ in range(50):
            assert isinstance(client.look([key_of(0)])[0], Lost)
        assert client.links.counts.failed < 50
        assert client.links.counts.connected == 0


def test_it_comes_back_after_the_pause() -> None:
    with socket.create_server(("127.0.0.1", 0)) as spare:
        address = Address("127.0.0.1", spare.getsockname()[1])
    with client_of(address) as client:
        assert isinstance(client.look([key_of(0)])[0], Lost)
        server = LmServer()
        try:
            client.links.setting = LinkSetting(server.address)
            until = time.monotonic() + PATIENT_S
            while client.look([key_of(0)]) != [Found.ABSENT]:
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            server.close()


def test_connections_are_bounded_and_threads_get_their_own_bytes(server: LmServer) -> None:
    """F10: several readers and writers, one client, every value under its own key."""
    wrong: list[object] = []
    with client_of(server.address, connections=3) as client:
        client.store([offer_of(n) for n in range(8)])

        def work(seed: int) -> None:
            for turn in range(12):
                numbers = [(seed + turn + step) % 8 for step in range(3)]
                items = [fetch_of(n) for n in numbers]
                answers = client.fetch(items)
                good = [bytes(item.into) for item in items] == [data_of(n) for n in numbers]
                if answers != [Found.HIT] * 3 or not good:
                    wrong.append((numbers, answers))
                client.store([offer_of(numbers[0])])

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    assert server.connections <= 3


def test_key_texts_over_the_limit_are_refused_without_asking(server: LmServer) -> None:
    with client_of(server.address) as client:
        client.store([offer_of(0)])
        long = Fetch("k" * 151, SHAPE, memoryview(bytearray(SHAPE.length)))
        answers = client.fetch([long, fetch_of(0)])
    assert number_of(answers[0]) == RefusalKind.PEER_KEY
    assert answers[1] is Found.HIT
    assert all(len(key) < 151 for _, key in server.asked)


def test_a_buffer_of_another_size_is_misuse(server: LmServer) -> None:
    with client_of(server.address) as client:
        with pytest.raises(ValueError, match="a buffer of"):
            client.fetch([Fetch(key_of(0), SHAPE, memoryview(bytearray(SHAPE.length - 1)))])
        with pytest.raises(ValueError, match="a buffer of"):
            client.store([Offer(key_of(0), SHAPE, memoryview(bytearray(SHAPE.length + 1)))])


def test_a_closed_client_answers_lost(server: LmServer) -> None:
    with client_of(server.address) as client:
        assert client.look([key_of(0)]) == [Found.ABSENT]
    assert isinstance(client.look([key_of(0)])[0], Lost)

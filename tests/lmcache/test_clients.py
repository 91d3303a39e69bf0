# SPDX-License-Identifier: Apache-2.0
"""What both clients owe: right against an honest server, bounded and undeceived by any other."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvsafe.lmcache import Address, Fetch, Found, LinkSetting, Lost, Offer
from kvsafe.seal.refusal import RefusalKind
from tests.lmcache.schemes import LM, PATIENT_S, RESP, SHORT_S, Scheme, number_of
from tests.support.peers import SILENCE, Hangup

SCHEMES: dict[str, Scheme[Any]] = {"lm": LM, "resp": RESP}
LIES = [(name, lie) for name, scheme in SCHEMES.items() for lie in scheme.lies]
CUTS = [(name, cut) for name, scheme in SCHEMES.items() for cut in scheme.cuts]


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> Scheme[Any]:
    """Each protocol."""
    return SCHEMES[request.param]


@pytest.fixture
def server(scheme: Scheme[Any]) -> Iterator[Any]:
    """An honest server."""
    with contextlib.closing(scheme.server()) as made:
        yield made


@pytest.mark.parametrize("more", [0, 1])
def test_what_goes_in_comes_out(scheme: Scheme[Any], server: Any, more: int) -> None:
    with scheme.client_of(server.address) as client:
        numbers = range(3 * scheme.window + more)
        assert client.look(scheme.keys(numbers)) == [Found.ABSENT] * len(numbers)
        absent = scheme.fetch(0)
        assert client.fetch([absent]) == [Found.ABSENT]
        assert bytes(absent.into) == bytes(scheme.shape.length)
        offers = [scheme.offer(n) for n in numbers]
        assert client.store(offers) == [Found.STORED] * len(numbers)
        assert client.look(scheme.keys(numbers)) == [Found.HIT] * len(numbers)
        items = [scheme.fetch(n) for n in numbers]
        assert client.fetch(items) == [Found.HIT] * len(numbers)
        assert [bytes(item.into) for item in items] == [scheme.data(n) for n in numbers]
    assert server.connections == 1


def test_a_miss_in_the_middle_leaves_the_order_alone(scheme: Scheme[Any], server: Any) -> None:
    with scheme.client_of(server.address) as client:
        client.store([scheme.offer(0), scheme.offer(2)])
        items = [scheme.fetch(n) for n in range(3)]
        assert client.fetch(items) == [Found.HIT, Found.ABSENT, Found.HIT]
    found = [bytes(item.into) for item in items]
    assert found == [scheme.data(0), bytes(scheme.shape.length), scheme.data(2)]


@pytest.mark.parametrize(("scheme", "name"), LIES, indirect=["scheme"])
def test_a_reply_that_does_not_match_is_refused_and_the_connection_dropped(
    scheme: Scheme[Any], server: Any, name: str
) -> None:
    reply, kind = scheme.lies[name]
    with scheme.client_of(server.address) as client:
        client.store([scheme.offer(0), scheme.offer(1)])
        server.hook = scheme.on_get(reply)
        item = scheme.fetch(0)
        assert number_of(client.fetch([item])[0]) == kind
        assert bytes(item.into) == bytes(scheme.shape.length)
        server.hook = None
        again = scheme.fetch(1)
        assert client.fetch([again]) == [Found.HIT]
        assert bytes(again.into) == scheme.data(1)
    assert server.connections == 2


@pytest.mark.parametrize(("scheme", "name"), LIES, indirect=["scheme"])
def test_after_a_lie_in_a_window_the_rest_is_asked_for_elsewhere(
    scheme: Scheme[Any], server: Any, name: str
) -> None:
    reply, kind = scheme.lies[name]
    with scheme.client_of(server.address) as client:
        client.store([scheme.offer(n) for n in range(4)])
        server.hook = scheme.on_get(reply, 1)
        items = [scheme.fetch(n) for n in range(4)]
        answers = client.fetch(items)
    assert [number_of(answer) for answer in answers] == [None, kind, None, None]
    for number in (0, 2, 3):
        assert answers[number] is Found.HIT
        assert bytes(items[number].into) == scheme.data(number)
    assert bytes(items[1].into) == bytes(scheme.shape.length)


@pytest.mark.parametrize(("scheme", "cut"), CUTS, indirect=["scheme"])
def test_a_reply_that_ends_early_is_torn(scheme: Scheme[Any], server: Any, cut: int) -> None:
    def ends_early(honest: bytes) -> bytes:
        raise Hangup(honest[:cut])

    with scheme.client_of(server.address) as client:
        client.store([scheme.offer(0)])
        server.hook = scheme.on_get(ends_early)
        item = scheme.fetch(0)
        assert number_of(client.fetch([item])[0]) == RefusalKind.PEER_TORN
        assert bytes(item.into) == bytes(scheme.shape.length)
        server.hook = None
        assert client.fetch([scheme.fetch(0)]) == [Found.HIT]


@pytest.mark.parametrize("used", [False, True])
def test_silence_before_a_reply_is_no_answer_within_the_deadline(
    scheme: Scheme[Any], server: Any, used: bool
) -> None:
    with scheme.client_of(server.address, SHORT_S) as client:
        if used:
            client.store([scheme.offer(0)])
        server.hook = lambda request, honest: SILENCE
        answer = client.look([scheme.key(0)])[0]
    assert isinstance(answer, Lost)
    assert answer.late


def test_a_reply_that_stalls_is_late(scheme: Scheme[Any], server: Any) -> None:
    with scheme.client_of(server.address, SHORT_S) as client:
        client.store([scheme.offer(0)])
        server.hook = scheme.on_get(lambda honest: honest[:100])
        item = scheme.fetch(0)
        assert number_of(client.fetch([item])[0]) == RefusalKind.PEER_LATE
        assert bytes(item.into) == bytes(scheme.shape.length)


def test_a_server_that_takes_nothing_is_bound_by_the_deadline(scheme: Scheme[Any]) -> None:
    shape = replace(scheme.shape, length=8 << 20)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        offer = Offer(scheme.key(0), shape, memoryview(bytearray(shape.length)))
        with scheme.client_of(Address("127.0.0.1", deaf.getsockname()[1]), SHORT_S) as client:
            answer = client.store([offer] * 4)[0]
    assert isinstance(answer, Lost)
    assert answer.late


@pytest.mark.parametrize("call", ["look", "fetch"])
def test_bytes_that_nobody_asked_for_end_the_connection(
    scheme: Scheme[Any], server: Any, call: str
) -> None:
    with scheme.client_of(server.address) as client:
        client.store([scheme.offer(0)])
        server.hook = lambda request, honest: honest + scheme.stray
        asked = scheme.key(0) if call == "look" else scheme.fetch(0)
        assert getattr(client, call)([asked]) == [Found.HIT]
        server.hook = None
        time.sleep(0.05)
        # The stray reply says "here it is"; read as the answer to this it would be a lie.
        assert client.look([scheme.key(7)]) == [Found.ABSENT]
    assert server.connections == 2


def test_a_connection_that_died_while_idle_costs_nothing(scheme: Scheme[Any], server: Any) -> None:
    with scheme.client_of(server.address) as client:
        client.store([scheme.offer(0)])
        server.drop_all()
        assert client.fetch([scheme.fetch(0)]) == [Found.HIT]
    assert server.connections == 2


def test_nobody_there_is_no_answer_and_soon_not_even_asked(
    scheme: Scheme[Any], server: Any
) -> None:
    server.close()
    with scheme.client_of(server.address) as client:
        for _ in range(50):
            assert isinstance(client.look([scheme.key(0)])[0], Lost)
        assert client.links.counts.failed < 50
        assert client.links.counts.connected == 0


def test_it_comes_back_after_the_pause(scheme: Scheme[Any], server: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as spare:
        nobody = Address("127.0.0.1", spare.getsockname()[1])
    with scheme.client_of(nobody) as client:
        assert isinstance(client.look([scheme.key(0)])[0], Lost)
        client.links.setting = LinkSetting(server.address)
        until = time.monotonic() + PATIENT_S
        while client.look([scheme.key(0)]) != [Found.ABSENT]:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_connections_are_bounded_and_threads_get_their_own_bytes(
    scheme: Scheme[Any], server: Any
) -> None:
    """F10: several readers and writers, one client, every value under its own key."""
    wrong: list[object] = []
    with scheme.client_of(server.address, connections=3) as client:
        client.store([scheme.offer(n) for n in range(8)])

        def work(seed: int) -> None:
            for turn in range(12):
                numbers = [(seed + turn + step) % 8 for step in range(3)]
                items = [scheme.fetch(n) for n in numbers]
                answers = client.fetch(items)
                good = [bytes(item.into) for item in items] == [scheme.data(n) for n in numbers]
                if answers != [Found.HIT] * 3 or not good:
                    wrong.append((numbers, answers))
                client.store([scheme.offer(numbers[0])])

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    assert server.connections <= 3


def test_a_buffer_of_another_size_is_misuse(scheme: Scheme[Any], server: Any) -> None:
    key, shape = scheme.key(0), scheme.shape
    with scheme.client_of(server.address) as client:
        with pytest.raises(ValueError, match="a buffer of"):
            client.fetch([Fetch(key, shape, memoryview(bytearray(shape.length - 1)))])
        with pytest.raises(ValueError, match="a buffer of"):
            client.store([Offer(key, shape, memoryview(bytearray(shape.length + 1)))])


def test_a_closed_client_answers_lost(scheme: Scheme[Any], server: Any) -> None:
    with scheme.client_of(server.address) as client:
        assert client.look([scheme.key(0)]) == [Found.ABSENT]
    assert isinstance(client.look([scheme.key(0)])[0], Lost)

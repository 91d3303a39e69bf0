# SPDX-License-Identifier: Apache-2.0
"""Field cases on `kvsafe-lmcache` behind the real manager: F05, F10, F11, F29, F30.

Each has its positive control beside it: with nothing wrong the same call hits. Tier, clients,
manager, sealing and proofs are real; the engine and the server are played by the test.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult

from conformance.lmcache import client_suite
from conformance.lmcache.hostile import HostileServer
from conformance.lmcache.hostile_resp import HostileRedis
from kvsafe.lmcache.frames import Command
from kvsafe.seal.refusal import RefusalKind
from tests.engine_unit.peer_world import NOTE_OF_PAGES, data, peer_world, put
from tests.engine_unit.sealed_world import key_of
from tests.support import stations
from tests.support.peers import Hangup, LmServer, RespServer

A, B = key_of(1), key_of(2)
HIT, MISS = LookupResult.HIT, LookupResult.MISS
Server = LmServer | RespServer
SCHEMES = {"lm": LmServer, "resp": RespServer}


@pytest.fixture(params=SCHEMES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of each kind."""
    made = SCHEMES[request.param]()
    yield made
    made.close()


# ---- F05: a part of what makes a chunk that chunk is left out of its name ----------------

REQUESTS: dict[str, dict[str, Any]] = {
    "salt": {"cache_salt": "tenant"},
    "adapter": {"lora_request": object()},
    "image": {"mm_features": [object()]},
    "embeddings": {"prompt_embeds": object()},
}
ENGINES: dict[str, dict[str, Any]] = {
    "model name": {"tier": {"model_name": "another"}},
    "element type": {"note": msgspec.structs.replace(NOTE_OF_PAGES, dtype="half")},
    "hash seed": {"tier": {"none_hash_seed": "another"}},
    "namespace": {"identity": {"namespace": "another"}},
    "revision": {"identity": {"revision": "another"}},
    "weights": {"identity": {"weights": b"\1" * 32}},
    "layout": {"identity": {"kv_layout": "another"}},
    "rank": {"identity": {"rank_map": "another"}},
    "groups": {"identity": {"groups": [1]}},
}


@pytest.mark.parametrize("what", REQUESTS)
def test_f05_another_request_is_another_chunk(tmp_path: Path, server: Server, what: str) -> None:
    with peer_world(tmp_path, server) as world:
        world.kept(A)
        assert not world.loaded(A, **REQUESTS[what])
        assert world.loaded(A)


@pytest.mark.parametrize("what", ENGINES)
def test_f05_another_engine_is_another_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    server = LmServer()
    with contextlib.closing(server):
        with peer_world(tmp_path, server) as world:
            world.kept(A)
        chosen = dict(ENGINES[what])
        changes = chosen.pop("identity", {})
        same = stations.invented_identity
        with monkeypatch.context() as patch:
            patch.setattr(stations, "invented_identity", lambda: same(**changes))
            with peer_world(tmp_path, server, **chosen) as world:
                assert not world.loaded(A)
        with peer_world(tmp_path, server) as world:
            assert world.loaded(A)


# ---- F10: other requests' KV out of a shared store and shared buffers ---------------------


def test_f10_every_loaded_chunk_is_the_one_that_was_asked_for(
    tmp_path: Path, server: Server
) -> None:
    """Two engines, several threads each, one server; now and then a connection breaks."""
    dice, keys = random.Random(10), [key_of(number) for number in range(12)]
    replies = itertools.count(1)
    broke: list[int] = []

    def hook(_: Any, honest: bytes) -> bytes:
        number = next(replies)
        if number % 40 == 0:
            broke.append(number)
            raise Hangup
        return honest

    server.hook = hook
    hits = 0
    options: dict[str, Any] = {"rows": 12, "tier": {"threads": 4}}
    with (
        peer_world(tmp_path, server, **options) as one,
        peer_world(tmp_path, server, **options) as two,
    ):
        for _ in range(4):
            for world in (one, two):
                for key in dice.sample(keys, 8):
                    world.store(key, context=world.asks(key))
            for world in (one, two):
                world.flush()
                world.forget_rows()
            contexts = [(w, key, w.asks(key)) for w in (one, two) for key in dice.sample(keys, 6)]
            for world, key, context in contexts:  # all under way before one is waited for
                world.lookup(key, context)
            hits += sum(world.ask(key, context) is HIT for world, key, context in contexts)
            for world in (one, two):
                world.prove_offers()
                world.forget_rows()
    assert hits > 10
    assert broke


def test_f10_a_chunk_under_anothers_name_is_refused(tmp_path: Path, server: Server) -> None:
    with peer_world(tmp_path, server) as world:
        world.kept(A)
        world.kept(B)
        assert world.loaded(A)
        assert world.loaded(B)
        world.forget_rows()
        one, other = world.chunks_there
        first, second = data(server, one), data(server, other)
        put(server, one, second)
        put(server, other, first)
        assert not world.loaded(A)
        assert not world.loaded(B)
        assert world.refusals() == {str(int(RefusalKind.PAYLOAD_TAG)): 2}


# ---- F11: a load that failed goes on being a hit ------------------------------------------


def _gets(server: Server) -> int:
    wanted = (Command.GET, b"GET")
    return sum(asked[0] in wanted for asked in server.asked)


def _vanish(server: Server) -> None:
    server.values = {}


def _spoil(server: Server) -> None:
    for name in list(server.values):
        value = bytearray(data(server, name))
        value[len(value) // 2] ^= 1
        put(server, name, bytes(value))


def _answer_lookups_only(server: Server) -> None:
    def hook(asked: Any, honest: bytes) -> bytes:
        verb = asked[0] if isinstance(asked, list) else asked.command
        if verb in (Command.GET, b"GET"):
            raise Hangup(honest[: len(honest) // 2])
        return honest

    server.hook = hook


@pytest.mark.parametrize("fault", [_vanish, _spoil, _answer_lookups_only])
def test_f11_a_failed_load_is_no_hit_any_more_and_the_next_store_heals(
    tmp_path: Path, server: Server, fault: Any
) -> None:
    with peer_world(tmp_path, server) as world:
        world.kept(A)
        context = world.asks(A)
        # The lookup has been answered by the server; the fault comes before the load.
        world.lookup(A, context)
        world.step()
        fault(server)
        assert world.ask(A, context) is MISS
        before = _gets(server)
        for _ in range(20):
            assert world.lookup(A, context) is MISS
            world.step()
        world.flush()
        assert _gets(server) == before
        server.hook = None
        world.kept(A)
        assert world.loaded(A)
        world.prove_offers()
        world.recount()


def test_f11_a_fault_that_passes_costs_nothing_and_keeps_the_chunk(
    tmp_path: Path, server: Server
) -> None:
    with peer_world(tmp_path, server) as world:
        world.kept(A)
        held = dict(server.values)
        server.drop_all()
        assert world.loaded(A)
        assert dict(server.values) == held
        assert world.refusals() == {}


# ---- F29: something listens, and for everybody --------------------------------------------


def _listening() -> set[str]:
    """Local addresses of this process's listening TCP sockets, as the kernel writes them."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                    found.add(words[1])
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="no /proc here")
def test_f29_the_tier_opens_no_door(tmp_path: Path, server: Server) -> None:
    port = f":{server.address.port:04X}"
    before = _listening()
    assert any(address.endswith(port) for address in before)
    with peer_world(tmp_path, server) as world:
        world.kept(A)
        assert world.loaded(A)
        assert _listening() == before


def test_f29_what_the_suites_open_is_on_the_loopback() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    client_suite.add_arguments(parser)
    assert parser.parse_args([]).listen.startswith("127.0.0.1:")
    for made in (HostileServer("good"), HostileRedis("good")):
        with made as server:
            assert server.host == "127.0.0.1"


def test_f29_whoever_has_no_key_can_neither_name_nor_make_what_vouches(
    tmp_path: Path, server: Server
) -> None:
    """Another key: other names of companions, and none of theirs is taken."""
    with peer_world(tmp_path / "one", server) as world:
        world.kept(A)
        names = set(world.companions_there)
    with peer_world(tmp_path / "two", server) as stranger:
        assert not stranger.loaded(A)
        stranger.kept(A)
        [other] = set(stranger.companions_there) - names
        assert stranger.loaded(A)
    [name] = names
    put(server, name, data(server, other))
    with peer_world(tmp_path / "one", server) as world:
        assert not world.loaded(A)
        assert world.refusals()


# ---- F30: code in bytes from the network --------------------------------------------------


class Bomb:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["KVSAFE_BOMB"],)


def test_f30_no_byte_of_a_peer_is_run(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    crater = tmp_path / "crater"
    monkeypatch.setenv("KVSAFE_BOMB", str(crater))
    bomb = pickle.dumps(Bomb())
    with peer_world(tmp_path, server, tier={"trust": "peer"}) as world:
        for names in ("chunks_there", "companions_there"):
            world.kept(A)
            assert world.loaded(A)
            world.forget_rows()
            for name in getattr(world, names):
                value = data(server, name)
                put(server, name, (bomb + value)[: len(value)])
            assert not world.loaded(A)
            world.forget_rows()
        server.hook = lambda asked, honest: bomb + honest
        assert not world.loaded(B)
        assert world.refusals()
    assert not crater.exists()
    pickle.loads(bomb)
    assert crater.exists()

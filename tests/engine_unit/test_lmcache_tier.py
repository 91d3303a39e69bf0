# SPDX-License-Identifier: Apache-2.0
"""The `kvsafe-lmcache` tier over vLLM's managers: what servers can do, and what comes of it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.v1.kv_offload.base import LookupResult

from kvsafe.engine.config.problems import ConfigError
from kvsafe.engine.lmcache.probe import PageNote
from kvsafe.lmcache import parse_key
from kvsafe.lmcache.keys import CacheKey
from kvsafe.seal.header import Header
from kvsafe.seal.refusal import RefusalKind
from tests.engine_unit.peer_world import (
    NOTE_OF_PAGES,
    PeerWorld,
    computed_chunk,
    data,
    peer_world,
    peers_reply,
    put,
    spec_of,
)
from tests.engine_unit.sealed_world import PAYLOAD, content_of, key_of
from tests.support.peers import Hangup, LmServer, RespServer, Value

A, B, C = key_of(1), key_of(2), key_of(3)
Server = LmServer | RespServer
SCHEMES = {"lm": LmServer, "resp": RespServer}


@pytest.fixture(params=SCHEMES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of each kind."""
    made = SCHEMES[request.param]()
    yield made
    made.close()


@pytest.fixture
def lm() -> Iterator[LmServer]:
    """A lm:// server."""
    made = LmServer()
    yield made
    made.close()


def test_what_is_stored_comes_back_proven(tmp_path: Path, server: Server) -> None:
    with peer_world(tmp_path, server) as world:
        world.kept(A, B)
        assert len(world.chunks_there) == len(world.companions_there) == 2
        context = world.asks(A, B)
        assert world.ask(A, context) is world.ask(B, context) is LookupResult.HIT
        world.prove_offers()
        assert len(world.offered()) == 2
        assert world.refusals() == {}
        world.recount()


def test_a_peer_finds_kv_2ltd_under_its_own_key(tmp_path: Path, lm: LmServer) -> None:
    with peer_world(tmp_path, lm) as world:
        world.kept(A)
        [name] = world.chunks_there
        key = parse_key(name)
        assert isinstance(key, CacheKey)
        assert (key.model, key.world_size, key.worker) == ("some/model", 1, 0)
        assert (key.dtype, key.tags) == ("bfloat16", ())
        assert lm.values[name].reply == peers_reply()
        # The same bytes in another order: nothing but the place of each changes.
        assert data(lm, name) != content_of(A)
        assert sorted(data(lm, name)) == sorted(content_of(A))
        assert all(parse_key(name) for name in world.companions_there)


def test_a_second_engine_with_the_same_state_reads_it(tmp_path: Path, server: Server) -> None:
    with peer_world(tmp_path, server) as writer:
        writer.kept(A)
    with peer_world(tmp_path, server) as reader:
        assert reader.loaded(A)
        assert not reader.loaded(B)
        reader.prove_offers()


def _shared(tmp_path: Path, *, epoch: bool) -> dict[str, Any]:
    """Options of engines on two machines: one key, and one epoch file or one each."""
    chosen = {"key_file": str(tmp_path / "keys" / "keys.json")}
    return {**chosen, "epoch_file": str(tmp_path / "epochs/epoch-kv.json")} if epoch else chosen


@pytest.mark.parametrize("epoch", [True, False])
def test_engines_with_state_folders_of_their_own_need_one_epoch_file(
    tmp_path: Path, server: Server, epoch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    common = _shared(tmp_path, epoch=epoch)
    with peer_world(tmp_path / "one", server, **common) as writer:
        writer.epochs.raise_epoch("so that it is not the first number")
        writer.kept(A)
        writer.kept(B)
    with peer_world(tmp_path / "two", server, **common) as reader:
        assert reader.loaded(A) is reader.loaded(B) is epoch
        unknown = str(int(RefusalKind.EPOCH_UNKNOWN))
        assert reader.refusals() == ({} if epoch else {unknown: 2})
        if epoch:
            reader.epochs.raise_epoch("for all of them")
    # One line however many chunks, and it says what to do.
    assert sum("epoch_file" in line for line in caplog.messages) == (0 if epoch else 1)
    with peer_world(tmp_path / "one", server, **common) as again:
        assert again.loaded(A) is not epoch


def _flip(value: bytes) -> bytes:
    return value[:100] + bytes([value[100] ^ 1]) + value[101:]


def _spoil_chunk(world: PeerWorld) -> None:
    name = world.chunks_there[0]
    put(world.server, name, _flip(data(world.server, name)))


def _spoil_header(world: PeerWorld) -> None:
    name = world.companions_there[0]
    put(world.server, name, _flip(data(world.server, name)))


def _spoil_tail(world: PeerWorld) -> None:
    name = world.companions_there[0]
    put(world.server, name, data(world.server, name)[:-1] + b"?")


TAMPERED: dict[str, tuple[Callable[[PeerWorld], None], RefusalKind]] = {
    "a bit of the chunk": (_spoil_chunk, RefusalKind.PAYLOAD_TAG),
    "a bit of the companion's header": (_spoil_header, RefusalKind.HEADER_TAG),
    "a byte of the companion's tail": (_spoil_tail, RefusalKind.PEER_COMPANION),
    "another chunk in its place": (
        lambda world: put(world.server, world.chunks_there[0], computed_chunk()),
        RefusalKind.PAYLOAD_TAG,
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
@pytest.mark.parametrize("trust", ["attested", "peer"])
def test_tampering_is_refused_and_the_next_store_heals(
    tmp_path: Path, server: Server, what: str, trust: str
) -> None:
    spoil, kind = TAMPERED[what]
    with peer_world(tmp_path, server, tier={"trust": trust}) as world:
        world.kept(A)
        spoil(world)
        assert not world.loaded(A)
        assert world.refusals() == {str(int(kind)): 1}
        world.kept(A)
        assert world.loaded(A)
        world.prove_offers()


def test_two_chunks_that_were_exchanged_are_refused(tmp_path: Path, server: Server) -> None:
    with peer_world(tmp_path, server) as world:
        world.kept(A)
        world.kept(B)
        for names in (world.chunks_there, world.companions_there):
            one, other = (data(server, name) for name in names)
            put(server, names[0], other)
            put(server, names[1], one)
        assert not world.loaded(A)
        assert not world.loaded(B)
        assert world.refusals() == {str(int(RefusalKind.PEER_COMPANION)): 2}


def test_without_a_companion_it_is_a_miss_unless_peers_are_trusted(
    tmp_path: Path, server: Server
) -> None:
    with peer_world(tmp_path, server) as world:
        world.kept(A)
        for name in world.companions_there:
            del server.values[name]
        put(server, world.chunks_there[0], computed_chunk())
        assert not world.loaded(A)
        assert world.refusals() == {}
    with peer_world(tmp_path, server, tier={"trust": "peer"}) as world:
        assert world.loaded(A)
        assert world.offered() == [A]
        row = world.primary.row_of(A)
        assert row is not None
        assert isinstance(world.judge(A, row), Header)
        counts = world.peer.get_stats()
        assert counts is not None
        assert "kvsafe:peer_unattested_chunks" in str(counts.data)


@pytest.mark.parametrize("bad", [b"\0" * PAYLOAD, b"\xff" * PAYLOAD])
def test_a_peers_chunk_of_values_that_no_model_computes(
    tmp_path: Path, server: Server, bad: bytes
) -> None:
    with peer_world(tmp_path, server, tier={"trust": "peer"}) as world:
        world.kept(A)
        for name in world.companions_there:
            del server.values[name]
        put(server, world.chunks_there[0], bad)
        assert not world.loaded(A)
        assert world.refusals() == {str(int(RefusalKind.PEER_CONTENT)): 1}


def test_a_chunk_that_vanishes_after_its_lookup(tmp_path: Path, server: Server) -> None:
    """A server that forgets may do so; one that does not has broken its word."""
    with peer_world(tmp_path, server, fail=True) as world:
        world.kept(A)
        gone = world.chunks_there[0]

        def lm_hook(request: Any, honest: bytes) -> bytes:
            if request.key == gone:
                server.values.pop(gone, None)
            return honest

        def resp_hook(parts: list[bytes], honest: bytes) -> bytes:
            if parts[0] == b"EXISTS" and parts[1] == gone:
                server.values.pop(gone, None)
            return honest

        if isinstance(server, LmServer):
            server.hook = lm_hook
        else:
            server.hook = resp_hook
        context = world.asks(A)
        answer = world.ask(A, context)
        if isinstance(server, RespServer):
            assert answer is LookupResult.MISS
            assert world.refusals() == {}
        else:
            # Under the fail policy: told "hit" once, so that the load fails with the refusal.
            assert answer is LookupResult.HIT
            assert world.refusals() == {str(int(RefusalKind.PEER_ABSENT)): 1}
            assert world.verdicts.take(context.req_id) is not None


def test_a_torn_value_is_refused_and_written_anew(tmp_path: Path, lm: LmServer) -> None:
    """What LMCache's server does with a PUT that was cut off: a header, then the end."""
    with peer_world(tmp_path, lm) as world:
        world.kept(A)
        name = world.chunks_there[0]
        value = lm.values[name]

        def hook(request: Any, honest: bytes) -> bytes:
            if request.key == name and request.command == 2 and lm.values[name] is value:
                raise Hangup(honest[:36])
            return honest

        lm.hook = hook
        assert not world.loaded(A)
        assert world.refusals() == {str(int(RefusalKind.PEER_TORN)): 1}
        world.kept(A)
        assert world.loaded(A)


def test_a_server_that_is_not_there_is_a_miss_and_nothing_is_refused(
    tmp_path: Path, server: Server
) -> None:
    with peer_world(tmp_path, server) as world:
        world.kept(A)
        server.close()
        assert not world.loaded(A)
        world.kept(B)
        assert not world.loaded(B)
        assert world.refusals() == {}
        world.recount()


def test_what_is_there_is_not_sent_again(tmp_path: Path, lm: LmServer) -> None:
    with peer_world(tmp_path, lm) as world:
        world.kept(A)
        world.kept(A)
        puts = [key for command, key in lm.asked if command == 1]
        assert len(puts) == 2


def test_a_reset_reaches_what_was_attested_before(tmp_path: Path, server: Server) -> None:
    with peer_world(tmp_path, server) as world:
        world.kept(A)
        world.epochs.raise_epoch("test")
        world.manager.reset_cache()
        assert not world.loaded(A)
        assert set(world.refusals()) <= {str(int(RefusalKind.EPOCH_REVOKED))}
        world.kept(A)
        assert world.loaded(A)


def test_after_a_reset_that_may_have_brought_weights_peers_are_left_alone(
    tmp_path: Path, server: Server
) -> None:
    tier = {"trust": "peer"}
    with peer_world(tmp_path, server, tier=tier, weights_survive_reset=False) as world:
        world.kept(A)
        assert world.loaded(A)
        held = dict(server.values)
        world.epochs.raise_epoch("new weights")
        world.manager.reset_cache()
        assert not world.loaded(A)
        world.kept(B)
        assert server.values == held
        assert world.refusals() == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_request": object()},
        {"mm_features": [object()]},
        {"prompt_embeds": object()},
        {"resumable": True},
    ],
)
def test_requests_that_lmcache_would_confuse_stay_away(
    tmp_path: Path, server: Server, changes: dict[str, Any]
) -> None:
    """F05: an adapter, an image or an embedding is in vLLM's key, and not in LMCache's."""
    with peer_world(tmp_path, server) as world:
        world.kept(A, **changes)
        assert server.values == {}
        world.kept(A)
        assert not world.loaded(A, **changes)
        assert world.loaded(A)


def test_a_salt_stays_away_from_lm_and_is_in_the_key_of_resp(
    tmp_path: Path, server: Server
) -> None:
    with peer_world(tmp_path, server) as world:
        world.kept(A)
        world.kept(B, cache_salt="tenant-1")
        salted = [name for name in world.chunks_there if b"@tenant-1" in str(name).encode()]
        assert len(salted) == isinstance(server, RespServer)
        assert world.loaded(B, cache_salt="tenant-1") == isinstance(server, RespServer)
        world.forget_rows()
        assert not world.loaded(B, cache_salt="tenant-2")
        assert not world.loaded(A, cache_salt="tenant-1")
        assert world.loaded(A)


def test_tags_are_in_the_key_and_bad_ones_stay_away(tmp_path: Path, lm: LmServer) -> None:
    with peer_world(tmp_path, lm) as world:
        world.kept(A, params={"lmcache.tag.user": "u1"})
        assert [name for name in world.chunks_there if name.endswith("@user%u1")]
        assert not world.loaded(A)
        assert not world.loaded(A, params={"lmcache.tag.user": "u2"})
        assert world.loaded(A, params={"lmcache.tag.user": "u1"})
        world.kept(B, params={"lmcache.tag.user": "u1@org%o2"})
        assert world.refusals() == {str(int(RefusalKind.PEER_KEY)): 1}
        assert len(world.chunks_there) == 1


def test_decoded_chunks_are_stored_only_if_asked_for(tmp_path: Path, lm: LmServer) -> None:
    with peer_world(tmp_path, lm) as world:
        world.kept(A, B, num_prompt_tokens=12)
        assert len(world.chunks_there) == 1
    lm.values.clear()
    with peer_world(tmp_path, lm, tier={"offload_prompt_only": False}) as world:
        world.kept(A, B, num_prompt_tokens=12)
        assert len(world.chunks_there) == 2


@pytest.mark.parametrize(
    ("tier", "note", "spec", "words"),
    [
        ({"chunk_tokens": 256}, None, {}, r"256, but this engine's chunks have 8 x 1 = 8 tokens"),
        ({"world_size": 2}, None, {}, "world_size: found 2; allowed: 1"),
        ({}, None, {"groups": 2}, "2 KV-cache groups"),
        ({}, None, {"replicated": True}, "another kind"),
        ({}, None, {"pp_size": 2}, "pipeline"),
        ({}, PageNote(problem="a sliding window"), {}, "a sliding window"),
        ({"model_name": "a@b"}, None, {}, "model_name"),
    ],
)
def test_what_does_not_fit_refuses_to_start_with_the_numbers(
    tmp_path: Path,
    lm: LmServer,
    monkeypatch: pytest.MonkeyPatch,
    tier: dict[str, Any],
    note: PageNote | None,
    spec: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.setattr(
        "tests.engine_unit.peer_world.spec_of", lambda station: spec_of(station, **spec)
    )
    with pytest.raises(ConfigError, match=words):
        PeerWorld(tmp_path, lm, tier=tier, note=note or NOTE_OF_PAGES)


def test_pages_that_do_not_make_a_slice_refuse_to_start(tmp_path: Path, lm: LmServer) -> None:
    smaller = msgspec.structs.replace(NOTE_OF_PAGES, heads=2)
    with pytest.raises(ConfigError, match="slices of"):
        PeerWorld(tmp_path, lm, note=smaller)


def test_a_value_of_another_shape_is_refused(tmp_path: Path, lm: LmServer) -> None:
    with peer_world(tmp_path, lm) as world:
        world.kept(A)
        name = world.chunks_there[0]
        value = lm.values[name]
        lm.values[name] = Value(value.reply._replace(dims=(2, 8, 2, 64)), value.data)
        assert not world.loaded(A)
        assert world.refusals() == {str(int(RefusalKind.PEER_SHAPE)): 1}

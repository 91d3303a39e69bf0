# SPDX-License-Identifier: Apache-2.0
"""`kvsafe-lmcache` in real engines: the bytes are LMCache's, and the tokens stay right."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsafe.lmcache import CacheKey, parse_key
from kvsafe.lmcache.layout import PageShape, page_rules
from kvsafe.seal.refusal import RefusalKind
from tests.support import models
from tests.support.engine import Engine, EngineFailed, Nursery, Place, prompt
from tests.support.peers import LmServer, RespServer, Value

pytestmark = pytest.mark.engine
longer = pytest.mark.skipif(
    not os.environ.get("KVSAFE_LONG"), reason="an engine more for what unit tests cover as well"
)

CHUNK = 256
LAYERS, HEADS, SIZE = 4, 4, 64
Server = LmServer | RespServer


@pytest.fixture
def lm() -> Iterator[LmServer]:
    """A lm:// server."""
    made = LmServer()
    yield made
    made.close()


def settings(place: Place, server: Server, policy: str = "recompute", **tier: Any) -> Any:
    """An engine whose only tier is this server."""
    scheme = "lm" if isinstance(server, LmServer) else "resp"
    chosen = {"type": "kvsafe-lmcache", "url": f"{scheme}://{server.address}", **tier}
    return place.settings(
        policy, block_size=CHUNK, secondary_tiers=[{"model_name": "tiny", **chosen}]
    )


def companions(server: LmServer) -> list[str]:
    """The companions on a server."""
    return [name for name in server.values if "kvsafe" in name]


def chunks(server: LmServer) -> list[str]:
    """The chunks on a server."""
    return [name for name in server.values if "kvsafe" not in name]


def again(engine: Engine, question: list[int]) -> tuple[tuple[int, ...], int, str]:
    """Ask once more with nothing on the device and in the host rows."""
    engine.drop_host()
    done = engine.ask(question)
    engine.settle()
    return done.tokens, done.cached, done.finish


def test_two_engines_share_attested_chunks_and_tampering_is_found(
    nursery: Nursery, tmp_path: Path, lm: LmServer
) -> None:
    """The writer recomputes what is refused, the reader's policy is that the request fails."""
    question, place = prompt(11, 600), Place(tmp_path)
    chosen = settings(place, lm)
    files = {"type": "fs", "root_dir": str(place.store)}
    chosen["kv_connector_extra_config"]["secondary_tiers"].append(files)
    with nursery.running(models.qwen3(), kv_transfer_config=chosen) as engine:
        cold = engine.stored(question)
        assert (cold.cached, len(chunks(lm)), len(companions(lm))) == (0, 2, 2)
        is_kv_2ltd(lm, place)
        for path in place.files():
            path.unlink()
        _flip(lm, *chunks(lm))
        assert again(engine, question) == (cold.tokens, 0, "length")
        assert RefusalKind.PAYLOAD_TAG in engine.metrics().refusals()
    chosen = settings(place, lm, "fail")
    with nursery.running(models.qwen3(), kv_transfer_config=chosen) as engine:
        # What was refused has been written anew.
        first = engine.ask(question)
        assert (first.tokens, first.cached) == (cold.tokens, 512)
        found = engine.metrics()
        assert found.refusals() == {}
        assert found.total("peer_trust_info", trust="attested") == 1
        kept = copy.copy(lm.values)
        _flip(lm, chunks(lm)[0])
        assert again(engine, question)[2] == "error"
        found = engine.metrics()
        assert RefusalKind.PAYLOAD_TAG in found.refusals()
        # Nobody attests these: a miss, without a refusal.
        lm.values = {name: value for name, value in kept.items() if "kvsafe" not in name}
        assert again(engine, question) == (cold.tokens, 0, "length")
        assert again(engine, question) == (cold.tokens, 512, "length")
        lm.values = {}
        assert again(engine, question) == (cold.tokens, 0, "length")
        server_gone(lm)
        assert again(engine, question) == (cold.tokens, 0, "length")
        assert engine.metrics().refusals() == found.refusals()


def server_gone(server: Server) -> None:
    """Nothing listens any more."""
    server.close()


def _flip(server: LmServer, *names: str) -> None:
    for name in names:
        value = server.values[name]
        spoiled = bytearray(value.data)
        spoiled[len(spoiled) // 2] ^= 1
        server.values[name] = Value(value.reply, bytes(spoiled))


@pytest.mark.parametrize("kind", [pytest.param(LmServer, marks=longer), RespServer])
def test_peers_are_trusted_only_by_name(
    nursery: Nursery, tmp_path: Path, kind: type[LmServer] | type[RespServer]
) -> None:
    question, server = prompt(12, 600), kind()
    chosen = settings(Place(tmp_path), server, trust="peer")
    try:
        with nursery.running(models.qwen3(), kv_transfer_config=chosen) as engine:
            cold = engine.stored(question)
            for name in [name for name in server.values if "kvsafe" in str(name)]:
                del server.values[name]  # type: ignore[arg-type]
            assert again(engine, question)[:2] == (cold.tokens, 512)
            found = engine.metrics()
        assert found.total("peer_unattested_chunks_total") == 2
        assert found.total("peer_trust_info", trust="peer") == 1
        assert found.refusals() == {}
    finally:
        server.close()


def is_kv_2ltd(lm: LmServer, place: Place) -> None:
    """Every chunk against the pages themselves: an fs tier of the engine keeps them as they are."""
    rows = [np.frombuffer(path.read_bytes(), np.uint8) for path in place.files()]
    chosen = [lm.values[name] for name in chunks(lm)]
    length = 2 * LAYERS * CHUNK * HEADS * SIZE * 4
    for reply in (value.reply for value in chosen):
        assert (reply.fmt, reply.dtype, reply.dims) == (1, 4, (2, LAYERS, CHUNK, HEADS * SIZE))
    expected = {as_pages(row[4096 : 4096 + length].view(np.uint32)) for row in rows}
    assert {value.data for value in chosen} == expected
    assert page_rules(PageShape(CHUNK // 2, HEADS, SIZE, 4))[0].name == "k-transposed"


def as_pages(pages: Any) -> bytes:
    """KV_2LTD of the pages of one row, written down a second time.

    vLLM on x86 without AMX: per block and head, K as [size][tokens], then V as [tokens][size].
    """
    by_head = pages.reshape(LAYERS, 2, HEADS, 2, -1)
    keys = by_head[:, :, :, 0].reshape(LAYERS, 2, HEADS, SIZE, CHUNK // 2)
    values = by_head[:, :, :, 1].reshape(LAYERS, 2, HEADS, CHUNK // 2, SIZE)
    planes = (keys.transpose(0, 1, 4, 2, 3), values.transpose(0, 1, 3, 2, 4))
    return b"".join(plane.tobytes() for plane in planes)


@longer
def test_two_workers_have_two_chunks_and_one_companion(
    nursery: Nursery, tmp_path: Path, lm: LmServer
) -> None:
    question, chosen = prompt(15, 300), settings(Place(tmp_path), lm)
    two: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        "distributed_executor_backend": "mp",
    }
    with nursery.running(models.qwen3(), kv_transfer_config=chosen, **two) as engine:
        cold = engine.stored(question)
        keys = [parse_key(name) for name in chunks(lm)]
        places = {(key.world_size, key.worker) for key in keys if isinstance(key, CacheKey)}
        assert places == {(2, 0), (2, 1)}
        assert {lm.values[name].reply.dims for name in chunks(lm)} == {(2, LAYERS, CHUNK, 128)}
        assert len(companions(lm)) == 1
        assert again(engine, question)[:2] == (cold.tokens, CHUNK)
        one, other = chunks(lm)
        lm.values[one], lm.values[other] = lm.values[other], lm.values[one]
        assert again(engine, question)[:2] == (cold.tokens, 0)
        assert RefusalKind.PAYLOAD_TAG in engine.metrics().refusals()


@longer
@pytest.mark.parametrize(
    ("model", "tier", "words"),
    [
        (models.qwen3, {"chunk_tokens": 128}, "128 x 2 = 256 tokens"),
        (models.gemma3, {}, "KV-cache groups"),
    ],
)
def test_engines_that_cannot_share_refuse_to_start(
    nursery: Nursery, tmp_path: Path, lm: LmServer, model: Any, tier: dict[str, Any], words: str
) -> None:
    engine = nursery.engine()
    chosen = settings(Place(tmp_path), lm, **tier)
    try:
        with pytest.raises(EngineFailed, match=words):
            engine.start(model(), kv_transfer_config=chosen)
    finally:
        engine.stop()

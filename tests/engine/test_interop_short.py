# SPDX-License-Identifier: Apache-2.0
"""`make interop` in short: LMCache's own server and client between two kvsafe engines.

Only where `conformance/lmcache/setup` has made LMCache's environment. LMCache's half runs there and
starts no engine: its server keeps the chunks, its client reads what our engine wrote and writes it
under the name of another model, where nobody attests it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.lmcache.driver import Driver
from conformance.lmcache.peers.servers import ROOT, NotHere, lm_server, peer_python
from conformance.lmcache.wire import Meta
from kvsafe.lmcache.hashes import hash_chain
from kvsafe.lmcache.keys import CacheKey
from tests.support import models
from tests.support.engine import Engine, Nursery, Place, prompt

pytestmark = pytest.mark.engine

CHUNK = 256
DIMS = (2, 4, CHUNK, 256)
META = Meta(2 * 4 * CHUNK * 256 * 4, 1, 4, DIMS)
"""A chunk of the tiny model: K and V, layers, tokens, heads x size, in float32."""
PATIENCE_S = 60.0


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """LMCache's own lm:// server."""
    try:
        with lm_server() as found:
            yield found
    except NotHere as error:
        pytest.skip(str(error))


@pytest.fixture
def client(address: tuple[str, int]) -> Iterator[Driver]:
    """LMCache's own client, connected to that server."""
    command = ["env", f"PYTHONPATH={ROOT}", str(peer_python())]
    driver = Driver([*command, "-m", "conformance.lmcache.drivers.lmcache_peer"], PATIENCE_S)
    try:
        assert driver.open("lm", *address)[0] == "open"
        yield driver
    finally:
        driver.close()


def tier(address: tuple[str, int], model: str, trust: str) -> dict[str, str]:
    """A tier on that server."""
    url = f"lm://{address[0]}:{address[1]}"
    return {"type": "kvsafe-lmcache", "url": url, "model_name": model, "trust": trust}


def keys(model: str, tokens: list[int]) -> list[str]:
    """LMCache's keys of the whole chunks of a prompt."""
    chain, texts = hash_chain("vllm"), []
    value = chain.none_hash
    for end in range(CHUNK, len(tokens) + 1, CHUNK):
        value = chain.extend(value, tokens[end - CHUNK : end])
        texts.append(CacheKey(model, 1, 0, chain.number(value), "float").text())
    return texts


def hand_over(client: Driver, tokens: list[int]) -> None:
    """LMCache's client reads our chunks and writes the same bytes as another model's."""
    for ours, theirs in zip(keys("ours", tokens), keys("theirs", tokens), strict=True):
        word, answer = client.call("fetch", ours, META)
        assert (word, answer.get("shape")) == ("hit", [*DIMS])
        data = base64.b64decode(answer["data"])
        assert len(data) == META.length and any(data)
        assert client.call("store", theirs, META, data)[0] == "stored"
        assert client.call("look", theirs, META)[0] == "yes"


def again(engine: Engine, question: list[int]) -> tuple[tuple[int, ...], int]:
    """Ask with nothing on the device and in the host rows."""
    engine.drop_host()
    done = engine.ask(question)
    engine.settle()
    return done.tokens, done.cached


def test_lmcache_reads_what_we_write_and_we_read_what_lmcache_writes(
    nursery: Nursery, tmp_path: Path, address: tuple[str, int], client: Driver
) -> None:
    attested, handed = prompt(31, 600), prompt(32, 600)
    place = Place(tmp_path)
    ours, theirs = tier(address, "ours", "attested"), tier(address, "theirs", "peer")

    def settings(*tiers: dict[str, str]) -> Any:
        return place.settings(block_size=CHUNK, secondary_tiers=[*tiers])

    with nursery.running(models.qwen3(), kv_transfer_config=settings(ours)) as engine:
        cold = [engine.stored(question) for question in (attested, handed)]
        assert [done.cached for done in cold] == [0, 0]
    assert client.call("look", keys("theirs", handed)[0], META)[0] == "no"
    hand_over(client, handed)
    with nursery.running(models.qwen3(), kv_transfer_config=settings(theirs, ours)) as engine:
        assert again(engine, handed) == (cold[1].tokens, 512)
        found = engine.metrics()
        assert found.total("peer_unattested_chunks_total") == 2
        # Nobody has handed these over: they come from the tier that attests.
        assert again(engine, attested) == (cold[0].tokens, 512)
        found = engine.metrics()
        assert found.total("peer_unattested_chunks_total") == 2
        assert found.refusals() == {}
